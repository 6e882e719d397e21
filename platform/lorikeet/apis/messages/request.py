"""Requests of POST /v1/messages and /v1/messages/count_tokens, converted to the Call of a chat.

Tools that Anthropic defines are left out if the request also has tools of the client. Requests that
need a container or stored messages are refused with the field's name.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from lorikeet.apis.body import Body, NoOps, misfit
from lorikeet.apis.chat.messages import MAX_MESSAGES
from lorikeet.apis.chat.request import ChatRequest, TemplateArgs
from lorikeet.apis.fields import INT32, Stop, Temperature, TopK, TopP, refuse_kind
from lorikeet.apis.messages.content import (
    MessageTurn,
    Texts,
    ToolName,
    chat_of,
    check_turns,
    offered_names,
)
from lorikeet.apis.request import ApiRequest, CallContext
from lorikeet.apis.tools import (
    MAX_TOOLS,
    Function,
    JsonSchema,
    NamedTool,
    OtherTool,
    ResponseFormat,
    Tool,
    check_choice,
    check_no_others,
    left_out,
    refuse_long_json,
)
from lorikeet.errors import ThreadsUnsupported
from lorikeet.protocol.messages import Call, Endpoint

_MAX_DECLARED = 1024
"""Maximum number of tools of a request, including those with defer_loading."""
_SEARCH = "tool_search_tool_"
_CALLED_BY_CLIENTS = (
    "want custom tools, with a name and an input_schema; this service runs no tools of its own"
)


class CustomTool(Body):
    """Tool that the client runs.

    strict: whether the inputs of calls are constrained to the input_schema.
    defer_loading: the model gets the tool once a tool_reference or tool_addition in the messages
        names it.
    """

    dropped: ClassVar[Collection[str]] = {"cache_control", "eager_input_streaming"}
    no_ops: ClassVar[NoOps] = {
        "allowed_callers": (["direct"],),
        "input_examples": ([],),
    }
    hints: ClassVar[dict[str, str]] = {
        "allowed_callers": ': only the model calls tools; want ["direct"]',
        "input_examples": ": put them into the description",
    }

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    defer_loading: bool = False

    def for_chat(self) -> Tool:
        """Return the tool in the form of OpenAI's chat API, without absent fields."""
        given = self.model_dump(exclude_none=True, include={"name", "description", "strict"})
        function = Function.unchecked(**given, parameters=self.input_schema)
        return Tool.unchecked(type="function", function=function)


MessageTool = CustomTool | OtherTool


def _parse_tool(value: object) -> MessageTool:
    match value:
        case {"type": str(kind)} if kind != "custom":
            return OtherTool(type=kind)
    return CustomTool.model_validate(value)


class MessageToolChoice(Body):
    """Choice of the tools that the model may or must call.

    disable_parallel_tool_use: allow at most one call.
    """

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _names_its_tool(self) -> "MessageToolChoice":
        if (self.name is not None) != (self.type == "tool"):
            raise misfit("name", "want it with the type tool, and only there")
        return self

    def for_chat(self) -> str | NamedTool:
        """Return the choice in the form of tool_choice in OpenAI's chat API."""
        if self.name is not None:
            return NamedTool(type="function", function={"name": self.name})
        return "required" if self.type == "any" else self.type


class JsonFormat(Body):
    """Answer format: JSON constrained to a schema.

    strict: False: keywords of the schema that cannot be enforced are left out instead of refused,
        and the finished answer is checked against the schema. Anthropic's API has no such field.
    """

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], BeforeValidator(refuse_long_json)] = Field(alias="schema")
    strict: bool | None = None

    def for_chat(self) -> ResponseFormat:
        """Return the format in the form of response_format in OpenAI's chat API."""
        schema = JsonSchema.unchecked(name="answer", schema_=self.schema_, strict=self.strict)
        return ResponseFormat.unchecked(type="json_schema", json_schema=schema)


