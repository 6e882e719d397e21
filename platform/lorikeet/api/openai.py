"""The requests that tenants send, in OpenAI's words, and the Call each becomes.

Every field that is served is here; any other is refused by name, unless its value asks for
nothing (neutral.py). `metadata` is accepted and has no effect; `user` keeps a session with one
version where an alias shares its requests between two. Beyond OpenAI's own there are top_k,
min_tokens and ignore_eos.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from lorikeet.api.body import Body, misfit
from lorikeet.api.gate import Model
from lorikeet.api.messages import Call, Endpoint
from lorikeet.api.neutral import CHAT, COMPLETIONS, MESSAGE, STREAM_OPTIONS, Neutral
from lorikeet.api.prompt_size import chat_tokens, prompt_tokens
from lorikeet.routing.choice import Work
from lorikeet_engine.request import SamplingParams

MAX_N = 16
MAX_CHOICES = 128
MAX_MESSAGES = 4096
MAX_METADATA = 16
MAX_STOPS = 4
MAX_STOP_LENGTH = 256
_INT32 = 2**31 - 1
_INT64 = 2**63 - 1

TokenId = Annotated[int, Field(ge=0, le=_INT32)]
Tokens = Annotated[int, Field(ge=1, le=_INT32)]
Prompt = str | tuple[int, ...]


def _parse_role(value: object) -> object:
    """`developer` is what newer clients call `system`."""
    return "system" if value == "developer" else value


def _parse_text(value: object) -> object:
    """A message's content: a string, or a list of text parts to be joined."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ValueError('want a string or a list of {"type": "text", "text": "…"} parts')
        if not isinstance(part.get("text"), str):
            raise ValueError('want a string as "text" of every part')
    return "".join(part["text"] for part in value)


def _parse_stop(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise ValueError(f"want a string or a list of at most {MAX_STOPS}")
    if not all(isinstance(stop, str) and 1 <= len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise ValueError(f"want strings of 1 to {MAX_STOP_LENGTH} characters")
    return tuple(stops)


def _parse_prompts(value: object) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if _are_token_ids(value):
            return (tuple(value),)
        if len(value) > MAX_CHOICES:
            raise ValueError(f"want token ids, or at most {MAX_CHOICES} prompts times n")
        if all(isinstance(prompt, str) for prompt in value):
            return tuple(value)
        if all(isinstance(prompt, list) and _are_token_ids(prompt) for prompt in value):
            return tuple(tuple(prompt) for prompt in value)
    raise ValueError(
        "want a string, a list of strings, a list of token ids, or a list of such lists; none empty"
    )


def _are_token_ids(values: Sequence[Any]) -> bool:
    return bool(values) and all(type(i) is int and 0 <= i <= _INT32 for i in values)


def _parse_metadata(value: object) -> object:
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        raise ValueError(f"want an object of at most {MAX_METADATA} strings")
    if not all(isinstance(text, str) for text in value.values()):
        raise ValueError("want strings")
    return value


class Message(Body):
    """One turn of a conversation."""

    neutral: ClassVar[Neutral] = MESSAGE

    role: Annotated[Literal["system", "user", "assistant"], BeforeValidator(_parse_role)]
    content: Annotated[str, BeforeValidator(_parse_text)]


class StreamOptions(Body):
    """How to stream."""

    neutral: ClassVar[Neutral] = STREAM_OPTIONS

    include_usage: bool = False


class GenerateRequest(Body):
    """What chat and plain completions have in common."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    max_tokens: Tokens | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_INT32)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=_INT32)] = 0
    seed: Annotated[int, Field(ge=-_INT64 - 1, le=_INT64)] | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_parse_stop)] = ()
    stop_token_ids: list[TokenId] = Field(default=[], max_length=64)
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    ignore_eos: bool = False
    user: str | None = None
    metadata: Annotated[dict[str, str] | None, PlainValidator(_parse_metadata)] = None

    @model_validator(mode="after")
    def _fits_together(self) -> "GenerateRequest":
        limit = self.output_limit()
        if limit is not None and self.min_tokens > limit:
            raise misfit("min_tokens", f"want at most max_tokens ({limit})")
        if "stream_options" in self.model_fields_set and not self.stream:
            raise misfit("stream_options", "want stream to be true with it")
        return self

    def output_limit(self) -> int | None:
        """Most tokens of one choice; None: as many as the context allows."""
        return self.max_tokens

    @abstractmethod
    def to_call(self, request_id: str, created: int, tenant: str, meant: Model) -> Call:
        """The Call that a replica gets."""

    def _common(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "max_tokens": self.output_limit(),
            "min_tokens": self.min_tokens,
            "sampling": SamplingParams(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                seed=self.seed,
                stop_token_ids=tuple(self.stop_token_ids),
                ignore_eos=self.ignore_eos,
            ),
            "stop": self.stop,
            "n": self.n,
            "stream": self.stream,
            "include_usage": self.stream_options.include_usage,
        }


class ChatRequest(GenerateRequest):
    """POST /v1/chat/completions. Without max_tokens an answer may fill the context."""

    neutral: ClassVar[Neutral] = CHAT
    hints: ClassVar[dict[str, str]] = {"prompt": ": send messages, or ask /v1/completions"}

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Tokens | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> "ChatRequest":
        if self.max_tokens and self.max_completion_tokens:
            raise misfit("max_tokens", "want either it or max_completion_tokens, not both")
        return self

    def output_limit(self) -> int | None:
        """max_completion_tokens, or max_tokens, its older name."""
        return self.max_completion_tokens or self.max_tokens

    def to_call(self, request_id: str, created: int, tenant: str, meant: Model) -> Call:
        """The Call that a replica gets."""
        messages = tuple({"role": m.role, "content": m.content} for m in self.messages)
        return Call(
            request_id,
            Endpoint.CHAT,
            created,
            tenant,
            adapter=meant.adapter,
            messages=messages,
            work=Work(chat_tokens(messages), meant.rank, meant.image_bytes, self.n),
            **self._common(),
        )


class CompletionRequest(GenerateRequest):
    """POST /v1/completions. Without max_tokens an answer has at most 16 tokens, as OpenAI's."""

    neutral: ClassVar[Neutral] = COMPLETIONS
    hints: ClassVar[dict[str, str]] = {
        "messages": ": send prompt, or ask /v1/chat/completions",
        "max_completion_tokens": ": it is called max_tokens here",
    }

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(_parse_prompts)]
    max_tokens: Tokens | None = 16

    @model_validator(mode="after")
    def _few_choices(self) -> "CompletionRequest":
        if len(self.prompt) * self.n > MAX_CHOICES:
            raise misfit("prompt", f"want at most {MAX_CHOICES} prompts times n")
        return self

    def to_call(self, request_id: str, created: int, tenant: str, meant: Model) -> Call:
        """The Call that a replica gets."""
        return Call(
            request_id,
            Endpoint.COMPLETIONS,
            created,
            tenant,
            adapter=meant.adapter,
            prompts=self.prompt,
            work=Work(
                sum(map(prompt_tokens, self.prompt)),
                meant.rank,
                meant.image_bytes,
                len(self.prompt) * self.n,
            ),
            **self._common(),
        )
