"""A prompt in an answer: how likely the model thought its tokens, as JSON that grows with them."""

from collections.abc import Sequence

from lorikeet.answer_stream.detokenizer import Detokenizer, Vocabulary
from lorikeet.answer_stream.logprobs_format import LogprobsJson, numbers
from lorikeet.protocol.messages import Call
from lorikeet_engine.request import TokenLogprobs


class ScoredPrompt:
    """The tokens of one prompt, in their order; nothing says how likely the first one was.

    echoed: what the `logprobs` of a completion that echoes its prompt begin with.
    """

    def __init__(self, call: Call, prompt: Sequence[int], vocabulary: Vocabulary) -> None:
        self._prompt, self._vocabulary = prompt, vocabulary
        self._echoes = call.sampling.logprobs if call.echo else None
        self._tells = call.prompt_logprobs
        self._text = Detokenizer(vocabulary.tokenizer, ())
        self._told: list[bytes] = []
        self.echoed = LogprobsJson(call.endpoint)
        self.add((None,))

    def add(self, logprobs: Sequence[TokenLogprobs | None]) -> int:
        """Take the log probabilities of the next tokens; None for the first.

        Return how many bytes they take in the answer.
        """
        vocabulary, begin, size = self._vocabulary, self._text.tokens, 0
        tokens = self._prompt[begin : begin + len(logprobs)]
        self._text.push(tokens)
        scored = list(zip(tokens, logprobs, strict=True))
        if (count := self._echoes) is not None:
            offsets = self._text.offsets[begin:]
            size += self.echoed.add(
                [
                    vocabulary.describe(token, known, offset, count)
                    for (token, known), offset in zip(scored, offsets, strict=True)
                ]
            )
        if (count := self._tells) is not None:
            told = b",".join([_told(vocabulary, *one, count) for one in scored])
            self._told.append(told)
            size += len(told)
        return size

    def json(self) -> bytes | None:
        """Return the answer's `prompt_logprobs`, vLLM's field; None if not asked for."""
        return None if self._tells is None else b"[%s]" % b",".join(self._told)


def _told(
    vocabulary: Vocabulary, token: int, logprobs: TokenLogprobs | None, alternatives: int
) -> bytes:
    """Return one token's part of `prompt_logprobs`: by their ids it and the most likely ones.

    null for the first. Only the latter have a rank.
    """
    if logprobs is None:
        return b"null"
    top = logprobs.top[:alternatives]
    ids = [token, *[i for i, _ in top]]
    likely = numbers([logprobs.logprob, *[likely for _, likely in top]])
    ranks = (b"null", *(b"%d" % rank for rank in range(1, len(ids))))
    told = {
        i: b'"%d":{"logprob":%s,"rank":%s,"decoded_token":%s}'
        % (i, known, rank, vocabulary.named(i).json)
        for i, known, rank in zip(ids, likely, ranks, strict=True)
    }
    return b"{%s}" % b",".join(told.values())
