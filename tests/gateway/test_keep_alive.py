"""Keep-alive events as the clients of OpenAI and Anthropic read them."""

import json
from types import ModuleType
from typing import Any

import anthropic
import httpx
import httpx2
import openai

from lorikeet.gateway.client_connection import _COMMENT, _PING


def transport(body: bytes, http: ModuleType = httpx) -> Any:
    """Return an HTTP client whose server answers with a stream. http: httpx, or its fork httpx2."""
    headers = {"content-type": "text/event-stream"}
    answer = http.Response(200, headers=headers, content=body)
    return http.Client(transport=http.MockTransport(lambda _: answer))


def event(data: dict[str, object], kind: str | None = None) -> bytes:
    return (f"event: {kind}\n" if kind else "").encode() + f"data: {json.dumps(data)}\n\n".encode()


def test_openais_client_skips_comments_before_and_between_chunks() -> None:
    def chunk(text: str) -> bytes:
        delta = {"index": 0, "delta": {"content": text}, "finish_reason": None}
        return event({"id": "c", "object": "chat.completion.chunk", "choices": [delta]})

    body = _COMMENT * 2 + chunk("a") + _COMMENT + chunk("b") + b"data: [DONE]\n\n"
    with openai.OpenAI(api_key="k", base_url="http://s", http_client=transport(body)) as client:
        stream = client.chat.completions.create(model="m", messages=[], stream=True)
        assert [each.choices[0].delta.content for each in stream] == ["a", "b"]


def test_openais_client_skips_comments_in_responses() -> None:
    def delta(text: str) -> bytes:
        fields = {"type": "response.output_text.delta", "delta": text, "item_id": "i"}
        more = {"output_index": 0, "content_index": 0, "sequence_number": 0, "logprobs": []}
        return event(fields | more, "response.output_text.delta")

    body = _COMMENT + delta("a") + _COMMENT + delta("b")
    with openai.OpenAI(api_key="k", base_url="http://s", http_client=transport(body)) as client:
        stream = client.responses.create(model="m", input="x", stream=True)
        assert [each.delta for each in stream] == ["a", "b"]


def test_anthropics_client_builds_a_message_around_pings() -> None:
    usage = {"input_tokens": 1, "output_tokens": 1}
    message = {"id": "m", "type": "message", "role": "assistant", "content": [], "model": "m"}
    message |= {"stop_reason": None, "stop_sequence": None, "usage": usage}
    part, text = {"index": 0}, {"type": "text", "text": ""}
    body = _PING + event({"type": "message_start", "message": message}, "message_start")
    for kind, fields in (
        ("content_block_start", part | {"content_block": text}),
        ("content_block_delta", part | {"delta": {"type": "text_delta", "text": "hi"}}),
        ("content_block_stop", part),
        ("message_delta", {"delta": {"stop_reason": "end_turn"}, "usage": usage}),
        ("message_stop", {}),
    ):
        body += _PING + event({"type": kind, **fields}, kind)
    with (
        anthropic.Anthropic(
            api_key="k", base_url="http://s", http_client=transport(body, httpx2)
        ) as client,
        client.messages.stream(model="m", max_tokens=9, messages=[]) as stream,
    ):
        assert "".join(stream.text_stream) == "hi"
