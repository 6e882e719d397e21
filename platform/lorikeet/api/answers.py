"""Forms answers in OpenAI's shapes: events of a stream, or one JSON body. Pure; the replica's work.

Bytes are ASCII JSON: a raw U+2028 inside an event splits it in clients that cut lines as Python's
str.splitlines does.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lorikeet.api.error_body import error_body
from lorikeet.api.messages import Call, Endpoint
from lorikeet_engine.request import FinishReason

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a whole call: each prompt counted once, the output of all its choices summed."""

    prompt_tokens: int
    completion_tokens: int

    def as_json(self) -> dict[str, int]:
        """OpenAI's `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished choice: its whole text and why it ended."""

    text: str
    finish: FinishReason


class EventStream:
    """The server-sent events of one streamed call.

    Call `delta` for each piece of text, then `end` once, or send a `failed_event` instead. The
    chat role chunk goes before a choice's first piece by itself.
    """

    def __init__(self, call: Call) -> None:
        self._chat = call.endpoint is Endpoint.CHAT
        self._include_usage = call.include_usage
        self._started: set[int] = set()
        head = _head(call, "chat.completion.chunk" if self._chat else "text_completion")
        self._open = b"data: " + _dump(head)[:-1] + b',"choices":['
        usage = b',"usage":null' if call.include_usage else b""
        self._close = b"]" + usage + b"}\n\n"

    def delta(self, choice: int, text: str, finish: FinishReason | None = None) -> bytes:
        """Events for new text of a choice and, with `finish`, for its end.

        choice: index of the answer, prompt_index * n + j. Text may be empty; b"" when there is
        nothing to say.
        """
        events = b""
        if self._chat and choice not in self._started:
            self._started.add(choice)
            events += self._event(choice, b'{"role":"assistant","content":""}', None)
        if self._chat:
            if text:
                events += self._event(choice, b'{"content":' + _dump(text) + b"}", None)
            if finish is not None:
                events += self._event(choice, b"{}", finish)
        elif text or finish is not None:
            events += self._event(choice, _dump(text), finish)
        return events

    def end(self, usage: Usage) -> bytes:
        """The last events: usage with no choices when the client asked for it, then [DONE]."""
        if not self._include_usage:
            return DONE
        close = b'],"usage":' + _dump(usage.as_json()) + b"}\n\n"
        return self._open + close + DONE

    def _event(self, choice: int, delta: bytes, finish: FinishReason | None) -> bytes:
        field = b',"delta":' if self._chat else b',"text":'
        reason = b"null" if finish is None else _dump(finish.value)
        event = b'{"index":%d' % choice, field, delta, b',"logprobs":null,"finish_reason":', reason
        return b"".join((self._open, *event, b"}", self._close))


def failed_event(code: str, message: str, param: str | None = None) -> bytes:
    """The event that ends a stream which failed after its first byte; no [DONE] follows."""
    return b"data: " + _dump(error_body(code, message, param)) + b"\n\n"


def json_body(call: Call, choices: Sequence[Choice], usage: Usage) -> bytes:
    """The whole answer of a call without `stream`.

    choices: in order of index; choice i continues prompt i // n.
    """
    chat = call.endpoint is Endpoint.CHAT
    body = _head(call, "chat.completion" if chat else "text_completion")
    body["choices"] = [_choice(chat, index, choice) for index, choice in enumerate(choices)]
    body["usage"] = usage.as_json()
    return _dump(body)


def _choice(chat: bool, index: int, choice: Choice) -> dict[str, Any]:
    said: dict[str, Any] = (
        {"message": {"role": "assistant", "content": choice.text}}
        if chat
        else {"text": choice.text}
    )
    return {"index": index, **said, "logprobs": None, "finish_reason": choice.finish.value}


def _head(call: Call, kind: str) -> dict[str, Any]:
    prefix = "chatcmpl" if call.endpoint is Endpoint.CHAT else "cmpl"
    return {
        "id": f"{prefix}-{call.request_id}",
        "object": kind,
        "created": call.created,
        "model": call.model,
    }


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")
