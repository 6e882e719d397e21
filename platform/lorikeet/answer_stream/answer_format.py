"""Which shape an answer has: that of the endpoint that was asked."""

import json
from collections.abc import Sequence

from lorikeet.answer_stream.anthropic_format import (
    AnswerProgress,
    MessageEventStream,
    failed_message_event,
    message_body,
)
from lorikeet.answer_stream.openai_format import Choice, EventStream, json_body
from lorikeet.answer_stream.responses_format import (
    ResponseEventStream,
    failed_response_event,
    response_body,
)
from lorikeet.dialects import error_body
from lorikeet.protocol.messages import Call, Endpoint, FinalUsage


def event_stream(
    call: Call, progress: AnswerProgress
) -> EventStream | ResponseEventStream | MessageEventStream:
    """Return what makes the events of a streamed call."""
    match call.endpoint:
        case Endpoint.RESPONSES:
            return ResponseEventStream(call)
        case Endpoint.MESSAGES:
            return MessageEventStream(call, progress)
    return EventStream(call, progress.choice_usage if call.continuous_usage else None)


def whole_answer(call: Call, choices: Sequence[Choice], usage: FinalUsage) -> bytes:
    """Return the body of a call without `stream`. choices: in order."""
    match call.endpoint:
        case Endpoint.RESPONSES:
            return response_body(call, choices[0], usage)
        case Endpoint.MESSAGES:
            return message_body(call, choices[0], usage)
    return json_body(call, choices, usage)


def failed_event(call: Call, sent: int, code: str, message: str, param: str | None = None) -> bytes:
    """Return the event that ends a stream which failed after so many events; nothing follows it."""
    match call.endpoint:
        case Endpoint.RESPONSES:
            return failed_response_event(call, sent, code, message, param)
        case Endpoint.MESSAGES:
            return failed_message_event(call, code, message)
    body = json.dumps(error_body(code, message, param), separators=(",", ":"))
    return b"data: " + body.encode("ascii") + b"\n\n"
