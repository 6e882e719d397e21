"""The answer to one call as it grows: tokens in, the client's bytes out."""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

from lorikeet.api.answers import Choice, EventStream, Usage, failed_event, json_body
from lorikeet.api.messages import Call, Refusal, StreamItem
from lorikeet.serving.text import TextStream
from lorikeet_engine.errors import (
    AdapterError,
    AdapterTooLarge,
    EngineClosed,
    EngineError,
    InvalidRequest,
)
from lorikeet_engine.request import Failed, FinishReason, Output, Tokens


class Answer:
    """Follows every choice of a call to its end.

    `finished` is set after the last item. `stopped` holds choices that a stop string ended while
    the engine still makes tokens for them; the owner aborts them and clears it.
    """

    def __init__(self, call: Call, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer) -> None:
        self._call = call
        self._prompt_tokens = sum(map(len, prompts))
        self._events = EventStream(call)
        self._texts = [
            TextStream(tokenizer, prompt, call.stop, call.min_tokens)
            for prompt in prompts
            for _ in range(call.n)
        ]
        self._parts: list[list[str]] = [[] for _ in self._texts]
        self._finish: dict[int, FinishReason] = {}
        self._begun = False
        self.stopped: list[int] = []
        self.finished = False

    def take(self, outputs: Iterable[Output]) -> list[StreamItem]:
        """Take what the engine made; return what goes to the client, as one chunk if possible."""
        chunk = b""
        for output in outputs:
            if isinstance(output, Failed):
                self.finished = True
                return [self._failure(chunk, output.error)]
            chunk += self._advance(output)
        if len(self._finish) == len(self._texts):
            self.finished = True
            chunk += self._end()
        self._begun = self._begun or bool(chunk)
        return [chunk] if chunk else []

    def _advance(self, output: Tokens) -> bytes:
        choice = output.choice
        if choice in self._finish:
            return b""  # made before the engine heard of the abort
        text = self._texts[choice]
        piece = text.push(output.token_ids)
        finish = output.finish
        if text.stopped:
            if finish is None:
                self.stopped.append(choice)
            finish = FinishReason.STOP
        elif finish is not None:
            piece += text.finish()
        if finish is not None:
            self._finish[choice] = finish
        if self._call.stream:
            return self._events.delta(choice, piece, finish) if piece or finish else b""
        self._parts[choice].append(piece)
        return b""

    def _end(self) -> bytes:
        usage = Usage(self._prompt_tokens, sum(text.tokens for text in self._texts))
        if self._call.stream:
            return self._events.end(usage)
        choices = [
            Choice("".join(parts), self._finish[index]) for index, parts in enumerate(self._parts)
        ]
        return json_body(self._call, choices, usage)

    def _failure(self, chunk: bytes, error: EngineError) -> StreamItem:
        refusal = refusal_of(error)
        if self._call.stream and (self._begun or chunk):
            return chunk + failed_event(refusal.code, refusal.message, refusal.param)
        return refusal


def refusal_of(error: EngineError) -> Refusal:
    """An engine's error in the words of the API."""
    if isinstance(error, InvalidRequest):
        code = error.fields.get("code", "invalid_value")
        return Refusal(code, error.message, error.fields.get("param"))
    if isinstance(error, EngineClosed):
        return Refusal("unavailable", error.message)
    if isinstance(error, AdapterTooLarge):
        return Refusal("invalid_adapter", error.message, "model")
    if isinstance(error, AdapterError):
        return Refusal("adapter_load_failed", error.message, "model")
    return Refusal("generation_failed", error.message)
