"""Log probabilities of a prompt's tokens in an answer."""

from collections.abc import Sequence

from lorikeet.protocol.messages import Call
from lorikeet.text.detokenizer import Detokenizer, Vocabulary
from lorikeet.text.logprobs import LogprobsJson, json_numbers
from lorikeet_engine.request import TokenLogprobs


class PromptLogprobsJson:
    """Growing JSON of the log probabilities of one prompt's tokens. The first token has none.

    echoed: logprobs of the prompt's tokens, for a completion that echoes its prompt.
    """

    def __init__(self, call: Call, prompt: Sequence[int], vocabulary: Vocabulary) -> None:
        self._prompt, self._vocabulary = prompt, vocabulary
        self._echo_vocabulary = vocabulary.by_id if call.tokens_as_ids else vocabulary
        self._echo_alternatives = call.sampling.logprobs if call.echo else None
        self._alternatives = call.prompt_logprobs
        self._text = Detokenizer(vocabulary.tokenizer, ())
        self._entries: list[bytes] = []
        self.echoed = LogprobsJson(call.endpoint)
        self.add((None,))

    def add(self, logprobs: Sequence[TokenLogprobs | None]) -> int:
        """Add the log probabilities of the prompt's next tokens; return the number of bytes of
        their JSON.

        logprobs: one entry for each token; None for the prompt's first token.
        """
        vocabulary, begin, size = self._vocabulary, self._text.tokens, 0
        tokens = self._prompt[begin : begin + len(logprobs)]
        self._text.push(tokens)
        scored = list(zip(tokens, logprobs, strict=True))
        if (count := self._echo_alternatives) is not None:
            offsets = self._text.offsets[begin:]
            size += self.echoed.add(
                [
                    self._echo_vocabulary.describe(token, known, offset, count)
                    for (token, known), offset in zip(scored, offsets, strict=True)
                ]
            )
        if (count := self._alternatives) is not None:
            entries = b",".join([_entry(vocabulary, *one, count) for one in scored])
            self._entries.append(entries)
            size += len(entries)
        return size

    def json(self) -> bytes | None:
        """Return JSON of the answer's `prompt_logprobs` (vLLM's field); None if not asked for."""
        return None if self._alternatives is None else b"[%s]" % b",".join(self._entries)


def _entry(
    vocabulary: Vocabulary, token: int, logprobs: TokenLogprobs | None, alternatives: int
) -> bytes:
    """Return one token's entry in `prompt_logprobs`: the token and its alternatives by id.

    The entry of a prompt's first token is null.

    logprobs: None for a prompt's first token.
    """
    if logprobs is None:
        return b"null"
    top = logprobs.top[:alternatives]
    ids = [token, *[i for i, _ in top]]
    likely = json_numbers([logprobs.logprob, *[likely for _, likely in top]])
    ranks = (logprobs.rank, *range(1, len(ids)))
    entries = {
        i: b'"%d":{"logprob":%s,"rank":%d,"decoded_token":%s}'
        % (i, known, rank, vocabulary.named(i).json)
        for i, known, rank in zip(ids, likely, ranks, strict=True)
    }
    return b"{%s}" % b",".join(entries.values())
