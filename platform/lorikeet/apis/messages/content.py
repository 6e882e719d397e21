"""Content blocks of /v1/messages, and their conversion to chat messages."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, model_validator
from typing_extensions import TypedDict

from lorikeet.apis.body import Body, json_text, misfit
from lorikeet.apis.chat.messages import Message, PastCall, PastFunction
from lorikeet.apis.fields import refuse_kind

_KINDS = (
    *("text", "tool_use", "tool_result", "thinking", "redacted_thinking"),
    *("tool_addition", "tool_removal"),
)
_TEXT_ALONE = "want text alone"
_ToolUseId = Annotated[str, Field(min_length=1, max_length=256)]
ToolName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,128}$")]


class TextBlockParam(TypedDict):
    """Block of text. Its other fields, such as cache_control, have no effect."""

    type: Literal["text"]
    text: str


def _parse_texts(value: object) -> object:
    """Parse a string, or a list of text blocks, into one string: the texts of the blocks joined."""
    if not isinstance(value, list):
        return value
    texts = []
    for block in value:
        kind = block.get("type") if isinstance(block, dict) else None
        refuse_kind(kind, ("text",), _TEXT_ALONE)
        if kind != "text" or not isinstance(block.get("text"), str):
            raise ValueError('want a string or a list of {"type": "text", "text": "…"} blocks')
        texts.append(block["text"])
    return "".join(texts)


Texts = Annotated[
    str, BeforeValidator(_parse_texts, json_schema_input_type=str | list[TextBlockParam])
]


class ToolReferenceParam(TypedDict):
    """Name of a tool that the client's tool for searching tools has found."""

    type: Literal["tool_reference"]
    tool_name: str


class ResultContent(NamedTuple):
    """Content of a tool's result.

    references: names of tools that the result found; the model may call them from then on.
    """

    text: str
    references: tuple[str, ...] = ()

    def shown(self) -> str:
        """Return the text that the model gets, with a line that lists the tools it can now call."""
        found = f"You can now call {', '.join(self.references)}." if self.references else ""
        return "\n".join(filter(None, (self.text, found)))


def _parse_result(value: object) -> ResultContent:
    blocks, names = value if isinstance(value, list) else [], []
    for block in blocks:
        match block:
            case {"type": "tool_reference", "tool_name": str(name)}:
                names.append(name)
    rest = [b for b in blocks if not (isinstance(b, dict) and b.get("type") == "tool_reference")]
    if len(rest) + len(names) < len(blocks):
        raise ValueError('want references of the form {"type": "tool_reference", "tool_name": …}')
    text = _parse_texts(rest if isinstance(value, list) else value)
    if not isinstance(text, str):
        raise ValueError("want a string or a list of blocks")
    return ResultContent(text, tuple(names))


class NamedChange(TypedDict):
    """Name of the tool in a block of type tool_addition or tool_removal.

    From the block on, the model may call the tool, or may no longer call it.
    """

    type: Literal["tool_reference"]
    name: str


def _parse_change(value: object) -> str:
    match value:
        case {"type": "tool_reference", "name": str(name)}:
            return name
        case {"type": str(kind)}:
            refuse_kind(kind, ("tool_reference",), "declare the tool in tools, and name it here")
    raise ValueError('want {"type": "tool_reference", "name": "…"}')


def _check_numbers(value: dict[str, Any]) -> dict[str, Any]:
    json_text(value)
    return value


class MessageBlock(Body):
    """Content block of a message: text, a tool call, a tool's result, or thinking of an earlier
    answer.

    A block of type tool_addition offers a tool from here on; tool_removal withdraws the offer.

    tool: name of the tool that is added or removed.
    is_error: whether the tool failed; puts "Error: " before its result, because chat templates
        cannot mark a result as failed.
    """

    dropped: ClassVar[Collection[str]] = {
        *("cache_control", "citations", "caller"),
        *("parsed_output", "provider_specific_fields"),  # added by clients that send answers back
        *("signature", "data"),  # in past thinking
    }

    type: Literal[
        "text",
        "tool_use",
        "tool_result",
        "thinking",
        "redacted_thinking",
        "tool_addition",
        "tool_removal",
    ]
    text: str | None = None
    id: _ToolUseId | None = None
    name: ToolName | None = None
    input: Annotated[dict[str, Any], AfterValidator(_check_numbers)] | None = None
    tool_use_id: _ToolUseId | None = None
    content: (
        Annotated[
            ResultContent,
            PlainValidator(
                _parse_result,
                json_schema_input_type=str | list[TextBlockParam | ToolReferenceParam],
            ),
        ]
        | None
    ) = None
    is_error: bool = False
    thinking: str | None = None
    tool: (
        Annotated[str, PlainValidator(_parse_change, json_schema_input_type=NamedChange)] | None
    ) = None

    @model_validator(mode="before")
    @classmethod
    def _known_kind(cls, data: Any) -> Any:
        """Refuse an unsupported block type with an error that names it, instead of one about its
        unknown fields.
        """
        if isinstance(data, dict):
            refuse_kind(data.get("type"), _KINDS, "want text, tool_use and tool_result")
        return data

    @model_validator(mode="after")
    def _fits_its_type(self) -> "MessageBlock":
        given = {name for name in _ALL_FIELDS if getattr(self, name) is not None}
        wanted, allowed = _FIELDS[self.type]
        for name in sorted(wanted - given):
            raise misfit(name, "Field required")
        for name in sorted(given - wanted - allowed):
            raise misfit(name, f"want it not in a {self.type} block")
        return self


