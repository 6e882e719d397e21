"""Responses API: answers as server-sent events or one JSON body. Pure functions.

    response.created, response.in_progress
    for each item of the output, one after the other:
        response.output_item.added
        events of the item:
            reasoning   response.content_part.added, response.reasoning_text.delta (any number),
                        response.reasoning_text.done, response.content_part.done
            a message   response.content_part.added, response.output_text.delta (any number),
                        response.output_text.done, response.content_part.done
            a call      response.function_call_arguments.delta (any number), ….done
        response.output_item.done
    response.completed; response.incomplete at the token limit; response.failed

Thinking is the first item; text and function calls follow. Reasoning is the model's own text, in
`content`, without a summary. Events are numbered from 0. The first events are sent with the first
thinking or text: an earlier failure gets its own HTTP status.
"""

from collections.abc import Sequence
from enum import Enum
from itertools import groupby
from typing import NamedTuple

from lorikeet.apis.chat.answer import schema_check_member
from lorikeet.apis.errors import openai_error_body
from lorikeet.protocol.messages import Call, Endpoint, FinalUsage
from lorikeet.text.choice import Choice, Ending, SchemaCheck, ToolCallPart
from lorikeet.text.compact_json import dump
from lorikeet.text.logprobs import LogprobsJson, SampledToken


class ItemStatus(Enum):
    """Status of an output item. INCOMPLETE: the token limit cut the item off."""

    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"


class ItemEvent(NamedTuple):
    """Event of one output item of a response.

    kind: the event's type without its prefix `response.`.
    members: JSON members other than the item's id and index.
    """

    kind: str
    members: bytes


class ItemState(NamedTuple):
    """JSON of an output item when it begins or ends, and the events to send with it."""

    json: bytes
    events: list[ItemEvent]


class ReasoningItem:
    """Output item with the model's thinking.

    index: position in the output.
    text: all text of the thinking, if known.
    """

    def __init__(self, call: Call, index: int, text: str = "") -> None:
        self.id = f"rs_{call.request_id}_{index}"
        self._texts = [text]

    def add(self, text: str) -> ItemEvent:
        """Add new text to the thinking; return its event."""
        self._texts.append(text)
        return _of_part("reasoning_text.delta", b'"delta":' + dump(text))

    def begin(self) -> ItemState:
        """Begin the reasoning item: return it without its text."""
        added = _of_part("content_part.added", b'"part":' + _reasoning_part(b'""'))
        return ItemState(self._json(ItemStatus.IN_PROGRESS, b""), [added])

    def end(self, status: ItemStatus) -> ItemState:
        """Finish the reasoning item: return it with its whole text and the given status."""
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
    """Output item with the answer's text.

    index: position in the output.
    text, logprobs: the whole text and the logprobs of all its tokens, if known.
    """

    def __init__(
        self, call: Call, index: int, text: str = "", logprobs: LogprobsJson | None = None
    ) -> None:
        self.id = f"msg_{call.request_id}_{index}"
        self._texts = [text]
        self._logprobs = logprobs or LogprobsJson(Endpoint.RESPONSES)

    def add(self, text: str, logprobs: Sequence[SampledToken] | None) -> ItemEvent:
        """Add new text and its tokens' logprobs to the message; return its event."""
        self._texts.append(text)
        self._logprobs.add(logprobs or ())
        known = LogprobsJson(Endpoint.RESPONSES, logprobs or ()).values("content")
        return _of_part("output_text.delta", b'"delta":%s,"logprobs":%s' % (dump(text), known))

    def begin(self) -> ItemState:
        """Begin the message: return its item without the text."""
        added = _of_part("content_part.added", b'"part":' + _text_part(b'""', b"[]"))
        return ItemState(self._json(ItemStatus.IN_PROGRESS, b""), [added])

    def end(self, status: ItemStatus) -> ItemState:
        """Finish the message: return its item with the whole text and the given status."""
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
    """Output item of one function call.

    index: position in the output.
    first: first part of the function call, with its id and name.
    arguments: all arguments as JSON text, if known.
    """

    def __init__(self, call: Call, index: int, first: ToolCallPart, arguments: str = "") -> None:
        self.id = f"fc_{call.request_id}_{index}"
        namespace, _, name = (first.name or "").rpartition(".")
        self._called = {"call_id": first.id, "name": name}
        if namespace:
            self._called["namespace"] = namespace
        self._arguments = [arguments]

    def add(self, arguments: str) -> ItemEvent:
        """Add the next part of the function call's arguments; return its event."""
        self._arguments.append(arguments)
        return ItemEvent("function_call_arguments.delta", b'"delta":' + dump(arguments))

    def begin(self) -> ItemState:
        """Begin the function call: return its item without arguments."""
        return ItemState(self._json(ItemStatus.IN_PROGRESS, b'""'), [])

    def end(self, status: ItemStatus) -> ItemState:
        """Finish the function call: return its item with all arguments and the given status."""
        arguments = dump("".join(self._arguments))
        done = ItemEvent("function_call_arguments.done", b'"arguments":' + arguments)
        return ItemState(self._json(status, arguments), [done])

    def _json(self, status: ItemStatus, arguments: bytes) -> bytes:
        head = {"id": self.id, "type": "function_call", "status": status.value}
        return dump(head | self._called)[:-1] + b',"arguments":%s}' % arguments


