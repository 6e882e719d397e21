"""Messages API (Anthropic): answers as server-sent events or one JSON body. Pure functions.

    message_start
    for each block of the content, one after the other:
        content_block_start        the first one is followed by a ping
        content_block_delta        any number: thinking, text, or parts of the JSON text of a tool's
                                   input; thinking ends with its signature
        content_block_stop
    message_delta                  stop reason and total usage
    message_stop                   a stream that fails ends with an error event instead

The first events are sent with the first thinking or text: an earlier failure gets its own HTTP
status.
"""

import json
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Protocol

from pydantic_core import from_json

from lorikeet.apis.chat.answer import schema_check_member
from lorikeet.apis.errors import anthropic_error_body
from lorikeet.protocol.messages import Call, FinalUsage
from lorikeet.text.choice import Choice, Ending, SchemaCheck, ToolCallPart
from lorikeet.text.compact_json import dump
from lorikeet.text.logprobs import SampledToken

_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_SIGNATURE = "unsigned"  # the API requires a signature; thinking is not encrypted here
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")


class AnswerProgress(Protocol):
    """Interface to the token counts and stop strings of a growing answer, which its deltas do not
    contain.
    """

    def usage(self) -> FinalUsage:
        """Return the number of tokens of all prompts and choices so far."""
        ...

    def choice_usage(self, choice: int) -> FinalUsage:
        """Return the number of tokens of one choice and its prompt so far."""
        ...

    def stop_string(self, choice: int) -> str | None:
        """Return the stop string that ended the choice; None if no stop string did."""
        ...


class MessageEventStream:
    """Server-sent events of one streamed message (Messages API).

    Call `delta` for each delta of the answer, then `end` once, as with EventStream.

    progress: the growing answer, for token counts and stop strings.
    """

    def __init__(self, call: Call, progress: AnswerProgress) -> None:
        self._call, self._progress = call, progress
        self._events: list[bytes] = []
        self._started = False
        self._finish = Ending.STOP
        self._open_block: str | None = None
        self._blocks = 0

    def delta(
        self,
        choice: int,
        text: str,
        finish: Ending | None = None,
        calls: Sequence[ToolCallPart] = (),
        logprobs: Sequence[SampledToken] | None = None,  # noqa: ARG002
        reasoning: str = "",
        token_ids: Sequence[int] = (),  # noqa: ARG002
    ) -> bytes:
        """Return events for new text and tool calls and, with `finish`, the end of the last block.

        choice: always 0.
        text: new text, possibly empty.
        finish: reason for the choice's end; None while the choice goes on.
        calls: new parts of tool calls.
        reasoning: new thinking, which comes before the text.
        logprobs, token_ids: ignored: the Messages API has neither.
        """
        assert choice == 0
        if not self._started:
            self._started = True
            usage = _usage(self._progress.usage()) | {"service_tier": "standard"}
            message = _message(self._call, b"[]", None, None, usage)
            self._events.append(_event("message_start", b'"message":' + message))
        if reasoning:
            if self._open_block != "thinking":
                self._open("thinking", _thinking("", ""))
            self._add_delta(b'{"type":"thinking_delta","thinking":%s}' % dump(reasoning))
        if text:
            if self._open_block != "text":
                self._open("text", b'{"type":"text","text":""}')
            self._add_delta(b'{"type":"text_delta","text":%s}' % dump(text))
        for call in calls:
            self._call_tool(call)
        if finish is not None:
            self._finish = finish
            self._close()
        return self._take()

    def end(self, usage: FinalUsage, checks: Sequence[SchemaCheck] = ()) -> bytes:
        """Return the last events: message_delta with stop reason and usage, then message_stop.

        checks: check of the one choice; empty if the answer is not checked.
        """
        stop = self._progress.stop_string(0)
        reason = _stop_reason(self._call, self._finish, stop, usage)
        checked = schema_check_member(checks)
        delta = dump(_stop_fields(reason, stop)), dump(_usage(usage)), checked
        self._events.append(_event("message_delta", b'"delta":%s,"usage":%s%s' % delta))
        self._events.append(_event("message_stop"))
        return self._take()

    def _call_tool(self, delta: ToolCallPart) -> None:
        if delta.id is not None:
            self._open("tool_use", _tool_use([delta], b"{}"))
        if delta.arguments:
            part = dump(delta.arguments)
            self._add_delta(b'{"type":"input_json_delta","partial_json":%s}' % part)

    def _open(self, kind: str, block: bytes) -> None:
        self._close()
        self._open_block = kind
        members = b'"index":%d,"content_block":%s' % (self._blocks, block)
        self._events.append(_event("content_block_start", members))
        if self._blocks == 0:
            self._events.append(_PING)

    def _close(self) -> None:
        if self._open_block is not None:
            if self._open_block == "thinking":
                self._add_delta(dump({"type": "signature_delta", "signature": _SIGNATURE}))
            self._events.append(_event("content_block_stop", b'"index":%d' % self._blocks))
            self._blocks += 1
            self._open_block = None

    def _add_delta(self, delta: bytes) -> None:
        members = b'"index":%d,"delta":%s' % (self._blocks, delta)
        self._events.append(_event("content_block_delta", members))

    def _take(self) -> bytes:
        events, self._events = b"".join(self._events), []
        return events


