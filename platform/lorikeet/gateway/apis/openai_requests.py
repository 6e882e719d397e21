"""The requests that tenants send, in OpenAI's words, and the Call each becomes.

Every field that is served is here; any other is refused by name, unless its value asks for
nothing (`no_ops`). `metadata` is accepted and has no effect; `user` keeps a session with one
version where an alias shares its requests between two. Beyond OpenAI's own there are top_k,
min_tokens, stop_token_ids and ignore_eos.
"""

import json
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from lorikeet.gateway.apis.chat_messages import MAX_MESSAGES, Message, check_answered
from lorikeet.gateway.apis.fields import (
    INT32,
    MAX_CHOICES,
    Biases,
    Metadata,
    Prompts,
    Stop,
    TokenId,
)
from lorikeet.gateway.apis.tools import ResponseFormat, ToolChoice, Tools, tool_use
from lorikeet.gateway.auth import Caller, ResolvedModel
from lorikeet.gateway.body import Body, NoOps, misfit, unsupported
from lorikeet.protocol.messages import Call, Endpoint
from lorikeet.routing.prefix_index import CHARACTERS_PER_TOKEN
from lorikeet.routing.ranking import Work
from lorikeet_engine.request import SamplingParams, SchedulingParams

MAX_N = 16
_INT64 = 2**63 - 1
_TEMPLATE_TOKENS = 5  # what chat templates put around each message, roughly

Tokens = Annotated[int, Field(ge=1, le=INT32)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(Body):
    """How to stream."""

    no_ops: ClassVar[NoOps] = {"include_obfuscation": (False,)}

    include_usage: bool = False


class GenerateRequest(Body):
    """What chat and plain completions have in common."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    max_tokens: Tokens | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=INT32)] = 0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Biases = Field(default_factory=tuple)
    seed: Annotated[int, Field(ge=-_INT64 - 1, le=_INT64)] | None = None
    stop: Stop = ()
    stop_token_ids: list[TokenId] = Field(default=[], max_length=64)
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    ignore_eos: bool = False
    user: str | None = None
    metadata: Metadata | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "GenerateRequest":
        limit = self.output_limit()
        if limit is not None and self.min_tokens > limit:
            raise misfit("min_tokens", f"want at most max_tokens ({limit})")
        if "stream_options" in self.model_fields_set and not self.stream:
            raise misfit("stream_options", "want stream to be true with it")
        return self

    def output_limit(self) -> int | None:
        """Return the most tokens of one choice; None for as many as the context allows."""
        return self.max_tokens

    @abstractmethod
    def to_call(
        self,
        request_id: str,
        created: int,
        caller: Caller,
        scheduling: SchedulingParams,
        model: ResolvedModel,
    ) -> Call:
        """Return the Call that a replica gets."""

    @abstractmethod
    def alternatives(self) -> int | None:
        """Return how many of the most likely tokens to report at each step; None: no logprobs."""

    def _common(self, caller: Caller, scheduling: SchedulingParams) -> dict[str, Any]:
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
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                logit_bias=self.logit_bias,
                logprobs=self.alternatives(),
            ),
            "stop": self.stop,
            "n": self.n,
            "stream": self.stream,
            "include_usage": self.stream_options.include_usage,
            "scheduling": scheduling,
            "key_id": caller.key.key_id,
            "max_context": caller.max_context,
        }


class ChatRequest(GenerateRequest):
    """POST /v1/chat/completions. Without max_tokens an answer may fill the context."""

    no_ops: ClassVar[NoOps] = {
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "store": (False,),
        "service_tier": ("auto", "default"),
    }
    hints: ClassVar[dict[str, str]] = {
        "prompt": ": send messages, or ask /v1/completions",
        "functions": ": send tools",
        "function_call": ": send tool_choice",
    }

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    response_format: ResponseFormat | None = None
    tools: Tools = Field(default=[])
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _agrees(self) -> "ChatRequest":
        if self.max_tokens and self.max_completion_tokens:
            raise misfit("max_tokens", "want either it or max_completion_tokens, not both")
        if self.top_logprobs and not self.logprobs:
            raise misfit("top_logprobs", "want logprobs to be true with it")
        check_answered(self.messages)
        tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)
        return self

    def output_limit(self) -> int | None:
        """Return max_completion_tokens, or max_tokens, its older name."""
        return self.max_completion_tokens or self.max_tokens

    def alternatives(self) -> int | None:
        """Return top_logprobs, if logprobs are asked for."""
        return self.top_logprobs if self.logprobs else None

    def to_call(
        self,
        request_id: str,
        created: int,
        caller: Caller,
        scheduling: SchedulingParams,
        model: ResolvedModel,
    ) -> Call:
        """Return the Call that a replica gets."""
        messages = tuple(message.for_template() for message in self.messages)
        tools = tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)
        size = chat_tokens(messages, tools.tools if tools else ())
        return Call(
            request_id,
            Endpoint.CHAT,
            created,
            caller.tenant.name,
            adapter=model.adapter,
            messages=messages,
            format=None if self.response_format is None else self.response_format.as_format(),
            tools=tools,
            work=Work(size, model.rank, model.image_bytes, self.n),
            **self._common(caller, scheduling),
        )


class CompletionRequest(GenerateRequest):
    """POST /v1/completions. Without max_tokens an answer has at most 16 tokens, as OpenAI's."""

    no_ops: ClassVar[NoOps] = {"suffix": ("",)}
    hints: ClassVar[dict[str, str]] = {
        "messages": ": send prompt, or ask /v1/chat/completions",
        "max_completion_tokens": ": it is called max_tokens here",
    }

    prompt: Prompts
    max_tokens: Tokens | None = 16
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool = False
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> "CompletionRequest":
        if len(self.prompt) * self.n > MAX_CHOICES:
            raise misfit("prompt", f"want at most {MAX_CHOICES} prompts times n")
        if self.best_of is not None and self.best_of < self.n:
            raise misfit("best_of", f"want at least n ({self.n})")
        if self.best_of is not None and self.best_of > self.n:
            raise unsupported("best_of", hint=": want n of it, and choose")
        if self.echo and self.logprobs is not None:
            raise unsupported("echo", hint=" together with logprobs")
        return self

    def alternatives(self) -> int | None:
        """Return logprobs, which is their number."""
        return self.logprobs

    def to_call(
        self,
        request_id: str,
        created: int,
        caller: Caller,
        scheduling: SchedulingParams,
        model: ResolvedModel,
    ) -> Call:
        """Return the Call that a replica gets."""
        return Call(
            request_id,
            Endpoint.COMPLETIONS,
            created,
            caller.tenant.name,
            adapter=model.adapter,
            prompts=self.prompt,
            echo=self.echo,
            work=Work(
                sum(map(prompt_tokens, self.prompt)),
                model.rank,
                model.image_bytes,
                len(self.prompt) * self.n,
            ),
            **self._common(caller, scheduling),
        )


def prompt_tokens(prompt: str | Sequence[int]) -> int:
    """Estimate a prompt's tokens; token ids are exact, but a gateway has no tokenizer for text."""
    if isinstance(prompt, str):
        return 1 + len(prompt) // CHARACTERS_PER_TOKEN
    return len(prompt)


def chat_tokens(
    messages: Iterable[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> int:
    """Estimate a conversation's tokens."""
    size = prompt_tokens(json.dumps(tools)) if tools else 0
    for message in messages:
        size += _TEMPLATE_TOKENS + prompt_tokens(message["content"])
        if calls := message.get("tool_calls"):
            size += prompt_tokens(json.dumps(calls))
    return size
