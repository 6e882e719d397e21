"""Requests of POST /v1/responses: conversion to the Call of a chat.

Also lists the request's fields that an answer repeats. gateway/stored_responses.py decides whether
an answer is stored and reads the conversation that it continues. Requests for background answers,
or for OpenAI's own tools without any function, are refused with the field's name.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from lorikeet.apis.body import Body, NoOps, misfit, unsupported
from lorikeet.apis.chat.messages import MAX_MESSAGES, FunctionName
from lorikeet.apis.chat.request import ChatRequest, IgnoredFields, TemplateArgs
from lorikeet.apis.fields import INT32
from lorikeet.apis.request import SAMPLING_NO_OPS, CallContext, SampledRequest, Tokens
from lorikeet.apis.responses.items import InputItem, check_outputs, messages_of
from lorikeet.apis.responses.tools import (
    ResponseToolChoice,
    ResponseTools,
    chat_choice,
    chat_tools,
    repeated,
)
from lorikeet.apis.tools import JsonSchema, ResponseFormat, check_choice, left_out, refuse_long_json
from lorikeet.errors import InvalidInput
from lorikeet.protocol.messages import Call, Endpoint
from lorikeet.text.compact_json import dump

_LOGPROBS = "message.output_text.logprobs"


class TextFormat(Body):
    """Answer format: text, any JSON object, or JSON constrained to a schema.

    strict: False: keywords of the schema that the grammar cannot enforce are left out, and the
        finished answer is checked against the schema; else such keywords are refused.
    """

    type: Literal["text", "json_object", "json_schema"]
    name: FunctionName | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], BeforeValidator(refuse_long_json)] | None = Field(
        default=None, alias="schema"
    )
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "TextFormat":
        for name, value in (("name", self.name), ("schema", self.schema_)):
            if (value is not None) != (self.type == "json_schema"):
                raise misfit(name, "want it with the type json_schema, and only there")
        return self

    def for_chat(self) -> ResponseFormat | None:
        """Return the format in the form of response_format in OpenAI's chat API; None for text."""
        if self.type == "text":
            return None
        schema = None
        if self.schema_ is not None:
            schema = JsonSchema.unchecked(name=self.name, schema_=self.schema_, strict=self.strict)
        return ResponseFormat.unchecked(type=self.type, json_schema=schema)


class TextSettings(Body):
    """Format and verbosity of the answer's text.

    verbosity: passed to chat templates that read it.
    """

    format: TextFormat = TextFormat(type="text")
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningSettings(Body):
    """Settings of reasoning.

    effort: passed to chat templates that read it.
    summary: accepted, without effect.
    context: only `auto` is accepted, because the chat template decides which earlier reasoning the
        model gets.
    """

    no_ops: ClassVar[NoOps] = {"context": ("auto",), "mode": ("standard",)}

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Body):
    """Options of a stream of /v1/responses, none of which has an effect."""

    no_ops: ClassVar[NoOps] = {"include_obfuscation": (False,)}