class OutputConfig(Body):
    """Settings of the answer: its format and effort.

    effort: passed to chat templates as `reasoning_effort`.
    """

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class ThinkingConfig(Body):
    """Settings of thinking, for chat templates that read `enable_thinking`.

    If a request has no `thinking`, templates get `enable_thinking` false, and the answer shows no
    thinking.

    type: `disabled` turns thinking off, the other types turn it on.
    budget_tokens: accepted, without effect: max_tokens limits thinking and answer together.
    display: `omitted` leaves the thinking out of the answer.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=0, le=INT32)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class MessageMetadata(Body):
    """Metadata of a request.

    user_id: name of a session. If an alias splits its requests between two versions, all requests
        of a session get the same version.
    """

    user_id: Annotated[str, Field(max_length=1024)] | None = None


def _parse_context_management(value: object) -> object:
    """Parse context_management. Only edits of type clear_thinking_… are accepted; they have no
    effect.

    The chat template itself decides which thinking of earlier answers the model gets.
    """
    edits = value.get("edits", []) if isinstance(value, dict) else None
    if not isinstance(edits, list) or not all(isinstance(edit, dict) for edit in edits):
        raise ValueError('want {"edits": [{"type": "clear_thinking_…"}]}')
    for edit in edits:
        kind = edit.get("type")
        if not isinstance(kind, str) or not kind.startswith("clear_thinking_"):
            refuse_kind(kind, (), "send the messages that the model is to see")
            raise ValueError("want the type of every edit")
    return value


ContextManagement = Annotated[
    dict[str, Any],
    PlainValidator(_parse_context_management, json_schema_input_type=dict[str, Any]),
]


class PromptRequest(ApiRequest):
    """Fields of the prompt, common to /v1/messages and /v1/messages/count_tokens."""

    no_ops: ClassVar[NoOps] = {"speed": ("standard",), "mcp_servers": ([],)}
    # prefixes are cached by content, and answers do not say why a prefix was not cached
    dropped: ClassVar[Collection[str]] = {"cache_control", "diagnostics"}
    hints: ClassVar[dict[str, str]] = {
        "container": ": this service runs no code",
        "inference_geo": ": where requests run is the operator's matter",
        "max_completion_tokens": ": it is called max_tokens here",
        "mcp_servers": ": connect to them yourself, and send what they offer as tools",
        "response_format": ": send output_config.format",
        "speed": ": every request is served as fast as it can be",
        "stop": ": it is called stop_sequences here",
    }

    messages: Annotated[
        list[MessageTurn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    system: Texts | None = None
    tools: Annotated[
        list[
            Annotated[MessageTool, PlainValidator(_parse_tool, json_schema_input_type=MessageTool)]
        ],
        Field(max_length=_MAX_DECLARED, fail_fast=True),
        BeforeValidator(refuse_long_json),
    ] = Field(default=[])
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: JsonFormat | None = None
    context_management: ContextManagement | None = None
    chat_template_kwargs: TemplateArgs = Field(default={})  # vLLM's

    @model_validator(mode="before")
    @classmethod
    def _without_thread(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("thread") is not None:
            raise ThreadsUnsupported(
                "not supported here: thread: messages are not stored here, send all of them",
                param="thread",
            )
        return data

    @model_validator(mode="after")
    def _agrees(self) -> "PromptRequest":
        check_turns(self.messages)
        if self.output_format is not None and self.output_config.format is not None:
            raise misfit("output_format", "want either it or output_config.format, not both")
        choice = self.tool_choice.for_chat() if self.tool_choice else None
        check_choice(self._chat_tools(), choice, parallel=None)
        return self

    def _chat_tools(self) -> list[Tool]:
        """Return the tools that the model gets, in the form of OpenAI's chat API.

        A tool with defer_loading is included once the messages name it. If the request also has
        Anthropic's search for tools, which is not served, all deferred tools are included.

        Raises a validation error: body.misfit for too many tools, body.unsupported if no tool is
        served.
        """
        custom = [tool for tool in self.tools if isinstance(tool, CustomTool)]
        if not custom:
            check_no_others(self.tools, _CALLED_BY_CLIENTS)
        searched = any(kind.startswith(_SEARCH) for kind in left_out(self.tools))
        names = {tool.name for tool in custom if searched or not tool.defer_loading}
        offered = offered_names(self.messages, names) if custom else names
        tools = [tool.for_chat() for tool in custom if tool.name in offered]
        if len(tools) > MAX_TOOLS:
            raise misfit("tools", f"want at most {MAX_TOOLS} that are not deferred")
        return tools

    def session(self) -> str | None:
        """Return None: a request that only counts tokens belongs to no session."""
        return None

    def _as_chat(self, **sampling: Any) -> ChatRequest:
        """Return an equivalent request of OpenAI's chat API, without validating it: this request is
        valid.

        If the last message is the assistant's, the answer continues it.

        sampling: the chat request's sampling fields, `stop` and `stream`.
        """
        messages = chat_of(self.system, self.messages)
        choice = self.tool_choice
        form = self.output_config.format or self.output_format
        thinks = {} if self.thinking is None else {"enable_thinking": self._thinks()}
        shown = self.thinking is None or self.thinking.display != "omitted"
        return ChatRequest.unchecked(
            model=self.model,
            messages=messages,
            response_format=form and form.for_chat(),
            tools=self._chat_tools(),
            tool_choice=choice and choice.for_chat(),
            parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
            reasoning_effort=self.output_config.effort,
            chat_template_kwargs=thinks | self.chat_template_kwargs,
            include_reasoning=shown and self._thinks(),
            continue_final_message=messages[-1].role == "assistant",
            **sampling,
        )

    def _format_param(self) -> str:
        return "output_format" if self.output_format is not None else "output_config.format"

    def _unasked(self) -> dict[str, bool]:
        """Return variables for the chat template that the request implies by leaving fields out:
        `enable_thinking` false without `thinking`.
        """
        return {"enable_thinking": False} if self.thinking is None else {}

    def _thinks(self) -> bool:
        """Return whether the request asks for thinking, by a variable of the chat template or by
        `thinking`, over which the variable has precedence.
        """
        asked = self.thinking is not None and self.thinking.type != "disabled"
        given = self.chat_template_kwargs
        return bool(given.get("enable_thinking", given.get("thinking", asked)))


class MessagesRequest(PromptRequest):
    """Request of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=0, le=INT32)]
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    stop_sequences: Stop = ()
    stream: bool = False
    metadata: MessageMetadata = MessageMetadata()
    service_tier: Literal["auto", "standard_only"] | None = None

    def to_call(self, context: CallContext) -> Call:
        """Return a chat's Call for a replica, to be answered in the format of /v1/messages."""
        chat = self._as_chat(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences,
            stream=self.stream,
        )
        return chat.with_sampling_defaults(context.sampling_defaults).to_call(
            context,
            format_param=self._format_param(),
            endpoint=Endpoint.MESSAGES,
            max_tokens=self.max_tokens,
            template_defaults=self._unasked(),
            left_out=left_out(self.tools),
        )

    def session(self) -> str | None:
        """Return metadata.user_id, which names the request's session; None without one."""
        return self.metadata.user_id


class CountTokensRequest(PromptRequest):
    """Request of POST /v1/messages/count_tokens."""

    def to_call(self, context: CallContext) -> Call:
        """Return the request as a Call without its adapter, whose weights no count depends on."""
        call = self._as_chat().to_call(context, format_param=self._format_param())
        return replace(
            call,
            endpoint=Endpoint.COUNT_TOKENS,
            max_tokens=0,
            adapter=None,
            template_defaults=self._unasked(),
            left_out=left_out(self.tools),
        )
