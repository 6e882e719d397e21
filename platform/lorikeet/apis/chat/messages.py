"""Messages of a chat, parsed as in OpenAI's API and converted to the form that chat templates
expect.
"""

from collections.abc import Collection, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator, ValidationInfo, model_validator
from pydantic_core import from_json
from typing_extensions import TypedDict

from lorikeet.apis.body import Body, NoOps, ValueBudget, json_text, misfit
from lorikeet.apis.fields import refuse_kind

MAX_MESSAGES = 4096
MAX_TOOL_CALLS = 128
_TEXTS = ("text", "refusal")  # types of parts; each type is also the key of the part's text
FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
_CallId = Annotated[str, Field(min_length=1, max_length=256)]

CLIENT_SIDE_FIELDS = frozenset({"parsed", "parsed_arguments", "provider_specific_fields"})
"""Fields that OpenAI's clients and LiteLLM add to messages and calls that they received.

Clients send such messages back, so requests may contain these fields; they have no effect.
"""


class TextPart(TypedDict):
    """Text part of a message's content."""

    type: Literal["text"]
    text: str


class RefusalPart(TypedDict):
    """Content part with the assistant's refusal to answer."""

    type: Literal["refusal"]
    refusal: str


def _parse_role(value: object) -> object:
    """Parse a message's role; `developer`, the name that newer clients use, becomes `system`."""
    return "system" if value == "developer" else value


def _parse_text(value: object) -> object:
    """Parse a message's content, a string or a list of text parts, into one string, the joined
    parts.
    """
    if not isinstance(value, list):
        return value
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        refuse_kind(kind, _TEXTS, "want text alone")
        if kind not in _TEXTS:
            raise ValueError('want a string or a list of {"type": "text", "text": "…"} parts')
        if not isinstance(part.get(kind), str):
            raise ValueError(f'want a string as "{kind}" of every part')
    return "".join(part[part["type"]] for part in value)


def parse_object(value: object, info: ValidationInfo) -> dict[str, Any]:
    """Parse a string that is the JSON text of an object.

    An empty string is {}. Raises ValueError for anything else. Raises RequestTooLarge if all such
    strings of a request's body together contain too many values.

    info: its context is the body's ValueBudget, which counts these values.
    """
    _spend(value, info)
    try:
        text = value or "{}" if isinstance(value, str) else "null"
        parsed = from_json(text)
    except ValueError:  # also for JSON nested deeper than a body may be
        parsed = None
    if not isinstance(parsed, dict):
        raise ValueError("want the JSON text of an object")
    json_text(parsed)
    return parsed


def parse_arguments(value: object, info: ValidationInfo) -> dict[str, Any] | str:
    """Parse the arguments of a function call in an earlier message.

    Arguments may be any text, as in OpenAI's API. Chat templates want an object: JSON that
    max_tokens cut off becomes the object that its readable part describes, and empty text becomes
    {}. Other text stays text. Raises ValueError for values that are not text. Raises
    RequestTooLarge if all such texts of a request's body together contain too many values.

    info: its context is the body's ValueBudget, which counts these values.
    """
    if not isinstance(value, str):
        raise ValueError("want the JSON text of an object")
    _spend(value, info)
    try:
        parsed = from_json(value or "{}", allow_partial="trailing-strings")
    except ValueError:
        return value
    if not isinstance(parsed, dict):
        return value
    json_text(parsed)
    return parsed


def _spend(value: object, info: ValidationInfo) -> None:
    if isinstance(value, str) and isinstance(info.context, ValueBudget):
        info.context.spend(value.encode(errors="replace"))


Arguments = Annotated[
    dict[str, Any] | str, PlainValidator(parse_arguments, json_schema_input_type=str)
]


class PastFunction(Body):
    """Function that the assistant called in an earlier message, with the arguments of the call."""

    dropped: ClassVar[Collection[str]] = CLIENT_SIDE_FIELDS

    name: FunctionName
    arguments: Arguments


class PastCall(Body):
    """Tool call that the assistant made in an earlier message."""

    dropped: ClassVar[Collection[str]] = {*CLIENT_SIDE_FIELDS, "index"}  # index: of a streamed call

    id: _CallId
    type: Literal["function"]
    function: PastFunction


_SentRole = Literal["system", "developer", "user", "assistant", "tool", "function"]


class Message(Body):
    """Message of a chat, of any role."""

    no_ops: ClassVar[NoOps] = {"tool_calls": ([],), "annotations": ([],)}
    dropped: ClassVar[Collection[str]] = CLIENT_SIDE_FIELDS

    role: Annotated[
        Literal["system", "user", "assistant", "tool", "function"],
        BeforeValidator(_parse_role, json_schema_input_type=_SentRole),
    ]
    content: Annotated[
        str | None,
        BeforeValidator(
            _parse_text, json_schema_input_type=str | list[TextPart | RefusalPart] | None
        ),
    ] = None
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    tool_calls: (
        Annotated[list[PastCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] | None
    ) = None
    tool_call_id: _CallId | None = None
    function_call: PastFunction | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # name of reasoning_content in other servers

    @model_validator(mode="after")
    def _fits_its_role(self) -> "Message":
        if self.tool_calls is not None and self.role != "assistant":
            raise misfit("tool_calls", "want it only in an assistant's message")
        if self.function_call is not None and (self.role != "assistant" or self.tool_calls):
            raise misfit("function_call", "want it in an assistant's message without tool_calls")
        for name in ("reasoning_content", "reasoning"):
            if getattr(self, name) is not None and self.role != "assistant":
                raise misfit(name, "want it only in an assistant's message")
        if self.role == "function" and self.name is None:
            raise misfit("name", "want the function's name in its message")
        if self.content is None and not self.tool_calls and self.function_call is None:
            raise misfit("content", "Field required")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise misfit("tool_call_id", "want it in every tool's message, and only there")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it, with content always a string."""
        message: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if thought := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = thought
        return message


def template_messages(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """Return messages for chat templates; deprecated function calls become tool calls."""
    shown = list[dict[str, Any]]()
    call_id = ""
    for index, message in enumerate(messages):
        turn = message.for_template()
        if message.function_call is not None:
            call_id = f"call{index:05d}"
            function = message.function_call.model_dump()
            turn["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
        elif message.role == "function":
            turn |= {"role": "tool", "tool_call_id": call_id}
        shown.append(turn)
    return tuple(shown)


def check_answered(messages: Sequence[Message]) -> None:
    """Raise a validation error (body.misfit) if a tool's or function's message answers no earlier
    call.
    """
    called: set[str] = set()
    functions: set[str] = set()
    for index, message in enumerate(messages):
        if message.function_call is not None:
            functions.add(message.function_call.name)
        if message.role == "function" and message.name not in functions:
            raise misfit("messages", f"messages[{index}] answers no call of an earlier message")
        called.update(call.id for call in message.tool_calls or ())
        if message.tool_call_id is not None and message.tool_call_id not in called:
            raise misfit(
                "messages", f"messages[{index}] answers no tool call of an earlier message"
            )