OutputItem = ReasoningItem | MessageItem | FunctionCallItem
_IN_PROGRESS, _FAILED = "in_progress", "failed"
_STATUS = {
    Ending.STOP: ItemStatus.COMPLETED,
    Ending.LENGTH: ItemStatus.INCOMPLETE,
    Ending.TOOL_CALLS: ItemStatus.COMPLETED,
}


class ResponseEventStream:
    """Server-sent events of one streamed response (Responses API).

    Call `delta` for each delta of the answer, then `end` once, as with EventStream.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._events: list[bytes] = []
        self._sent = 0
        self._output: list[bytes] = []
        self._item: OutputItem | None = None
        self._status = ItemStatus.IN_PROGRESS

    def delta(
        self,
        choice: int,
        text: str,
        finish: Ending | None = None,
        calls: Sequence[ToolCallPart] = (),
        logprobs: Sequence[SampledToken] | None = None,
        reasoning: str = "",
        token_ids: Sequence[int] = (),  # noqa: ARG002
    ) -> bytes:
        """Return events for new text and function calls and, with `finish`, the last item's end.

        choice: always 0.
        text: new text, possibly empty.
        finish: reason for the choice's end; None while the choice goes on.
        calls: new parts of function calls.
        logprobs: log probabilities of this text's tokens.
        reasoning: new thinking, which comes before the text.
        token_ids: ignored: the Responses API has none.
        """
        assert choice == 0
        if not self._sent:
            begun = b'"response":' + _response(self._call, _IN_PROGRESS, ())
            for kind in ("created", "in_progress"):
                self._add(kind, begun)
        if reasoning:
            self._add_reasoning(reasoning)
        if text or logprobs:
            self._add_text(text, logprobs)
        for call in calls:
            self._add_function_call(call)
        if finish is not None:
            self._status = _STATUS[finish]
            if self._item is None:  # the answer has no text
                self._open(MessageItem(self._call, 0))
            self._close_item(self._status)
        return self._take()

    def end(self, usage: FinalUsage, checks: Sequence[SchemaCheck] = ()) -> bytes:
        """Return the stream's last event, which holds the whole response.

        checks: check of the one choice; empty if the answer is not checked.
        """
        status = self._status.value
        whole = _response(self._call, status, self._output, usage, checks=checks)
        self._add(status, b'"response":' + whole)
        return self._take()

    def _add_reasoning(self, text: str) -> None:
        if not isinstance(self._item, ReasoningItem):
            self._open(ReasoningItem(self._call, self._next_index()))
        assert isinstance(self._item, ReasoningItem)
        self._add_of_item(self._item.add(text))

    def _add_text(self, text: str, logprobs: Sequence[SampledToken] | None) -> None:
        if not isinstance(self._item, MessageItem):
            self._open(MessageItem(self._call, self._next_index()))
        assert isinstance(self._item, MessageItem)
        self._add_of_item(self._item.add(text, logprobs))

    def _add_function_call(self, delta: ToolCallPart) -> None:
        if delta.id is not None:
            self._open(FunctionCallItem(self._call, self._next_index(), delta))
        assert isinstance(self._item, FunctionCallItem)
        if delta.arguments:
            self._add_of_item(self._item.add(delta.arguments))

    def _open(self, item: OutputItem) -> None:
        self._close_item(ItemStatus.COMPLETED)
        self._item = item
        begun = item.begin()
        self._add_item("added", begun.json)
        for event in begun.events:
            self._add_of_item(event)

    def _close_item(self, status: ItemStatus) -> None:
        if self._item is None:
            return
        whole = self._item.end(status)
        for event in whole.events:
            self._add_of_item(event)
        self._add_item("done", whole.json)
        self._output.append(whole.json)
        self._item = None

    def _next_index(self) -> int:
        return len(self._output) + (self._item is not None)

    def _add_of_item(self, event: ItemEvent) -> None:
        assert self._item is not None
        at = b'"item_id":"%s","output_index":%d,' % (self._item.id.encode(), len(self._output))
        self._add(event.kind, at + event.members)

    def _add_item(self, what: str, item: bytes) -> None:
        self._add(f"output_item.{what}", b'"output_index":%d,"item":%s' % (len(self._output), item))

    def _add(self, kind: str, members: bytes) -> None:
        self._events.append(_event(kind, self._sent, members))
        self._sent += 1

    def _take(self) -> bytes:
        events, self._events = b"".join(self._events), []
        return events


def response_body(
    call: Call, choice: Choice, usage: FinalUsage, checks: Sequence[SchemaCheck] = ()
) -> bytes:
    """Return the body of a Responses API call without `stream`: reasoning, text, function calls.

    checks: check of the one choice; empty if the answer is not checked.
    """
    items = list[OutputItem]()
    if choice.reasoning:
        items.append(ReasoningItem(call, 0, choice.reasoning))
    deltas = [list(deltas) for _, deltas in groupby(choice.calls, lambda delta: delta.index)]
    if choice.text or not (items or deltas):
        items.append(MessageItem(call, len(items), choice.text, choice.logprobs))
    for of_call in deltas:
        arguments = "".join(delta.arguments for delta in of_call)
        items.append(FunctionCallItem(call, len(items), of_call[0], arguments))
    status = _STATUS[choice.finish]
    output = [item.end(ItemStatus.COMPLETED).json for item in items[:-1]]
    output.append(items[-1].end(status).json)
    return _response(call, status.value, output, usage, checks=checks)


def failed_response_event(
    call: Call, number: int, code: str, message: str, param: str | None = None
) -> bytes:
    """Return the event that ends a stream that failed after its first byte.

    number: number of events already sent. They hold all output up to the failure.
    """
    error = openai_error_body(code, message, param)["error"]
    response = _response(call, _FAILED, (), error=dump(error))
    return _event("failed", number, b'"response":' + response)


def _response(
    call: Call,
    status: str,
    output: Sequence[bytes],
    usage: FinalUsage | None = None,
    error: bytes = b"null",
    checks: Sequence[SchemaCheck] = (),
) -> bytes:
    cut_off = {"reason": "max_output_tokens"} if status == ItemStatus.INCOMPLETE.value else None
    head = {
        "id": f"resp_{call.request_id}",
        "object": "response",
        "created_at": call.created,
        "status": status,
        "incomplete_details": cut_off,
        "model": call.model,
        "usage": None if usage is None else _usage(usage),
    }
    checked = schema_check_member(checks)
    members = (dump(head)[:-1], error, b",".join(output), checked, call.request_fields)
    return b'%s,"error":%s,"output":[%s]%s,%s}' % members


def _usage(usage: FinalUsage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _event(kind: str, number: int, members: bytes) -> bytes:
    name = b"response." + kind.encode()
    head = (name, name, number, members)
    return b'event: %s\ndata: {"type":"%s","sequence_number":%d,%s}\n\n' % head


def _of_part(kind: str, members: bytes) -> ItemEvent:
    """Return an event about the one content part (index 0) of a message or reasoning item.

    kind: the event's type without its prefix `response.`.
    members: JSON members of the event besides the index of the part.
    """
    return ItemEvent(kind, b'"content_index":0,' + members)


def _reasoning_part(text: bytes) -> bytes:
    return b'{"type":"reasoning_text","text":%s}' % text


def _text_part(text: bytes, logprobs: bytes) -> bytes:
    return b'{"type":"output_text","annotations":[],"logprobs":%s,"text":%s}' % (logprobs, text)
