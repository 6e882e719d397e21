"""The Responses API's shape of an answer: events of a stream, or one JSON body. Pure.

    response.created, response.in_progress
    for each item of the output, one after the other:
        response.output_item.added
        what tells of the item alone (responses_output.py)
        response.output_item.done
    response.completed; response.incomplete where the limit of tokens cut it off; response.failed

What the model thinks is the first item; its text and its calls follow. Events are numbered from 0.
The first ones come with the first thought or text; until then a failure has an HTTP status of its
own. Bytes are ASCII JSON, as in openai_format.py.
"""

from collections.abc import Sequence
from itertools import groupby

from lorikeet.answer_stream.compact_json import dump
from lorikeet.answer_stream.logprobs import SampledToken
from lorikeet.answer_stream.openai_format import CallDelta, Choice, Ending
from lorikeet.answer_stream.responses_output import (
    FunctionCallItem,
    ItemEvent,
    ItemStatus,
    MessageItem,
    OutputItem,
    ReasoningItem,
)
from lorikeet.error_shapes import openai_error_body
from lorikeet.protocol.messages import Call, FinalUsage

_IN_PROGRESS, _FAILED = "in_progress", "failed"
_STATUS = {
    Ending.STOP: ItemStatus.COMPLETED,
    Ending.LENGTH: ItemStatus.INCOMPLETE,
    Ending.TOOL_CALLS: ItemStatus.COMPLETED,
}


class ResponseEventStream:
    """The server-sent events of one streamed response: an EventStream of typed events."""

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
        calls: Sequence[CallDelta] = (),
        logprobs: Sequence[SampledToken] | None = None,
        reasoning: str = "",
        token_ids: Sequence[int] = (),  # noqa: ARG002
    ) -> bytes:
        """Return events for new text, then calls, and, with `finish`, for the last item's end.

        choice: always 0. logprobs: those of this text's tokens. reasoning: what is thought before.
        token_ids: not told in this API.
        """
        assert choice == 0
        if not self._sent:
            begun = b'"response":' + _response(self._call, _IN_PROGRESS, ())
            for kind in ("created", "in_progress"):
                self._add(kind, begun)
        if reasoning:
            self._think(reasoning)
        if text or logprobs:
            self._say(text, logprobs)
        for call in calls:
            self._call_function(call)
        if finish is not None:
            self._status = _STATUS[finish]
            if self._item is None:  # an answer of no token but the last
                self._open(MessageItem(self._call, 0))
            self._close_item(self._status)
        return self._take()

    def end(self, usage: FinalUsage) -> bytes:
        """Return the last event, which has the whole response."""
        status = self._status.value
        self._add(status, b'"response":' + _response(self._call, status, self._output, usage))
        return self._take()

    def _think(self, text: str) -> None:
        if not isinstance(self._item, ReasoningItem):
            self._open(ReasoningItem(self._call, self._next_index()))
        assert isinstance(self._item, ReasoningItem)
        self._add_of_item(self._item.add(text))

    def _say(self, text: str, logprobs: Sequence[SampledToken] | None) -> None:
        if not isinstance(self._item, MessageItem):
            self._open(MessageItem(self._call, self._next_index()))
        assert isinstance(self._item, MessageItem)
        self._add_of_item(self._item.add(text, logprobs))

    def _call_function(self, delta: CallDelta) -> None:
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
        """Return the index of the item behind the one that is open."""
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


def response_body(call: Call, choice: Choice, usage: FinalUsage) -> bytes:
    """Return the whole answer of a call without `stream`: its reasoning, its text, its calls."""
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
    return _response(call, status.value, output, usage)


def failed_response_event(
    call: Call, number: int, code: str, message: str, param: str | None = None
) -> bytes:
    """Return the event that ends a stream which failed after its first byte.

    number: of events before it. What was made until then is in those.
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
    members = (dump(head)[:-1], error, b",".join(output), call.request_fields)
    return b'%s,"error":%s,"output":[%s],%s}' % members


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
