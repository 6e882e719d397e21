"""The answer to one call as it grows: tokens in, the client's bytes out and on to its gateway."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from lorikeet.answer_stream.anthropic_format import (
    AnswerProgress,
    MessageEventStream,
    message_body,
)
from lorikeet.answer_stream.billed_tokens import BilledTokens
from lorikeet.answer_stream.choice_stream import open_choice
from lorikeet.answer_stream.detokenizer import StopStrings, Vocabulary
from lorikeet.answer_stream.openai_format import (
    CallDelta,
    Choice,
    EventStream,
    json_body,
)
from lorikeet.answer_stream.reasoning import Thinking
from lorikeet.answer_stream.response_stream import ResponseStream
from lorikeet.answer_stream.responses_format import ResponseEventStream, response_body
from lorikeet.answer_stream.scored_prompt import ScoredPrompt
from lorikeet.answer_stream.tool_syntax import ToolSyntax
from lorikeet.answer_stream.whole_logprobs import WholeLogprobs
from lorikeet.errors import engine_code
from lorikeet.protocol.messages import (
    AnswerHeader,
    Call,
    Endpoint,
    FinalUsage,
    Refusal,
    RunningUsage,
    StreamItem,
)
from lorikeet_engine.errors import AdapterError, EngineError
from lorikeet_engine.request import (
    EngineTimings,
    Failed,
    FinishReason,
    Output,
    PromptLogprobs,
    Tokens,
)

Abort = Callable[[str, int], object]
"""Takes a request's id and a choice."""
_TOLD_EVERY = 64
"""Tokens from one RunningUsage to the next: a gateway handles less than 2% more items for them."""


