"""The items of a response's output in JSON, and the events that tell how one of them grows. Pure.

These events come between an item's response.output_item.added and .done:

    of reasoning   response.content_part.added, response.reasoning_text.delta (any number),
                   response.reasoning_text.done, response.content_part.done
    of a message   response.content_part.added, response.output_text.delta (any number),
                   response.output_text.done, response.content_part.done
    of a call      response.function_call_arguments.delta (any number), ….done

Reasoning is the model's own text, in `content`; nothing sums it up.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from lorikeet.answer_stream.compact_json import dump
from lorikeet.answer_stream.logprobs import SampledToken, WholeLogprobs
from lorikeet.answer_stream.openai_format import CallDelta
from lorikeet.protocol.messages import Call, Endpoint


class ItemStatus(Enum):
    """How far an item is. INCOMPLETE: the limit of tokens has cut it off."""

    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"


class ItemEvent(NamedTuple):
    """An event of one item: its type behind `response.`, and members beside the item's place."""

    kind: str
    members: bytes


class ItemState(NamedTuple):
    """An item as it is now, and the events that go with that."""

    json: bytes
    events: list[ItemEvent]


class ReasoningItem:
    """What the model thinks before it answers. index: in the output. text: all, where known."""

    def __init__(self, call: Call, index: int, text: str = "") -> None:
        self.id = f"rs_{call.request_id}_{index}"
        self._texts = [text]

    def add(self, text: str) -> ItemEvent:
        """Add new text."""
        self._texts.append(text)
        return _of_part("reasoning_text.delta", b'"delta":' + dump(text))

    def begin(self) -> ItemState:
        """Return the item without its text."""
        added = _of_part("content_part.added", b'"part":' + _reasoning_part(b'""'))
        return ItemState(self._json(ItemStatus.IN_PROGRESS, b""), [added])

    def end(self, status: ItemStatus) -> ItemState:
        """Return the item with its text."""
        text = dump("".join(self._texts))
        part = _reasoning_part(text)
        done = _of_part("reasoning_text.done", b'"text":' + text)
        return ItemState(
            self._json(status, part), [done, _of_part("content_part.done", b'"part":' + part)]
        )

    def _json(self, status: ItemStatus, part: bytes) -> bytes:
        head = {"id": self.id, "type": "reasoning", "status": status.value}
        return dump(head)[:-1] + b',"summary":[],"content":[%s]}' % part


class MessageItem:
    """What the model says. index: in the output. text, logprobs: all, where known."""

    def __init__(
        self, call: Call, index: int, text: str = "", logprobs: WholeLogprobs | None = None
    ) -> None:
        self.id = f"msg_{call.request_id}_{index}"
        self._texts = [text]
        self._logprobs = logprobs or WholeLogprobs(Endpoint.RESPONSES)

    def add(self, text: str, logprobs: Sequence[SampledToken] | None) -> ItemEvent:
        """Add new text. logprobs: those of its tokens."""
        self._texts.append(text)
        self._logprobs.add(logprobs or ())
        known = WholeLogprobs(Endpoint.RESPONSES, logprobs or ()).values("content")
        return _of_part("output_text.delta", b'"delta":%s,"logprobs":%s' % (dump(text), known))

    def begin(self) -> ItemState:
        """Return the item without its text."""
        added = _of_part("content_part.added", b'"part":' + _text_part(b'""', b"[]"))
        return ItemState(self._json(ItemStatus.IN_PROGRESS, b""), [added])

    def end(self, status: ItemStatus) -> ItemState:
        """Return the item with its text."""
        text, logprobs = dump("".join(self._texts)), self._logprobs.values("content")
        part = _text_part(text, logprobs)
        done = _of_part("output_text.done", b'"text":%s,"logprobs":%s' % (text, logprobs))
        return ItemState(
            self._json(status, part), [done, _of_part("content_part.done", b'"part":' + part)]
        )

    def _json(self, status: ItemStatus, part: bytes) -> bytes:
        head = {"id": self.id, "type": "message", "status": status.value, "role": "assistant"}
        return dump(head)[:-1] + b',"content":[%s]}' % part


class FunctionCallItem:
    """A call of a function. index: in the output. first: names it. arguments: all, where known."""

    def __init__(self, call: Call, index: int, first: CallDelta, arguments: str = "") -> None:
        self.id = f"fc_{call.request_id}_{index}"
        namespace, _, name = (first.name or "").rpartition(".")
        self._called = {"call_id": first.id, "name": name}
        if namespace:
            self._called["namespace"] = namespace
        self._arguments = [arguments]

    def add(self, arguments: str) -> ItemEvent:
        """Add the next part of its arguments."""
        self._arguments.append(arguments)
        return ItemEvent("function_call_arguments.delta", b'"delta":' + dump(arguments))

    def begin(self) -> ItemState:
        """Return the item without its arguments."""
        return ItemState(self._json(ItemStatus.IN_PROGRESS, b'""'), [])

    def end(self, status: ItemStatus) -> ItemState:
        """Return the item with its arguments."""
        arguments = dump("".join(self._arguments))
        done = ItemEvent("function_call_arguments.done", b'"arguments":' + arguments)
        return ItemState(self._json(status, arguments), [done])

    def _json(self, status: ItemStatus, arguments: bytes) -> bytes:
        head = {"id": self.id, "type": "function_call", "status": status.value}
        return dump(head | self._called)[:-1] + b',"arguments":%s}' % arguments


OutputItem = ReasoningItem | MessageItem | FunctionCallItem


def _of_part(kind: str, members: bytes) -> ItemEvent:
    """Return an event of an item's one part."""
    return ItemEvent(kind, b'"content_index":0,' + members)


def _reasoning_part(text: bytes) -> bytes:
    return b'{"type":"reasoning_text","text":%s}' % text


def _text_part(text: bytes, logprobs: bytes) -> bytes:
    return b'{"type":"output_text","annotations":[],"logprobs":%s,"text":%s}' % (logprobs, text)
