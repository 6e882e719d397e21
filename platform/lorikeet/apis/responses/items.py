"""Input items of /v1/responses, and their conversion to chat messages."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import TypedDict

from lorikeet.apis.body import Body, NoOps, misfit
from lorikeet.apis.chat.messages import (
    CLIENT_SIDE_FIELDS,
    Arguments,
    FunctionName,
    Message,
    PastCall,
    PastFunction,
)
from lorikeet.apis.fields import refuse_kind
from lorikeet.apis.responses.tools import dotted
from lorikeet.errors import InvalidInput

REFERENCE = "item_reference"
_KINDS = ("message", "function_call", "function_call_output", "reasoning", REFERENCE)
_TEXTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
_CallId = Annotated[str, Field(min_length=1, max_length=256)]
_Ignored = Annotated[Any, Field(description="Taken, without effect.")]


class InputText(TypedDict):
    """Text part of an item's content. Parts of other types, such as images, are refused.

    reasoning_text occurs only in items of type reasoning.
    """

    type: Literal["input_text", "output_text", "reasoning_text"]
    text: str


def _parse_kind(value: object) -> object:
    return refuse_kind(
        value,
        _KINDS,
        "want messages, function_call, function_call_output, reasoning and item_reference",
    )


def _parse_content(value: object) -> object:
    """Join an item's content to one string if it is a list of text parts, else return it unchanged.

    Raises ValueError for a part that is not text.
    """
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        refuse_kind(kind, tuple(_TEXTS), "want text alone, as input_text")
        text = part.get(_TEXTS[kind]) if isinstance(kind, str) and kind in _TEXTS else None
        if not isinstance(text, str):
            raise ValueError('want a string or a list of {"type": "input_text", "text": "…"} parts')
        texts.append(text)
    return "".join(texts)


Content = Annotated[
    str,
    BeforeValidator(_parse_content, json_schema_input_type=str | list[InputText]),
]


class InputItem(Body):
    """Input item: a message, a function call, its output, earlier reasoning, or an item_reference.

    An item_reference stands for the stored item with its id.

    type: may be absent in a message.
    id: has an effect only in an item_reference.
    status, phase, annotations, and all of a reasoning item but its text: no effect.
    """

    no_ops: ClassVar[NoOps] = {"caller": ({"type": "direct"},)}
    dropped: ClassVar[Collection[str]] = CLIENT_SIDE_FIELDS

    type: Annotated[
        Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"],
        BeforeValidator(_parse_kind),
    ] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None
    call_id: _CallId | None = None
    name: FunctionName | None = None
    namespace: FunctionName | None = None
    arguments: Arguments | None = None
    output: Content | None = None
    id: Annotated[Any, Field(description="Has an effect in an item_reference alone.")] = None
    status: _Ignored = None
    phase: _Ignored = None
    summary: _Ignored = None
    encrypted_content: _Ignored = None

    @model_validator(mode="before")
    @classmethod
    def _join_reasoning(cls, data: Any) -> Any:
        """Join the texts of a reasoning item; ignore parts of other types, which other services
        produce.
        """
        if isinstance(data, dict) and data.get("type") == "reasoning":
            return {**data, "content": _reasoning_text(data.get("content"))}
        return data

    @model_validator(mode="after")
    def _fits_its_type(self) -> "InputItem":
        given = {
            name
            for name in ("role", "content", "call_id", "name", "arguments", "output")
            if getattr(self, name) is not None
        }
        wanted = _FIELDS[self.type]
        for name in sorted(wanted - given):
            raise misfit(name, "Field required")
        for name in sorted(given - wanted - _MAY_HAVE.get(self.type, set())):
            raise misfit(name, f"want it not in a {self.type}")
        if self.type == REFERENCE and not isinstance(self.id, str):
            raise misfit("id", "want the id of a stored item")
        return self


_FIELDS = {
    "message": {"role", "content"},
    "function_call": {"call_id", "name", "arguments"},
    "function_call_output": {"call_id", "output"},
    "reasoning": set[str](),
    REFERENCE: set[str](),
}
_MAY_HAVE = {"reasoning": {"content"}}


def _reasoning_text(parts: object) -> str | None:
    """Return the joined text of a reasoning item's parts; None if no part has text."""
    known = [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    texts = [part.get("text") for part in known if part.get("type") == "reasoning_text"]
    return "".join(text for text in texts if isinstance(text, str)) or None


class StoredItems(NamedTuple):
    """Items of stored responses that a request refers to.

    past: items of the conversation that the request continues.
    referenced: items that its item_references name, by id.
    """

    past: Sequence[InputItem] = ()
    referenced: Mapping[str, InputItem] = {}

    def resolve(self, item: InputItem) -> InputItem:
        """Return the stored item that an item_reference names; return any other item unchanged."""
        return self.referenced[item.id] if item.type == REFERENCE else item


def check_outputs(past: Sequence[InputItem], items: Sequence[InputItem]) -> None:
    """Raise InvalidInput if a function_call_output answers no function_call of an earlier item.

    past: items of the stored conversation, before all of `items`.
    """
    called = {item.call_id for item in past if item.type == "function_call"}
    for index, item in enumerate(items):
        if item.type == "function_call":
            called.add(item.call_id)
        elif item.type == "function_call_output" and item.call_id not in called:
            problem = f"input: input[{index}] answers no function_call of an earlier item"
            raise InvalidInput(problem, param="input")


def turn_of(item: InputItem, item_id: str) -> dict[str, Any]:
    """Return an item as it is stored and listed, in a form that InputItem can parse.

    item_id: id that the stored item gets.
    """
    head = {"id": item_id, "type": item.type}
    if item.type == "reasoning":
        return head | {"summary": [], "content": _parts("reasoning_text", item.content)}
    head["status"] = "completed"
    if item.type == "message":
        kind = "output_text" if item.role == "assistant" else "input_text"
        return head | {"role": item.role, "content": _parts(kind, item.content)}
    head["call_id"] = item.call_id or ""
    if item.type == "function_call_output":
        return head | {"output": item.output}
    named = {"name": item.name} | ({"namespace": item.namespace} if item.namespace else {})
    written = item.arguments if isinstance(item.arguments, str) else json.dumps(item.arguments)
    return head | named | {"arguments": written}


def _parts(kind: str, text: str | None) -> list[dict[str, Any]]:
    annotations = {"annotations": list[Any]()} if kind == "output_text" else {}
    return [] if text is None else [{"type": kind, "text": text} | annotations]


def messages_of(instructions: str | None, items: Sequence[InputItem]) -> list[Message]:
    """Return input items as messages of a chat, after a system message of the instructions.

    System messages at the beginning are appended to the instructions. A function call is added to
    the preceding message of the assistant, as chat templates require. Reasoning is added to the
    following message or function call of the assistant.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    thought = ""
    for item in items:
        last = messages[-1] if messages else {}
        role = "system" if item.role == "developer" else item.role
        if item.type == "reasoning":
            thought += item.content or ""
        elif item.type == "message":
            if role == "system" and len(messages) == 1 and last["role"] == "system":
                last["content"] += f"\n\n{item.content}"
            else:
                messages.append({"role": role, "content": item.content})
                if role == "assistant":
                    messages[-1]["reasoning_content"] = thought
            thought = ""
        elif item.type == "function_call":
            if last.get("role") != "assistant" or thought:
                last = {"role": "assistant", "reasoning_content": thought}
                messages.append(last)
                thought = ""
            last.setdefault("tool_calls", []).append(_past_call(item))
        elif item.type == "function_call_output":
            answer = {"role": "tool", "content": item.output, "tool_call_id": item.call_id}
            messages.append(answer)
    return [Message.unchecked(**message) for message in messages]


def _past_call(item: InputItem) -> PastCall:
    function = PastFunction.unchecked(
        name=dotted(item.namespace, item.name or ""), arguments=item.arguments
    )
    return PastCall.unchecked(id=item.call_id, type="function", function=function)