def message_body(
    call: Call, choice: Choice, usage: FinalUsage, checks: Sequence[SchemaCheck] = ()
) -> bytes:
    """Return the JSON body of a Messages API call without `stream`: thinking, text, tool calls.

    checks: check of the one choice; empty if the answer is not checked.
    """
    blocks = [_thinking(choice.reasoning, _SIGNATURE)] if choice.reasoning else []
    if choice.text:
        blocks.append(dump({"type": "text", "text": choice.text}))
    for _, deltas in groupby(choice.calls, lambda delta: delta.index):
        parts = list(deltas)
        blocks.append(_tool_use(parts, _input("".join(part.arguments for part in parts))))
    reason = _stop_reason(call, choice.finish, choice.stop, usage)
    content = b"[%s]" % b",".join(blocks)
    used = _usage(usage) | {"service_tier": "standard"}
    whole = _message(call, content, reason, choice.stop, used)
    return whole[:-1] + schema_check_member(checks) + b"}"


def failed_message_event(call: Call, code: str, message: str) -> bytes:
    """Return the error event that ends a stream that fails after its first byte."""
    body = dump(anthropic_error_body(code, message, call.request_id))
    return b"event: error\ndata: " + body + b"\n\n"


def _stop_reason(call: Call, finish: Ending, stop: str | None, usage: FinalUsage) -> str:
    if stop is not None:
        return "stop_sequence"
    if finish is Ending.LENGTH:
        within = call.max_tokens is not None and usage.completion_tokens < call.max_tokens
        return "model_context_window_exceeded" if within else "max_tokens"
    return "tool_use" if finish is Ending.TOOL_CALLS else "end_turn"


def _message(
    call: Call, content: bytes, reason: str | None, stop: str | None, usage: dict[str, Any]
) -> bytes:
    head = {
        "id": f"msg_{call.request_id}",
        "type": "message",
        "role": "assistant",
        "model": call.model,
        **_stop_fields(reason, stop),
        "usage": usage,
    }
    return b'%s,"content":%s}' % (dump(head)[:-1], content)


def _stop_fields(reason: str | None, stop: str | None) -> dict[str, str | None]:
    return {"stop_reason": reason, "stop_sequence": stop, "stop_details": None}


def _usage(usage: FinalUsage) -> dict[str, Any]:
    """Return the `usage` object; input_tokens excludes the prompt's cached tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _thinking(text: str, signature: str) -> bytes:
    return dump({"type": "thinking", "thinking": text, "signature": signature})


def _tool_use(deltas: Sequence[ToolCallPart], arguments: bytes) -> bytes:
    head = dump({"type": "tool_use", "id": deltas[0].id, "name": deltas[0].name})
    return b'%s,"input":%s}' % (head[:-1], arguments)


def _input(arguments: str) -> bytes:
    """Return a tool call's input as JSON. If the call was cut off, return the part that can be
    parsed.

    Complete input keeps its text, in ASCII.

    arguments: the input as the model wrote it.
    """
    try:
        from_json(arguments, allow_inf_nan=False)
    except ValueError:
        return _partial_input(arguments)
    return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], arguments).encode("ascii")


def _partial_input(arguments: str) -> bytes:
    try:
        partial = from_json(arguments, allow_partial="trailing-strings")
        return json.dumps(partial, separators=(",", ":"), allow_nan=False).encode("ascii")
    except ValueError:
        return b"{}"


def _event(kind: str, members: bytes = b"") -> bytes:
    name = kind.encode()
    return b'event: %s\ndata: {"type":"%s"%s}\n\n' % (
        name,
        name,
        b"," + members if members else b"",
    )
