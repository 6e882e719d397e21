"""POST /v1/chat/completions: its request, and the Call that it becomes."""

from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from lorikeet.gateway.apis.api_request import CallContext, GenerateRequest, Tokens, chat_tokens
from lorikeet.gateway.apis.chat_messages import (
    MAX_MESSAGES,
    Message,
    check_answered,
    template_messages,
)
from lorikeet.gateway.apis.no_ops import CHAT_NO_OPS
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
from lorikeet.gateway.body import NoOps, misfit
from lorikeet.protocol.messages import Call, Endpoint


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