class Answer:
    """Turns the engine's outputs for one call into the items of its answer, to the end.

    `ended` is set with the last item. `stopped` holds choices that ended while the engine
    still makes tokens for them, at a stop string or after the only call that was wanted; the owner
    aborts them and clears it. syntax: how the model writes calls of tools; None: it may call none.
    thinking: whether it may think before it answers.
    """

    def __init__(
        self,
        call: Call,
        prompts: Sequence[Sequence[int]],
        vocabulary: Vocabulary,
        syntax: ToolSyntax | None = None,
        thinking: Thinking = Thinking.NEVER,
    ) -> None:
        self._call = call
        self._prompts = prompts
        self._events = event_stream(call, self, prompts)
        stop = StopStrings(call.stop)
        self._choices = [
            open_choice(call, index, prompt, vocabulary, syntax, thinking, stop)
            for index, prompt in enumerate(prompts)
            for _ in range(call.n)
        ]
        self._thoughts: list[list[str]] = [[] for _ in self._choices]
        self._texts: list[list[str]] = [[] for _ in self._choices]
        self._calls: list[list[CallDelta]] = [[] for _ in self._choices]
        self._logprobs = [WholeLogprobs(call.endpoint) for _ in self._choices]
        self._token_ids: list[list[int]] = [[] for _ in self._choices]
        self._scored: list[ScoredPrompt] = []
        if call.sampling.prompt_logprobs is not None:
            self._scored = [ScoredPrompt(call, prompt, vocabulary) for prompt in prompts]
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
            if isinstance(output, PromptLogprobs):
                self._scored[output.choice // self._call.n].add(output.logprobs)
            else:
                chunk += self._advance(output)
        if self._unfinished == 0:
            self.ended = True
            usage = self.usage()
            return [usage, chunk + self._end(usage)]
        return [chunk] if chunk else []

    def usage(self) -> FinalUsage:
        """Return what it has taken until now."""
        made = sum(choice.tokens for choice in self._choices)
        prompts = range(0, len(self._choices), self._call.n)
        # Choices of a prompt find in the cache what the first of them computed.
        cached = sum(
            min(self._cached.get(index + i, 0) for i in range(self._call.n)) for index in prompts
        )
        timings = tuple(self._timings.get(i, EngineTimings()) for i in range(len(self._choices)))
        thought = sum(choice.reasoning_tokens for choice in self._choices)
        return FinalUsage(sum(map(len, self._prompts)), cached, made, timings, thought)

    def choice_usage(self, choice: int) -> FinalUsage:
        """Return what one choice and its prompt have taken until now."""
        prompt_tokens = len(self._prompts[choice // self._call.n])
        made, cached = self._choices[choice], self._cached.get(choice, 0)
        return FinalUsage(
            prompt_tokens, cached, made.tokens, reasoning_tokens=made.reasoning_tokens
        )

    def stop_string(self, choice: int) -> str | None:
        """Return the stop string that ended a choice, if one did."""
        return self._choices[choice].stop_string

    def _advance(self, output: Tokens) -> bytes:
        index = output.choice
        choice = self._choices[index]
        if output.timings is not None:
            self._cached.setdefault(index, output.timings.cached_tokens)
            self._timings[index] = output.timings
        if choice.finish is not None:
            return b""  # made before the engine heard of the abort
        if self._call.max_tokens == 0:  # the engine makes one token at least
            output = Tokens(output.request_id, index, (), FinishReason.LENGTH)
        delta = choice.take(output)
        if choice.finish is not None:
            self._unfinished -= 1
            if output.finish is None:
                self.stopped.append(index)
        if not self._call.stream:
            self._thoughts[index].append(delta.reasoning)
            self._texts[index].append(delta.text)
            self._calls[index] += delta.calls
            self._logprobs[index].add(delta.logprobs)
            self._token_ids[index] += delta.token_ids
            return b""
        content = delta.text or delta.calls or delta.logprobs or delta.reasoning or delta.token_ids
        if not (content or choice.finish):
            return b""
        return self._events.delta(
            index,
            delta.text,
            choice.finish,
            delta.calls,
            delta.logprobs,
            delta.reasoning,
            delta.token_ids,
        )

    def _end(self, usage: FinalUsage) -> bytes:
        if self._call.stream:
            return self._events.end(usage)
        return whole_answer(self._call, [self._whole(i) for i in range(len(self._choices))], usage)

    def _whole(self, index: int) -> Choice:
        finish = self._choices[index].finish
        assert finish is not None
        wanted = self._call.sampling.logprobs is not None
        logprobs = self._logprobs[index] if wanted else None
        text, thought = "".join(self._texts[index]), "".join(self._thoughts[index])
        stop, calls, prompt_logprobs = self.stop_string(index), self._calls[index], None
        if self._scored:
            scored = self._scored[index // self._call.n]
            if index == 0 or self._call.endpoint is Endpoint.COMPLETIONS:  # a chat tells them once
                prompt_logprobs = scored.json()
            if logprobs is not None and self._call.echo:
                logprobs = scored.echoed.before(logprobs)
        whole = Choice(text, finish, calls, logprobs, stop, thought, prompt_logprobs)
        if not self._call.return_token_ids:
            return whole
        prompt = self._prompts[index // self._call.n]
        return replace(whole, token_ids=self._token_ids[index], prompt_token_ids=prompt)


class AnswerSender:
    """Sends the gateway what the engine's outputs add to one answer, at once.

    No task waits for outputs: at thousands of deltas a second turns of the event loop would cost
    more than the work. meter: counts for the tenant's bill. `ended` is done when all is sent; it
    fails if our code does.
    """

    def __init__(
        self, call: Call, answer: Answer, meter: BilledTokens, stream: ResponseStream, abort: Abort
    ) -> None:
        self._request_id = call.request_id
        self._answer, self._meter, self._stream, self._abort = answer, meter, stream, abort
        self._header: AnswerHeader | None = None
        self._early: list[Output] = []
        self._told_tokens = 0
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
        self._meter.on_output(output)
        made = self._meter.output_tokens
        if made >= self._told_tokens + _TOLD_EVERY:
            self._told_tokens = made
            items.append(RunningUsage(made))
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


def event_stream(
    call: Call, progress: AnswerProgress, prompts: Sequence[Sequence[int]] = ()
) -> EventStream | ResponseEventStream | MessageEventStream:
    """Return what makes the events of a streamed call, in the shape of the API that was asked."""
    match call.endpoint:
        case Endpoint.RESPONSES:
            return ResponseEventStream(call)
        case Endpoint.MESSAGES:
            return MessageEventStream(call, progress)
    usage = progress.choice_usage if call.continuous_usage else None
    return EventStream(call, usage, prompts if call.return_token_ids else ())


def whole_answer(call: Call, choices: Sequence[Choice], usage: FinalUsage) -> bytes:
    """Return the body of a call without `stream`. choices: in order."""
    match call.endpoint:
        case Endpoint.RESPONSES:
            return response_body(call, choices[0], usage)
        case Endpoint.MESSAGES:
            return message_body(call, choices[0], usage)
    return json_body(call, choices, usage)


def refusal_of(error: EngineError) -> Refusal:
    """Return an engine's error in the words of the API."""
    fields = error.fields
    param = "model" if isinstance(error, AdapterError) else fields.get("param")
    own_disk = bool(fields.get("own_disk"))
    return Refusal(engine_code(error), error.message, param, fields.get("retry_after_s"), own_disk)
