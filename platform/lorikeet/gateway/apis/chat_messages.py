"""The messages of a chat, as OpenAI's clients send them and as chat templates read them."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator, model_validator
from pydantic_core import from_json
from typing_extensions import TypedDict

from lorikeet.gateway.body import Body, NoOps, misfit

MAX_MESSAGES = 4096
MAX_TOOL_CALLS = 128
FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
_CallId = Annotated[str, Field(min_length=1, max_length=256)]


class TextPart(TypedDict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


def _parse_role(value: object) -> object:
    """Parse a role; `developer` is what newer clients call `system`."""
    return "system" if value == "developer" else value


def _parse_text(value: object) -> object:
    """Parse a message's content: a string, or a list of text parts to be joined."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ValueError('want a string or a list of {"type": "text", "text": "…"} parts')
        if not isinstance(part.get("text"), str):
            raise ValueError('want a string as "text" of every part')
    return "".join(part["text"] for part in value)


def _parse_arguments(value: object) -> dict[str, Any]:
    """Parse a call's arguments: templates want the object, clients send its JSON text."""
    try:
        arguments = from_json(value, allow_inf_nan=False) if isinstance(value, str) else None
    except ValueError:  # also where it is nested more deeply than a body may be
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError("want the JSON text of an object")
    return arguments


Arguments = Annotated[dict[str, Any], PlainValidator(_parse_arguments, json_schema_input_type=str)]


class PastFunction(Body):
    """The function that an assistant called, and with what."""

    name: FunctionName
    arguments: Arguments


class PastCall(Body):
    """A call that the assistant made in an earlier turn."""

    id: _CallId
    type: Literal["function"]
    function: PastFunction


class Message(Body):
    """One turn of a conversation."""

    no_ops: ClassVar[NoOps] = {"tool_calls": ([],), "annotations": ([],)}

    role: Annotated[
        Literal["system", "user", "assistant", "tool"],
        BeforeValidator(
            _parse_role,
            json_schema_input_type=Literal["system", "developer", "user", "assistant", "tool"],
        ),
    ]
    content: Annotated[
        str | None, BeforeValidator(_parse_text, json_schema_input_type=str | list[TextPart] | None)
    ] = None
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    tool_calls: (
        Annotated[list[PastCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] | None
    ) = None
    tool_call_id: _CallId | None = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> "Message":
        if self.tool_calls is not None and self.role != "assistant":
            raise misfit("tool_calls", "want it only in an assistant's message")
        if self.content is None and not self.tool_calls:
            raise misfit("content", "Field required")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise misfit("tool_call_id", "want it in every tool's message, and only there")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates read it; content is always a string."""
        message: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return message


def check_answered(messages: Sequence[Message]) -> None:
    """Check that every tool's message answers a call of an earlier turn. Raises a misfit."""
    called: set[str] = set()
    for index, message in enumerate(messages):
        called.update(call.id for call in message.tool_calls or ())
        if message.tool_call_id is not None and message.tool_call_id not in called:
            raise misfit(
                "messages", f"messages[{index}] answers no tool call of an earlier message"
            )