_FIELDS: dict[str, tuple[set[str], set[str]]] = {
    "text": ({"text"}, set()),
    "tool_use": ({"id", "name", "input"}, set()),
    "tool_result": ({"tool_use_id"}, {"content"}),
    "thinking": ({"thinking"}, set()),
    "redacted_thinking": (set(), set()),
    "tool_addition": ({"tool"}, set()),
    "tool_removal": ({"tool"}, set()),
}
"""Field names of each block type: first the required fields, then the optional ones."""
_ALL_FIELDS = ("text", "id", "name", "input", "tool_use_id", "content", "thinking", "tool")
_OF_ROLE = {
    "user": {"text", "tool_result", "tool_addition", "tool_removal"},
    "assistant": {"text", "tool_use", "thinking", "redacted_thinking"},
    "system": {"text", "tool_addition", "tool_removal"},
}


def _parse_blocks(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class MessageTurn(Body):
    """Message of /v1/messages: a role and content blocks."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[MessageBlock],
        Field(fail_fast=True),
        BeforeValidator(_parse_blocks, json_schema_input_type=str | list[MessageBlock]),
    ]

    @model_validator(mode="after")
    def _fits_its_role(self) -> "MessageTurn":
        for index, block in enumerate(self.content):
            if block.type not in _OF_ROLE[self.role]:
                misplaced = f"want no {block.type} block in a message of the {self.role}"
                raise misfit(f"content[{index}]", misplaced)
        if not self.content and self.role != "assistant":
            raise misfit("content", "want at least one block")
        return self


def check_turns(turns: Sequence[MessageTurn]) -> None:
    """Raise a validation error (body.misfit) unless the messages form a valid conversation.

    At least one message is a user's. Every tool_result answers an earlier tool_use. The last
    message has no tool_use and, if it is the assistant's, does not end with whitespace.
    """
    if not any(turn.role == "user" for turn in turns):
        raise misfit("messages", "want a message of the user")
    called: set[str | None] = set()
    for index, turn in enumerate(turns):
        called.update(block.id for block in turn.content if block.type == "tool_use")
        for block in turn.content:
            if block.type == "tool_result" and block.tool_use_id not in called:
                unknown = f"messages[{index}] has a tool_result without an earlier tool_use"
                raise misfit("messages", unknown)
    last = turns[-1]
    if any(block.type == "tool_use" for block in last.content):
        raise misfit("messages", "want a message with the tool_result of the last one's tool_use")
    texts = [block.text for block in last.content if block.text]
    if last.role == "assistant" and texts and texts[-1][-1].isspace():
        trailing = "the last one ends with whitespace: leave it to the answer, which goes on there"
        raise misfit("messages", trailing)


def offered_names(turns: Sequence[MessageTurn], names: Iterable[str]) -> set[str]:
    """Return the names of the tools that are offered at the end of a conversation.

    names: names of the tools that are offered at its beginning.
    """
    offered = set(names)
    for block in (block for turn in turns for block in turn.content):
        if block.content is not None:
            offered.update(block.content.references)
        elif block.type == "tool_addition":
            offered.add(str(block.tool))
        elif block.type == "tool_removal":
            offered.discard(str(block.tool))
    return offered


def chat_of(system: str | None, turns: Sequence[MessageTurn]) -> list[Message]:
    """Return the messages of an Anthropic request as messages of a chat, after a system message.

    system: the system message's text; None or empty: no system message.
    turns: messages of the request.

    Consecutive messages of one role become one, as chat templates require. If the last message is
    the assistant's and empty, it is dropped, and the answer takes its place.
    """
    chat = [_Draft("system", [system])] if system else []
    for draft in (draft for turn in turns for draft in _drafts_of(turn)):
        if chat and chat[-1].role == draft.role != "tool":
            chat[-1].add(draft)
        else:
            chat.append(draft)
    last = chat[-1]
    if last.role == "assistant" and not last.texts and not last.calls:
        chat.pop()
    return [draft.message() for draft in chat]


@dataclass(slots=True)
class _Draft:
    """Chat message under construction.

    texts: non-empty texts, joined once at the end, since there may be thousands.
    thoughts: texts of the thinking before the answer's texts.
    """

    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[PastCall] = field(default_factory=list)
    tool_call_id: str | None = None

    def add(self, more: "_Draft") -> None:
        """Append the texts, thinking and calls of `more`, the next message of the same role."""
        between = ["\n\n"] if self.texts and more.texts else []
        self.texts += between + more.texts
        self.thoughts += more.thoughts
        self.calls += more.calls

    def message(self) -> Message:
        return Message.unchecked(
            role=self.role,
            content="".join(self.texts),
            tool_calls=self.calls or None,
            tool_call_id=self.tool_call_id,
            reasoning_content="".join(self.thoughts),
        )


def _drafts_of(turn: MessageTurn) -> list[_Draft]:
    """Return an Anthropic message as chat messages.

    Each tool result becomes one chat message, and so do the other blocks between two tool results.
    """
    drafts: list[_Draft] = []
    for block in turn.content:
        if block.type == "tool_result":
            texts = ["Error: "] * block.is_error
            texts += [block.content.shown()] if block.content else []
            drafts.append(_Draft("tool", texts, tool_call_id=block.tool_use_id))
            continue
        if block.tool is not None:  # for offered_names
            continue
        if not drafts or drafts[-1].role == "tool":
            drafts.append(_Draft(turn.role))
        if block.thinking:
            drafts[-1].thoughts.append(block.thinking)
        if block.text:
            drafts[-1].texts.append(block.text)
        if block.type == "tool_use":
            function = PastFunction.unchecked(name=block.name, arguments=block.input)
            call = PastCall.unchecked(id=block.id, type="function", function=function)
            drafts[-1].calls.append(call)
    return drafts
