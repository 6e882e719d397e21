"""The request of a chat, in OpenAI's words, and the Call that it becomes.

Every field that is served is here or in a class that a request is made of; any other is refused by
name, unless its value asks for nothing (`no_ops.py`). `metadata` is accepted and has no effect;
`user` keeps a session with one version where an alias shares its requests between two. Beyond
OpenAI's own there are top_k, min_p, repetition_penalty, min_tokens, stop_token_ids, ignore_eos and
some of vLLM's.
"""

from abc import abstractmethod
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from lorikeet.gateway.apis.api_request import (
    CallContext,
    OpenAIRequest,
    Tokens,
    TopK,
    chat_tokens,
)
from lorikeet.gateway.apis.chat_messages import (
    MAX_MESSAGES,
    Message,
    check_answered,
    template_messages,
)
from lorikeet.gateway.apis.fields import (
    INT32,
    Biases,
    Stop,
    TokenId,
)
from lorikeet.gateway.apis.no_ops import (
    CHAT_NO_OPS,
    STREAM_OPTIONS_NO_OPS,
)
from lorikeet.gateway.apis.structured_outputs import StructuredFields
from lorikeet.gateway.apis.template_fields import IgnoredFields, TemplateFields
from lorikeet.gateway.apis.tools import (
    FunctionCall,
    Functions,
    ResponseFormat,
    ToolChoice,
    Tools,
    check_choice,
    check_functions,
    function_use,
    tool_use,
)
from lorikeet.gateway.body import Body, NoOps, misfit
from lorikeet.protocol.messages import Call, Endpoint
from lorikeet_engine.request import (
    MAX_REPETITION_PENALTY,
    MIN_REPETITION_PENALTY,
    SamplingParams,
)

MAX_N = 16
_INT64 = 2**63 - 1

Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)]


class StreamOptions(Body):
    """How to stream. continuous_usage_stats: beside include_usage, each chunk has its usage."""

    no_ops: ClassVar[NoOps] = STREAM_OPTIONS_NO_OPS

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerateRequest(StructuredFields, OpenAIRequest):
    """What chat and plain completions have in common."""

    max_tokens: Tokens | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32)] = 0
    top_k: TopK = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    logit_bias: Biases = Field(default_factory=tuple)
    seed: Annotated[int, Field(ge=-_INT64 - 1, le=_INT64)] | None = None
    stop: Stop = ()
    stop_token_ids: list[TokenId] = Field(default=[], max_length=64)
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    stream_options: StreamOptions = StreamOptions()
    ignore_eos: bool = False

    @model_validator(mode="after")
    def _fits_together(self) -> "GenerateRequest":
        limit = self.output_limit()
        if limit is not None and self.min_tokens > limit:
            raise misfit("min_tokens", f"want at most max_tokens ({limit})")
        return self

    def output_limit(self) -> int | None:
        """Return the most tokens of one choice; None for as many as the context allows."""
        return self.max_tokens

    @abstractmethod
    def alternatives(self) -> int | None:
        """Return how many of the most likely tokens to report at each step; None: no logprobs."""

    def _common(self, context: CallContext) -> dict[str, Any]:
        caller, options = context.caller, self.stream_options
        return {
            "request_id": context.request_id,
            "created": context.created,
            "tenant": caller.tenant.name,
            "model": self.model,
            "adapter": context.model.adapter,
            "max_tokens": self.output_limit(),
            "min_tokens": self.min_tokens,
            "sampling": SamplingParams(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
                seed=self.seed,
                stop_token_ids=tuple(self.stop_token_ids),
                ignore_eos=self.ignore_eos,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                repetition_penalty=self.repetition_penalty,
                logit_bias=self.logit_bias,
                logprobs=self.alternatives(),
            ),
            "stop": self.stop,
            "n": self.n,
            "stream": self.stream,
            "include_usage": options.include_usage,
            "continuous_usage": options.include_usage and options.continuous_usage_stats,
            "scheduling": context.scheduling,
            "key_id": caller.key.id,
            "max_context": caller.max_context,
        }


class ChatRequest(TemplateFields, IgnoredFields, GenerateRequest):
    """POST /v1/chat/completions. Without max_tokens an answer may fill the context."""

    no_ops: ClassVar[NoOps] = CHAT_NO_OPS
    hints: ClassVar[dict[str, str]] = {"prompt": ": send messages, or ask /v1/completions"}

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    response_format: ResponseFormat | None = None
    tools: Tools = Field(default=[])
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool = True
    functions: Functions = Field(default=[])
    function_call: FunctionCall | None = None

    @model_validator(mode="after")
    def _agrees(self) -> "ChatRequest":
        if self.max_tokens and self.max_completion_tokens:
            raise misfit("max_tokens", "want either it or max_completion_tokens, not both")
        if self.top_logprobs and not self.logprobs:
            raise misfit("top_logprobs", "want logprobs to be true with it")
        check_answered(self.messages)
        check_choice(self.tools, self.tool_choice, self.parallel_tool_calls)
        check_functions(self.functions, self.function_call, self.tools)
        self.check_continuation(self.messages[-1].role)
        has_format = self.response_format is not None and self.response_format.type != "text"
        self.check_one_format(*["response_format"] * has_format)
        return self

    def output_limit(self) -> int | None:
        """Return max_completion_tokens, or max_tokens, its older name."""
        return self.max_completion_tokens or self.max_tokens

    def alternatives(self) -> int | None:
        """Return top_logprobs, if logprobs are asked for."""
        return self.top_logprobs if self.logprobs else None

    def to_call(self, context: CallContext) -> Call:
        """Return the Call that a replica gets."""
        messages = template_messages(self.messages)
        if self.functions:
            tools = function_use(self.functions, self.function_call)
        else:
            tools = tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)
        asked = None if self.response_format is None else self.response_format.as_format()
        size = chat_tokens(messages, tools.tools if tools else ())
        return Call(
            endpoint=Endpoint.CHAT,
            messages=messages,
            format=asked or self.structured_format(),
            tools=tools,
            template_args=self.template_args(),
            generation_prompt=self.generation_prompt(),
            continue_final=self.continue_final_message,
            thinking_shown=self.include_reasoning,
            work=context.work(size, self.n),
            **self._common(context),
        )
