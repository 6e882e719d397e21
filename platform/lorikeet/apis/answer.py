"""Answer to one call, from the engine's tokens to the client's bytes."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import sha256

from lorikeet.apis.chat.answer import EventStream, failed_completion_event, json_body
from lorikeet.apis.messages.answer import (
    AnswerProgress,
    MessageEventStream,
    failed_message_event,
    message_body,
)
from lorikeet.apis.pooling.answer import pooled_body
from lorikeet.apis.responses.answer import ResponseEventStream, failed_response_event, response_body
from lorikeet.errors import InvalidInput, LorikeetError, engine_code
from lorikeet.protocol.messages import Call, Endpoint, FinalUsage, Refusal, StreamItem, Thinking
from lorikeet.text.choice import Choice, SaidChoice, SchemaCheck, ToolCallPart, whole_calls
from lorikeet.text.choice_stream import ChoiceStream, open_choice
from lorikeet.text.detokenizer import StopStrings, Vocabulary
from lorikeet.text.harmony import HarmonyChoice
from lorikeet.text.logprobs import LogprobsJson
from lorikeet.text.prompt_echoes import NO_ECHOES, PromptEchoes
from lorikeet.text.prompt_logprobs import PromptLogprobsJson
from lorikeet.text.reasoning import THINK_TAGS, ThinkTags
from lorikeet.text.tools.syntax import HARMONY, ToolSyntax
from lorikeet_engine.errors import AdapterError, EngineError, LoadFault
from lorikeet_engine.request import (
    EngineTimings,
    Failed,
    FinishReason,
    Output,
    Pooled,
    PromptLogprobs,
    Tokens,
)

MOST_LOGPROBS_BYTES = 2**26
"""Limit on the bytes of log probabilities in one JSON body. Replica and gateway hold the whole body
in memory.

