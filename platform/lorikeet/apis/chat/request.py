"""Requests of POST /v1/chat/completions, and their conversion to a Call."""

import re
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, model_validator

from lorikeet.apis.body import Body, NoOps, json_text, misfit, unsupported
from lorikeet.apis.chat.messages import MAX_MESSAGES, Message, check_answered, template_messages
from lorikeet.apis.request import SAMPLING_NO_OPS, CallContext, GenerateRequest, Tokens
from lorikeet.apis.tools import (
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
from lorikeet.protocol.messages import Call, Endpoint

MAX_TEMPLATE_ARGS = 32
MAX_TEMPLATE_ARGS_LENGTH = 4096
"""Limit on the characters of the JSON text of chat_template_kwargs, which bounds the time of
rendering.
"""

_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]{0,63}")
_TAKEN = {
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("conversation", "chat_template", "tokenize", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    "sanitize_control_tokens",
    "self",
}
"""Names that chat_template_kwargs may not contain, because they are parameters of transformers'
apply_chat_template.
"""


def _parse_template_args(value: object) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > MAX_TEMPLATE_ARGS:
        raise ValueError(f"want an object of at most {MAX_TEMPLATE_ARGS} variables")
    if taken := sorted(_TAKEN.intersection(value)):
        raise unsupported(hint=f" with {taken[0]}")
    if not all(map(_NAME.fullmatch, value)):
        raise ValueError("want names of at most 64 letters, digits and _")
    if len(json_text(value)) > MAX_TEMPLATE_ARGS_LENGTH:
        raise ValueError(f"want at most {MAX_TEMPLATE_ARGS_LENGTH} characters of JSON")
    return value


TemplateArgs = Annotated[
    dict[str, Any],
    PlainValidator(_parse_template_args, json_schema_input_type=dict[str, Any]),
]


class TemplateFields(Body):
    """Request fields that control the chat template."""

    chat_template_kwargs: TemplateArgs = Field(default={})
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    verbosity: Literal["low", "medium", "high"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    def check_continuation(self, last: Message) -> None:
        """Raise a validation error (body.misfit) if continue_final_message cannot be obeyed: if
        add_generation_prompt is true, too, or the last message is not the assistant's text.

        last: the last message.
        """
        if not self.continue_final_message:
            return
        if self.add_generation_prompt:
            raise misfit("continue_final_message", "want add_generation_prompt to be false with it")
        if last.role != "assistant":
            raise misfit("continue_final_message", "want the last message to be the assistant's")
        if last.tool_calls or last.function_call is not None:
            raise misfit("continue_final_message", "want a last message without calls")

    def generation_prompt(self) -> bool:
        """Return whether the chat template ends the prompt with the beginning of the assistant's
        message.
        """
        return self.add_generation_prompt is not False and not self.continue_final_message

    def template_args(self) -> dict[str, Any]:
        """Return the client's variables for the chat template.

        Variables in chat_template_kwargs override those of the fields reasoning_effort and
        verbosity.
        """
        given = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        known = {name: value for name, value in given.items() if value is not None}
        return known | self.chat_template_kwargs

    def _template_defaults(self) -> dict[str, Any]:
        """Return the chat template's variable enable_thinking: false if reasoning_effort is "none",
        else true; {} if the request has no reasoning_effort.
        """
        effort = self.reasoning_effort
        return {} if effort is None else {"enable_thinking": effort != "none"}


ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"]


class IgnoredFields(Body):
    """Fields that are accepted and have no effect, except that service_tier "flex" makes a request
    run in the background.

    Fields about prompt caching have no effect because prefixes are always cached by content.
    """

    dropped: ClassVar[Collection[str]] = {"prompt_cache_options"}

    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    service_tier: ServiceTier | None = None


class ChatRequest(TemplateFields, IgnoredFields, GenerateRequest):
    """Request of POST /v1/chat/completions. Without max_tokens an answer may fill the rest of the
    context.
    """

    no_ops: ClassVar[NoOps] = {
        **SAMPLING_NO_OPS,
        "add_special_tokens": (False,),  # the chat template adds special tokens
        "best_of": (1,),
        "documents": ([],),
        "echo": (False,),
        "mm_processor_kwargs": ({},),
        "modalities": (["text"],),
        "store": (False,),
    }
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
        self.check_continuation(self.messages[-1])
        has_format = self.response_format is not None and self.response_format.type != "text"
        self.check_one_format(*["response_format"] * has_format)
        return self

    def output_limit(self) -> int | None:
        """Return max_completion_tokens, or max_tokens, its older name.

        None: an answer may fill the rest of the context.
        """
        return self.max_completion_tokens or self.max_tokens

    def alternatives(self) -> int | None:
        """Return top_logprobs, the number of most likely tokens to report at each token of the
        answer.

        None: no logprobs are requested.
        """
        return self.top_logprobs if self.logprobs else None

    def to_call(
        self, context: CallContext, format_param: str = "response_format", **others: Any
    ) -> Call:
        """Return the request as a Call.

        format_param: the name that response_format has in the client's API, for errors.
        others: further members of the Call, set by another API's request that was converted to this
            chat request.
        """
        if self.functions:
            tools = function_use(self.functions, self.function_call)
        else:
            tools = tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)
        asked = self.response_format and self.response_format.as_format(format_param)
        members = self._common(context) | {
            "endpoint": Endpoint.CHAT,
            "messages": template_messages(self.messages),
            "format": asked or self.structured_format(),
            "tools": tools,
            "template_args": self.template_args(),
            "template_defaults": self._template_defaults(),
            "generation_prompt": self.generation_prompt(),
            "continue_final": self.continue_final_message,
            "thinking_shown": self.include_reasoning,
        }
        return Call(**members | others)
