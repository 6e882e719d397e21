"""One choice as it grows: tokens in; out what it says and calls, and how likely that was."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from lorikeet.answer_stream.detokenizer import Detokenizer
from lorikeet.answer_stream.logprobs import LikelyToken, SampledToken
from lorikeet.answer_stream.openai_format import CallDelta
from lorikeet.answer_stream.tool_calls import ForcedCallParser, ToolCallParser
from lorikeet.answer_stream.vocabulary import Vocabulary
from lorikeet_engine.request import FinishReason, TokenLogprobs, Tokens


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What is new of a choice. logprobs: of the tokens whose text this is, where asked for."""

    text: str
    calls: Sequence[CallDelta] = ()
    logprobs: Sequence[SampledToken] = ()


class ChoiceStream:
    """Follows one choice; `finish` is set with its last piece.

    reader: where the model may call tools. vocabulary: where logprobs are asked for. echo: what
    its text begins with.
    """

    def __init__(
        self,
        text: Detokenizer,
        reader: ToolCallParser | ForcedCallParser | None = None,
        vocabulary: Vocabulary | None = None,
        echo: str = "",
    ) -> None:
        self._text = text
        self._reader = reader
        self._vocabulary = vocabulary
        self._echo = echo
        self._drawn: list[tuple[int, TokenLogprobs]] = []
        self._told = 0  # tokens
        self.finish: FinishReason | None = None

    @property
    def tokens(self) -> int:
        """How many it has made."""
        return self._text.tokens

    def take(self, output: Tokens) -> OutputDelta:
        """Take new tokens."""
        piece = self._text.push(output.token_ids)
        if self._text.stopped:
            self.finish = FinishReason.STOP
        elif output.finish is not None:
            self.finish = output.finish
            piece += self._text.finish()
        if self._echo:
            piece, self._echo = self._echo + piece, ""
        calls: Sequence[CallDelta] = ()
        if self._reader is not None:
            piece, calls = self._reader.push(piece, last=self.finish is not None)
            if self._reader.done and self.finish is None:
                self.finish = FinishReason.STOP
        if self._vocabulary is None:
            return OutputDelta(piece, calls)
        self._drawn += zip(output.token_ids, output.logprobs, strict=True)
        return OutputDelta(piece, calls, self._sent(self._vocabulary))

    def _sent(self, vocabulary: Vocabulary) -> list[SampledToken]:
        """Tokens whose text is sent now, as far as they are text and of no call."""
        reader, offsets, begin = self._reader, self._text.offsets, self._told
        self._told = self._text.sent_tokens
        if reader is not None and self.finish is None:
            self._told = bisect_left(offsets, reader.read, begin, self._told)
        return [
            self._describe(vocabulary, at)
            for at in range(begin, self._told)
            if self._drawn[at][0] not in vocabulary.special
            and (reader is None or reader.says(offsets[at]))
        ]

    def _describe(self, vocabulary: Vocabulary, at: int) -> SampledToken:
        token, logprobs = self._drawn[at]

        def named(token: int, logprob: float) -> LikelyToken:
            return LikelyToken(vocabulary.name_of(token), vocabulary.bytes_of(token), logprob)

        top = tuple(named(*likely) for likely in logprobs.top)
        return SampledToken(named(token, logprobs.logprob), top, self._text.offsets[at])
