"""OpenAI's shapes of an answer: events of a stream, or one JSON body. Pure; the replica's work.

Bytes are ASCII JSON: a raw U+2028 inside an event splits it in clients that cut lines as Python's
str.splitlines does.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from lorikeet.answer_stream.logprobs import SampledToken, chat_logprobs, completion_logprobs
from lorikeet.protocol.messages import Call, Endpoint, FinalUsage
from lorikeet_engine.request import FinishReason

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What is new in a tool call. The first delta of a call has its id and name.

    index: the call's, in its choice. arguments: the next part of their JSON text.
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished choice: all its text and calls, and why it ended.

    logprobs: those of the text's tokens; None if not asked for.
    """

    text: str
    finish: FinishReason
    calls: Sequence[CallDelta] = ()
    logprobs: Sequence[SampledToken] | None = None


class EventStream:
    """The server-sent events of one streamed call.

    Call `delta` for each delta of text, then `end` once. The chat role chunk goes before a choice's
    first delta by itself.
    """

    def __init__(self, call: Call) -> None:
        self._chat = call.endpoint is Endpoint.CHAT
        self._include_usage = call.include_usage
        self._started: set[int] = set()
        self._called: set[int] = set()
        head = _head(call, "chat.completion.chunk" if self._chat else "text_completion")
        self._open = b"data: " + _dump(head)[:-1] + b',"choices":['
        usage = b',"usage":null' if call.include_usage else b""
        self._close = b"]" + usage + b"}\n\n"

    def delta(
        self,
        choice: int,
        text: str,
        finish: FinishReason | None = None,
        calls: Sequence[CallDelta] = (),
        logprobs: Sequence[SampledToken] | None = None,
    ) -> bytes:
        """Return events for new text of a choice, then calls, and, with `finish`, for its end.

        choice: the answer's index, prompt_index * n + j. logprobs: those of this text's tokens.
        Text may be empty; b"" when there is nothing to send.
        """
        if not self._chat:
            if not (text or finish or logprobs):
                return b""
            known = _dump(completion_logprobs(logprobs)) if logprobs else b"null"
            return self._event(choice, _dump(text), finish, known)
        events = b""
        if choice not in self._started:
            self._started.add(choice)
            content = b"null" if calls and not text else b'""'
            role = b'{"role":"assistant","content":' + content + b',"refusal":null}'
            events += self._event(choice, role)
        if text or logprobs:
            known = _dump(chat_logprobs(logprobs)) if logprobs else b"null"
            events += self._event(choice, b'{"content":' + _dump(text) + b"}", None, known)
        for call in calls:
            self._called.add(choice)
            events += self._event(choice, _dump({"tool_calls": [_call_delta(call)]}))
        if finish is not None:
            events += self._event(choice, b"{}", finish)
        return events

    def end(self, usage: FinalUsage) -> bytes:
        """Return the last events: usage with no choices if the client asked for it, then [DONE]."""
        if not self._include_usage:
            return DONE
        close = b'],"usage":' + _dump(_usage(usage)) + b"}\n\n"
        return self._open + close + DONE

    def _event(
        self,
        choice: int,
        delta: bytes,
        finish: FinishReason | None = None,
        logprobs: bytes = b"null",
    ) -> bytes:
        field = b',"delta":' if self._chat else b',"text":'
        reason = _dump(_reason(finish, called=choice in self._called)) if finish else b"null"
        event = b'{"index":%d' % choice, field, delta, b',"logprobs":', logprobs
        return b"".join((self._open, *event, b',"finish_reason":', reason, b"}", self._close))


def json_body(call: Call, choices: Sequence[Choice], usage: FinalUsage) -> bytes:
    """Return the whole answer of a call without `stream`.

    choices: in order of index; choice i continues prompt i // n.
    """
    chat = call.endpoint is Endpoint.CHAT
    body = _head(call, "chat.completion" if chat else "text_completion")
    body["choices"] = [_choice(chat, index, choice) for index, choice in enumerate(choices)]
    body["usage"] = _usage(usage)
    return _dump(body)


def _choice(chat: bool, index: int, choice: Choice) -> dict[str, Any]:
    shape = chat_logprobs if chat else completion_logprobs
    return {
        "index": index,
        **({"message": _message(choice)} if chat else {"text": choice.text}),
        "logprobs": None if choice.logprobs is None else shape(choice.logprobs),
        "finish_reason": _reason(choice.finish, called=bool(choice.calls)),
    }


def _message(choice: Choice) -> dict[str, Any]:
    content = None if choice.calls and not choice.text else choice.text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if choice.calls:
        calls = groupby(choice.calls, lambda delta: delta.index)
        message["tool_calls"] = [_whole_call(list(deltas)) for _, deltas in calls]
    return message


def _whole_call(deltas: Sequence[CallDelta]) -> dict[str, Any]:
    arguments = "".join(delta.arguments for delta in deltas)
    function = {"name": deltas[0].name, "arguments": arguments}
    return {"id": deltas[0].id, "type": "function", "function": function}


def _call_delta(delta: CallDelta) -> dict[str, Any]:
    if delta.id is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    return {"index": delta.index, **_whole_call([delta])}


def _usage(usage: FinalUsage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _reason(finish: FinishReason | None, *, called: bool) -> str | None:
    if called and finish is FinishReason.STOP:
        return "tool_calls"
    return finish and finish.value


def _head(call: Call, kind: str) -> dict[str, Any]:
    chat = call.endpoint is Endpoint.CHAT
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{call.request_id}",
        "object": kind,
        "created": call.created,
        "model": call.model,
        **({"service_tier": "default"} if chat else {}),
    }


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")