A choice with longer tokens than usual ends once its body reaches this limit.
"""
_CALL_ID_LENGTH = 9  # Mistral's templates want ids of exactly nine letters and digits
RESPONSE_COPIES = 4
"""Number of times that the last events of a streamed response (Responses API) repeat all its log
probabilities.
"""


class Answer:
    """Converter of the engine's outputs for one call into the items of the call's answer.

    ended: True once the last item was returned.
    awaits_checks: True once all choices have ended and are to be checked before the answer's last
        items; the owner then calls `end` with the checks.
    stopped: choices that have ended at a stop string or after a single tool call, and that the
        engine still generates; the owner aborts these choices and clears the list.

    Constructor arguments:
    prompts: token ids of each prompt.
    syntax: the model's syntax for tool calls; None if no tools may be called. With HARMONY
        (gpt-oss), all of a chat's answer is in messages, which mark thinking, text and calls.
    thinking: whether the model's thinking may come before its answer, or has begun in the prompt.
    echoes: texts and token ids of the prompts, as far as the client wants them in the answer.
    checked: the finished answer is to be checked against JSON schemas.
    tags: the model's tags of thinking.
    """

    def __init__(
        self,
        call: Call,
        prompts: Sequence[Sequence[int]],
        vocabulary: Vocabulary,
        syntax: ToolSyntax | None = None,
        thinking: Thinking = Thinking.NEVER,
        echoes: PromptEchoes = NO_ECHOES,
        *,
        checked: bool = False,
        tags: ThinkTags = THINK_TAGS,
    ) -> None:
        self._call = call
        self._prompts = prompts
        self._echoes = echoes
        self._events = event_stream(call, self, echoes)
        stop = StopStrings((*call.stop, *call.own_stop))
        in_messages = syntax is HARMONY and call.endpoint.writes_messages
        self._choices: list[ChoiceStream | HarmonyChoice] = [
            HarmonyChoice(call, prompt, vocabulary, stop)
            if in_messages
            else open_choice(call, index, prompt, vocabulary, syntax, thinking, stop, echoes, tags)
            for index, prompt in enumerate(prompts)
            for _ in range(call.n)
        ]
        self._thoughts: list[list[str]] = [[] for _ in self._choices]
        self._texts: list[list[str]] = [[] for _ in self._choices]
        self._calls: list[list[ToolCallPart]] = [[] for _ in self._choices]
        self._logprobs: list[LogprobsJson] = []
        if call.sampling.logprobs is not None:
            self._logprobs = [LogprobsJson(call.endpoint) for _ in self._choices]
        self._token_ids: list[list[int]] = [[] for _ in self._choices]
        self._prompt_logprobs: list[PromptLogprobsJson] = []
        if call.sampling.prompt_logprobs is not None:
            self._prompt_logprobs = [
                PromptLogprobsJson(call, prompt, vocabulary) for prompt in prompts
            ]
        self._pooled: dict[int, array[float]] = {}
        self._logprobs_bytes = 0  # of logprobs that the body or the last events will have
        self._unfinished = len(self._choices)
        self._checked, self.awaits_checks = checked, False
        self._cached: dict[int, int] = {}
        self._timings: dict[int, EngineTimings] = {}
        self.stopped: list[int] = []
        self.ended = False

    @property
    def unended(self) -> list[bool]:
        """Whether each choice goes on."""
        return [choice.finish is None for choice in self._choices]

    def take(self, outputs: Iterable[Output]) -> list[StreamItem]:
        """Convert the engine's outputs; return the answer's new items, with consecutive bytes
        joined.
        """
        chunk = b""
        for output in outputs:
            if isinstance(output, Failed):
                self.ended = True
                refusal = refusal_of(output.error)
                return [chunk, refusal] if chunk else [refusal]
            if isinstance(output, Pooled):
                self._pooled[output.choice] = output.values
            elif isinstance(output, Tokens):
                chunk += self._advance(output)
            elif self._add_prompt_logprobs(output) > MOST_LOGPROBS_BYTES:
                return [self._refuse_prompt_logprobs()]
        if self._unfinished == 0:
            if not self._checked:
                return self.end(last=chunk)
            self.awaits_checks = True
        return [chunk] if chunk else []

    def said(self) -> list[SaidChoice]:
        """Return the text and tool calls of each finished choice, for checks against schemas."""
        return [
            SaidChoice("".join(texts), whole_calls(calls))
            for texts, calls in zip(self._texts, self._calls, strict=True)
        ]

    def end(self, checks: Sequence[SchemaCheck] = (), last: bytes = b"") -> list[StreamItem]:
        """Return the answer's last items.

        checks: one check for each choice; empty if the answer is not checked.
        last: bytes of the answer that come before the bytes that end it.
        """
        self.ended = True
        usage = self.usage()
        return [usage, last + self._end(usage, checks)]

    def usage(self) -> FinalUsage:
        """Return the number of tokens of all prompts and choices so far."""
        made = sum(choice.tokens for choice in self._choices)
        prompts = range(0, len(self._choices), self._call.n)
        # Later choices of a prompt hit the prefix that its first choice computed: take the least.
        cached = sum(
            min(self._cached.get(index + i, 0) for i in range(self._call.n)) for index in prompts
        )
        timings = tuple(self._timings.get(i, EngineTimings()) for i in range(len(self._choices)))
        thought = sum(choice.reasoning_tokens for choice in self._choices)
        return FinalUsage(sum(map(len, self._prompts)), cached, made, timings, thought)

    def choice_usage(self, choice: int) -> FinalUsage:
        """Return the number of tokens of one choice and its prompt so far."""
        prompt_tokens = len(self._prompts[choice // self._call.n])
        made, cached = self._choices[choice], self._cached.get(choice, 0)
        return FinalUsage(
            prompt_tokens, cached, made.tokens, reasoning_tokens=made.reasoning_tokens
        )

    def stop_string(self, choice: int) -> str | None:
        """Return the request's stop string that ended the choice; None if none did."""
        found = self._choices[choice].stop_string
        return found if found in self._call.stop else None

    def _add_prompt_logprobs(self, output: PromptLogprobs) -> int:
        """Add a prompt's log probabilities to the answer; return the bytes of all log probabilities
        so far in the answer's body.
        """
        call = self._call
        copies = call.n if call.endpoint is Endpoint.COMPLETIONS else 1
        size = self._prompt_logprobs[output.choice // call.n].add(output.logprobs)
        self._logprobs_bytes += copies * size
        return self._logprobs_bytes

    def _refuse_prompt_logprobs(self) -> Refusal:
        self.ended = True
        self.stopped += [i for i, choice in enumerate(self._choices) if choice.finish is None]
        most = MOST_LOGPROBS_BYTES >> 20
        return Refusal(
            InvalidInput.code,
            f"the log probabilities of the prompt's tokens take over {most} MiB, the limit of one "
            "answer: ask for fewer alternatives, or send a shorter prompt",
            "logprobs" if self._call.prompt_logprobs is None else "prompt_logprobs",
        )

    def _advance(self, output: Tokens) -> bytes:
        index = output.choice
        choice = self._choices[index]
        if output.timings is not None:
            self._cached.setdefault(index, output.timings.cached_tokens)
            self._timings[index] = output.timings
        if choice.finish is not None:
            return b""  # made before the engine heard of the abort
        taken = output
        if self._call.max_tokens == 0:  # the engine makes one token at least
            taken = Tokens(output.request_id, index, (), FinishReason.LENGTH)
        elif self._logprobs_bytes > MOST_LOGPROBS_BYTES:
            taken = replace(output, finish=output.finish or FinishReason.LENGTH)
        delta = choice.take(taken)
        if choice.finish is not None:
            self._unfinished -= 1
            if output.finish is None:
                self.stopped.append(index)
        calls = [_with_id(self._call, index, part) for part in delta.calls]
        if not self._call.stream or self._checked:
            self._texts[index].append(delta.text)
            self._calls[index] += calls
        if not self._call.stream:
            self._thoughts[index].append(delta.reasoning)
            if self._logprobs:
                self._logprobs_bytes += self._logprobs[index].add(delta.logprobs)
            self._token_ids[index] += delta.token_ids
            return b""
        content = delta.text or calls or delta.logprobs or delta.reasoning or delta.token_ids
        if not (content or choice.finish):
            return b""
        events = self._events.delta(
            index,
            delta.text,
            choice.finish,
            calls,
            delta.logprobs,
            delta.reasoning,
            delta.token_ids,
        )
        if delta.logprobs and self._call.endpoint is Endpoint.RESPONSES:
            self._logprobs_bytes += RESPONSE_COPIES * len(events)
        return events

    def _end(self, usage: FinalUsage, checks: Sequence[SchemaCheck]) -> bytes:
        if self._call.stream:
            return self._events.end(usage, checks)
        if self._call.endpoint.pools:
            return pooled_body(self._call, [self._pooled[i] for i in sorted(self._pooled)], usage)
        choices = [self._choice(i) for i in range(len(self._choices))]
        return whole_answer(self._call, choices, usage, checks)

    def _choice(self, index: int) -> Choice:
        finish = self._choices[index].finish
        assert finish is not None
        logprobs = self._logprobs[index] if self._logprobs else None
        text, thought = "".join(self._texts[index]), "".join(self._thoughts[index])
        stop, calls, prompt_logprobs = self.stop_string(index), self._calls[index], None
        if self._prompt_logprobs:
            scored = self._prompt_logprobs[index // self._call.n]
            if index == 0 or self._call.endpoint is Endpoint.COMPLETIONS:  # once in a chat
                prompt_logprobs = scored.json()
            if logprobs is not None and self._call.echo:
                logprobs = scored.echoed.before(logprobs)
        whole = Choice(text, finish, calls, logprobs, stop, thought, prompt_logprobs)
        if not self._call.return_token_ids:
            return whole
        prompt = self._echoes.token_ids[index // self._call.n]
        return replace(whole, token_ids=self._token_ids[index], prompt_token_ids=prompt)


def event_stream(
    call: Call, progress: AnswerProgress, echoes: PromptEchoes = NO_ECHOES
) -> EventStream | ResponseEventStream | MessageEventStream:
    """Return the event stream of a streamed call, in the shape of the called API.

    progress: the growing answer, for usage and stop strings.
    echoes: texts and token ids of the prompts, as far as the client wants them in the answer.
    """
    match call.endpoint:
        case Endpoint.RESPONSES:
            return ResponseEventStream(call)
        case Endpoint.MESSAGES:
            return MessageEventStream(call, progress)
    usage = progress.choice_usage if call.continuous_usage else None
    return EventStream(call, usage, echoes.token_ids)


def whole_answer(
    call: Call,
    choices: Sequence[Choice],
    usage: FinalUsage,
    checks: Sequence[SchemaCheck] = (),
) -> bytes:
    """Return the JSON body that answers a call without `stream`.

    choices: finished choices, in order of index.
    checks: one check for each choice; empty if the answer is not checked.
    """
    match call.endpoint:
        case Endpoint.RESPONSES:
            return response_body(call, choices[0], usage, checks)
        case Endpoint.MESSAGES:
            return message_body(call, choices[0], usage, checks)
    return json_body(call, choices, usage, checks)


def failed_event(call: Call, sent: int, error: LorikeetError) -> bytes:
    """Return the event that ends a failed stream, in the shape of the called API.

    sent: number of events sent before this event.
    """
    match call.endpoint:
        case Endpoint.RESPONSES:
            return failed_response_event(call, sent, error.code, error.message, error.param)
        case Endpoint.MESSAGES:
            return failed_message_event(call, error.code, error.message)
    return failed_completion_event(error.code, error.message, error.param)


def token_count_body(endpoint: Endpoint, tokens: int) -> bytes:
    """Return the JSON body that answers a request to count tokens."""
    kind = b'"object":"response.input_tokens",' if endpoint is Endpoint.INPUT_TOKENS else b""
    return b'{%s"input_tokens":%d}' % (kind, tokens)


def _with_id(call: Call, choice: int, part: ToolCallPart) -> ToolCallPart:
    """Return a part of a tool call with the call's id if it is the call's first part.

    Ids depend on the request's id and the place in the answer, so that a replica that goes on with
    an answer repeats them.
    """
    if part.name is None:
        return part
    place = f"{call.request_id}/{choice}/{part.index}"
    return replace(part, id=sha256(place.encode()).hexdigest()[:_CALL_ID_LENGTH])


def refusal_of(error: EngineError) -> Refusal:
    """Return the HTTP API's refusal for an exception of the engine."""
    fields = error.fields
    param = "model" if isinstance(error, AdapterError) else fields.get("param")
    fault = fields.get("fault", LoadFault.ADAPTER)
    return Refusal(engine_code(error), error.message, param, fields.get("retry_after_s"), fault)