def _parse_input(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _parse_include(value: object) -> object:
    if isinstance(value, list):
        for name in value:
            if name not in (_LOGPROBS, "reasoning.encrypted_content"):
                raise unsupported(hint=f": want {_LOGPROBS}")
    return value


class ResponsesRequest(IgnoredFields, SampledRequest):
    """Request of POST /v1/responses. Without max_output_tokens an answer may fill the rest of the
    context.
    """

    limit_name: ClassVar[str] = "max_output_tokens"
    no_ops: ClassVar[NoOps] = {
        **SAMPLING_NO_OPS,
        "background": (False,),
        "context_management": ([],),
        "truncation": ("disabled",),
    }
    dropped: ClassVar[Collection[str]] = {*IgnoredFields.dropped, "client_metadata"}  # Codex's
    hints: ClassVar[dict[str, str]] = {
        "conversation": ": send previous_response_id, or the earlier turns as items of input",
        "prompt": ": prompts are not stored here; send instructions and input",
        "background": ": an answer comes on the request's own connection; set stream for long ones",
        "messages": ": send input, or ask /v1/chat/completions",
        "max_tokens": ": it is called max_output_tokens here",
        "max_completion_tokens": ": it is called max_output_tokens here",
        "response_format": ": send text.format",
    }

    input: Annotated[
        list[InputItem],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        BeforeValidator(_parse_input, json_schema_input_type=str | list[InputItem]),
    ]
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    include: Annotated[list[str], Field(max_length=16), BeforeValidator(_parse_include)] = Field(
        default=[]
    )
    text: TextSettings = TextSettings()
    reasoning: ReasoningSettings = ReasoningSettings()
    tools: ResponseTools = Field(default=[])
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Field(ge=0, le=INT32)] | None = None
    stream_options: ResponseStreamOptions = ResponseStreamOptions()
    store: bool | None = None
    chat_template_kwargs: TemplateArgs = Field(default={})  # vLLM's and SGLang's
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> "ResponsesRequest":
        if self.top_logprobs and _LOGPROBS not in self.include:
            raise misfit("top_logprobs", f"want {_LOGPROBS} in include with it")
        tools = chat_tools(self.tools)
        # OpenAI's clients send parallel_tool_calls even without tools
        parallel = self.parallel_tool_calls if tools else None
        check_choice(tools, chat_choice(self.tool_choice, tools), parallel)
        return self

    def output_limit(self) -> int | None:
        """Return max_output_tokens; None: an answer may fill the rest of the model's context."""
        return self.max_output_tokens

    def to_call(self, context: CallContext) -> Call:
        """Return a chat's Call for a replica, to be answered in the format of /v1/responses.

        context: facts that are not in the body, such as caller and model.

        Raises InvalidInput if the input does not fit the stored conversation that it continues.
        """
        stored = context.stored_items
        given = [stored.resolve(item) for item in self.input]
        check_outputs(stored.past, given)
        items = [*stored.past, *given]
        if len(items) > MAX_MESSAGES:
            problem = f"input: the conversation has {len(items)} items: want at most {MAX_MESSAGES}"
            raise InvalidInput(problem, param="input")
        return self._as_chat(items).to_call(
            context,
            format_param="text.format",
            endpoint=Endpoint.RESPONSES,
            request_fields=self.repeated(context.stores, context.scheduling.background),
            left_out=left_out(self.tools),
        )

    def _as_chat(self, items: Sequence[InputItem]) -> ChatRequest:
        """Return an equivalent request of OpenAI's chat API, without validating it: this request is
        valid.

        items: stored conversation that the request continues, then its input.
        """
        tools = chat_tools(self.tools)
        return ChatRequest.unchecked(
            **self.sampled(),
            model=self.model,
            messages=messages_of(self.instructions, items),
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            logprobs=_LOGPROBS in self.include,
            top_logprobs=self.top_logprobs,
            response_format=self.text.format.for_chat(),
            tools=tools,
            tool_choice=chat_choice(self.tool_choice, tools),
            parallel_tool_calls=self.parallel_tool_calls,
            stream=self.stream,
            reasoning_effort=self.reasoning.effort,
            verbosity=self.text.verbosity,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def repeated(self, stored: bool, flex: bool) -> bytes:
        """Return the fields of the request that its answer repeats, as JSON members without outer
        braces.

        stored: value of the answer's member `store`.
        flex: whether the request runs in the background (service tier flex).
        """
        members = {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": self.reasoning.effort, "summary": self.reasoning.summary},
            "safety_identifier": self.safety_identifier,
            "service_tier": "flex" if flex else "default",
            "store": stored,
            "temperature": self.temperature,
            "text": self.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": self.tool_choice or "auto",
            "tools": repeated(self.tools),
            "top_logprobs": self.top_logprobs,
            "top_p": self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }
        return dump(members)[1:-1]


class InputTokensRequest(ResponsesRequest):
    """Request of POST /v1/responses/input_tokens. Fields that are not part of the prompt have no
    effect.
    """

    def to_call(self, context: CallContext) -> Call:
        """Return the request as a Call that only counts tokens, without the adapter: its weights
        do not change the count.

        context: facts that are not in the body, such as caller and model.

        Raises InvalidInput if POST /v1/responses would, too: if the input does not fit the stored
        conversation that it continues.
        """
        call = super().to_call(context)
        return replace(
            call,
            endpoint=Endpoint.INPUT_TOKENS,
            max_tokens=0,
            adapter=None,
            stream=False,
        )
