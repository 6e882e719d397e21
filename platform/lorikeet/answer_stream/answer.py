"""The answer to one call as it grows: tokens in, the client's bytes out and on to its gateway."""

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from lorikeet.answer_stream.billed_tokens import BilledTokens
from lorikeet.answer_stream.detokenizer import Detokenizer
from lorikeet.answer_stream.logprobs import LikelyToken, SampledToken
from lorikeet.answer_stream.openai_format import CallDelta, Choice, EventStream, json_body
from lorikeet.answer_stream.response_stream import ResponseStream
from lorikeet.answer_stream.tool_calls import ForcedCallParser, ToolCallParser, ToolSyntax
from lorikeet.answer_stream.vocabulary import Vocabulary
from lorikeet.errors import engine_code
from lorikeet.protocol.messages import AnswerHeader, Call, FinalUsage, Refusal, StreamItem
from lorikeet_engine.errors import AdapterError, EngineError
from lorikeet_engine.request import (
    EngineTimings,
    Failed,
    FinishReason,
    Output,
    TokenLogprobs,
    Tokens,
)

Abort = Callable[[str, int], object]
"""Takes a request's id and a choice."""


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What is new in a choice. logprobs: those of the tokens of this text, where asked for."""

    text: str
    calls: Sequence[CallDelta] = ()
    logprobs: Sequence[SampledToken] = ()


class ChoiceStream:
    """Turns the tokens of one choice into text and calls; `finish` is set with the last delta.

    parser: where the model may call tools. vocabulary: where logprobs are asked for. echo: what
    the text begins with.
    """

    def __init__(
        self,
        text: Detokenizer,
        parser: ToolCallParser | ForcedCallParser | None = None,
        vocabulary: Vocabulary | None = None,
        echo: str = "",
    ) -> None:
        self._text = text
        self._parser = parser
        self._vocabulary = vocabulary
        self._echo = echo
        self._sampled: list[tuple[int, TokenLogprobs]] = []
        self._sent_tokens = 0
        self.finish: FinishReason | None = None

    @property
    def tokens(self) -> int:
        """How many tokens the choice has."""
        return self._text.tokens

    def take(self, output: Tokens) -> OutputDelta:
        """Take new tokens."""
        text = self._text.push(output.token_ids)
        if self._text.stopped:
            self.finish = FinishReason.STOP
        elif output.finish is not None:
            self.finish = output.finish
            text += self._text.finish()
        if self._echo:
            text, self._echo = self._echo + text, ""
        calls: Sequence[CallDelta] = ()
        if self._parser is not None:
            text, calls = self._parser.push(text, last=self.finish is not None)
            if self._parser.done and self.finish is None:
                self.finish = FinishReason.STOP
        if self._vocabulary is None:
            return OutputDelta(text, calls)
        self._sampled += zip(output.token_ids, output.logprobs, strict=True)
        return OutputDelta(text, calls, self._sent_logprobs(self._vocabulary))

    def _sent_logprobs(self, vocabulary: Vocabulary) -> list[SampledToken]:
        """Return the tokens whose text is sent now, as far as they are text and of no call."""
        parser, offsets, begin = self._parser, self._text.offsets, self._sent_tokens
        end = self._text.sent_tokens
        if parser is not None and self.finish is None:
            end = bisect_left(offsets, parser.parsed, begin, end)
        self._sent_tokens = end
        return [
            self._describe(vocabulary, at)
            for at in range(begin, end)
            if self._sampled[at][0] not in vocabulary.special
            and (parser is None or parser.is_text(offsets[at]))
        ]

    def _describe(self, vocabulary: Vocabulary, at: int) -> SampledToken:
        token, logprobs = self._sampled[at]

        def named(token: int, logprob: float) -> LikelyToken:
            return LikelyToken(vocabulary.name_of(token), vocabulary.bytes_of(token), logprob)

        top = tuple(named(*likely) for likely in logprobs.top)
        return SampledToken(named(token, logprobs.logprob), top, self._text.offsets[at])


class Answer:
    """Turns the engine's outputs for one call into the items of its answer, to the end.

    `ended` is set with the last item. `stopped` holds choices that ended while the engine
    still makes tokens for them, at a stop string or after the only call that was wanted; the owner
    aborts them and clears it. syntax: how the model writes calls of tools; None: it may call none.
    """

    def __init__(
        self,
        call: Call,
        prompts: Sequence[Sequence[int]],
        vocabulary: Vocabulary,
        syntax: ToolSyntax | None = None,
    ) -> None:
        self._call = call
        self._prompt_tokens = sum(map(len, prompts))
        self._events = EventStream(call)
        self._choices = [
            _choice(call, index, prompt, vocabulary, syntax)
            for index, prompt in enumerate(prompts)
            for _ in range(call.n)
        ]
        self._deltas: list[list[OutputDelta]] = [[] for _ in self._choices]
        self._unfinished = len(self._choices)
        self._cached: dict[int, int] = {}
        self._timings: dict[int, EngineTimings] = {}
        self.stopped: list[int] = []
        self.ended = False

    def take(self, outputs: Iterable[Output]) -> list[StreamItem]:
        """Take what the engine made; return what goes to the client, as one chunk if possible."""
        chunk = b""
        for output in outputs:
            if isinstance(output, Failed):
                self.ended = True
                refusal = refusal_of(output.error)
                return [chunk, refusal] if chunk else [refusal]
            chunk += self._advance(output)
        if self._unfinished == 0:
            self.ended = True
            usage = self._usage()
            return [usage, chunk + self._end(usage)]
        return [chunk] if chunk else []

    def _advance(self, output: Tokens) -> bytes:
        index = output.choice
        choice = self._choices[index]
        if output.timings is not None:
            self._cached.setdefault(index, output.timings.cached_tokens)
            self._timings[index] = output.timings
        if choice.finish is not None:
            return b""  # made before the engine heard of the abort
        delta = choice.take(output)
        if choice.finish is not None:
            self._unfinished -= 1
            if output.finish is None:
                self.stopped.append(index)
        if not self._call.stream:
            self._deltas[index].append(delta)
            return b""
        if not (delta.text or delta.calls or delta.logprobs or choice.finish):
            return b""
        return self._events.delta(index, delta.text, choice.finish, delta.calls, delta.logprobs)

    def _usage(self) -> FinalUsage:
        made = sum(choice.tokens for choice in self._choices)
        prompts = range(0, len(self._choices), self._call.n)
        # Choices of a prompt find in the cache what the first of them computed.
        cached = sum(
            min(self._cached.get(index + i, 0) for i in range(self._call.n)) for index in prompts
        )
        timings = tuple(self._timings.get(i, EngineTimings()) for i in range(len(self._choices)))
        return FinalUsage(self._prompt_tokens, cached, made, timings)

    def _end(self, usage: FinalUsage) -> bytes:
        if self._call.stream:
            return self._events.end(usage)
        return json_body(self._call, [self._whole(i) for i in range(len(self._choices))], usage)

    def _whole(self, index: int) -> Choice:
        deltas, finish = self._deltas[index], self._choices[index].finish
        assert finish is not None
        logprobs = None
        if self._call.sampling.logprobs is not None:
            logprobs = list(chain.from_iterable(delta.logprobs for delta in deltas))
        return Choice(
            "".join(delta.text for delta in deltas),
            finish,
            list(chain.from_iterable(delta.calls for delta in deltas)),
            logprobs,
        )


class AnswerSender:
    """Sends the gateway what the engine's outputs add to one answer, at once.

    No task waits for outputs: at thousands of deltas a second turns of the event loop would cost
    more than the work. `ended` is done when all is sent; it fails if our code does.
    """

    def __init__(
        self, call: Call, answer: Answer, meter: BilledTokens, stream: ResponseStream, abort: Abort
    ) -> None:
        self._request_id = call.request_id
        self._answer, self._meter, self._stream, self._abort = answer, meter, stream, abort
        self._header: AnswerHeader | None = None
        self._early: list[Output] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begin(self, header: AnswerHeader) -> None:
        """Send the header first, then what came before it."""
        self._header = header
        self._stream.put(self._request_id, (header,))
        for output in self._early:
            self.take(output)

    def take(self, output: Output) -> None:
        """Take an output of the engine. Raises nothing."""
        if self._header is None:
            self._early.append(output)
        elif not self.ended.done():
            try:
                self._advance(output, self._header)
            except Exception as error:
                self.ended.set_exception(error)

    def _advance(self, output: Output, header: AnswerHeader) -> None:
        items: list[StreamItem] = []
        load_s = output.timings.load_s if isinstance(output, Tokens) and output.timings else None
        if header.is_first and load_s is not None:
            self._header = replace(header, status=None, load_s=load_s)
            items.append(self._header)
        self._meter.on_outputs((output,))
        for item in self._answer.take((output,)):
            self._meter.on_item(item)
            items.append(item)
        for choice in self._answer.stopped:
            self._abort(self._request_id, choice)
        self._answer.stopped.clear()
        ended = self._answer.ended
        if items or ended:
            self._stream.put(self._request_id, items, ended=ended)
        if ended:
            self.ended.set_result(None)


def _choice(
    call: Call, index: int, prompt: Sequence[int], vocabulary: Vocabulary, syntax: ToolSyntax | None
) -> ChoiceStream:
    parser: ToolCallParser | ForcedCallParser | None = None
    hidden = None
    if call.tools is not None and syntax is not None:
        parser = (
            ForcedCallParser(syntax) if call.tools.forced else ToolCallParser(syntax, call.tools)
        )
        hidden = vocabulary.special_except(syntax.tokens)
    echo = ""
    if call.echo:
        given = call.prompts[index]
        echo = given if isinstance(given, str) else vocabulary.tokenizer.decode(list(given))
    text = Detokenizer(vocabulary.tokenizer, prompt, call.stop, call.min_tokens, hidden)
    logprob_vocabulary = vocabulary if call.sampling.logprobs is not None else None
    return ChoiceStream(text, parser, logprob_vocabulary, echo)


def refusal_of(error: EngineError) -> Refusal:
    """Return an engine's error in the words of the API."""
    fields = error.fields
    param = "model" if isinstance(error, AdapterError) else fields.get("param")
    return Refusal(engine_code(error), error.message, param, fields.get("retry_after_s"))
