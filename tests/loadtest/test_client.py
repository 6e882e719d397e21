"""Client of the load programs: times of deltas, and no incomplete answer counts."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from loadtest.client import Server, Session, random_prompt, run_sessions
from loadtest.streamed_answer import AnswerReader, LoadRequest, StreamedAnswer

FIRST_S, GAP_S = 0.2, 0.05
PROMPT, TOKENS = 5, 4


def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
    """Return an event as apis/chat/answer.py writes it: without spaces."""
    return (
        b"data: "
        + json.dumps({"choices": choices, **more}, separators=(",", ":")).encode()
        + b"\n\n"
    )


async def answer(body: dict[str, Any]) -> AsyncIterator[bytes]:
    model, tokens = body["model"], body["max_tokens"]
    made = tokens - 1 if model == "short" else tokens
    for token in range(made):
        await asyncio.sleep(GAP_S if token else FIRST_S)
        last = token == made - 1
        yield event([{"text": " x", "finish_reason": "length" if last else None}])
        if model == "broken":
            return
    yield event([], usage={"prompt_tokens": len(body["prompt"]), "completion_tokens": made})
    yield b"data: [DONE]\n\n"


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return []


@pytest.fixture(scope="module")
def server(seen: list[dict[str, Any]]) -> Iterator[Server]:
    app = FastAPI()

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await request.json()
        seen.append(body | {"at_s": time.monotonic()})
        if body["model"] == "refused":
            return JSONResponse({"error": {"code": "overloaded"}}, 503, {"retry-after": "7"})
        headers = {"x-lorikeet-residency": "host", "x-request-id": "1f", "x-lorikeet-replica": "r"}
        return StreamingResponse(answer(body), media_type="text/event-stream", headers=headers)

    running = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        time.sleep(0.01)
    port = running.servers[0].sockets[0].getsockname()[1]
    yield Server(f"http://127.0.0.1:{port}", "lk_x", vocabulary=100)
    running.should_exit = True
    thread.join()


def request(model: str, seed: int = 0) -> LoadRequest:
    return LoadRequest(model, PROMPT, TOKENS, seed)


def test_answers_are_timed_from_their_due_time_and_only_complete_ones_count(server, seen):
    sessions = [
        Session(0.0, (request("whole", 1), request("whole", 2))),
        Session(0.5, (request("late"),)),
        *(Session(0.0, (request(model),)) for model in ("short", "broken", "refused")),
    ]
    answers = run_sessions(server, sessions, processes=2)
    found = {(one.request.model, one.request.seed): one for one in answers}
    assert len(answers) == 6
    first, second, late = found["whole", 1], found["whole", 2], found["late", 0]
    for one in (first, second, late):
        assert one.failure == ""
        assert (one.residency, one.request_id, one.replica) == ("host", "1f", "r")
        assert len(one.deltas_s) == TOKENS
        assert FIRST_S <= one.deltas_s[0] - one.due_s < FIRST_S + 0.5
        assert one.deltas_s[-1] - one.deltas_s[0] >= 0.9 * GAP_S * (TOKENS - 1)
    assert second.due_s >= first.ended_s
    assert late.due_s == 0.5 <= late.sent_s
    assert found["short", 0].failure == "not 4 tokens"
    assert '"completion_tokens":3' in found["short", 0].last_bytes
    assert found["broken", 0].failure == "the stream broke off"
    assert found["refused", 0].failure == "503 overloaded"
    (asked,) = (body for body in seen if body["model"] == "late")
    assert asked["prompt"] == random_prompt(request("late"), 100)
    assert (asked["max_tokens"], asked["temperature"]) == (TOKENS, 0.0)


def test_a_request_is_sampled_at_its_temperature_with_a_seed_of_its_own(server, seen):
    sampled = [LoadRequest("whole", PROMPT, TOKENS, seed, temperature=0.7) for seed in (1, 2)]
    answers = run_sessions(server, [Session(0.0, tuple(sampled))], processes=1)
    assert [answer.failure for answer in answers] == ["", ""]
    assert [(body["temperature"], body["seed"]) for body in seen[-2:]] == [(0.7, 1), (0.7, 2)]


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nX-Lorikeet-Residency: gpu\r\n\r\n"
CHAT = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"\\"a"},"finish_reason":null}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"b"},"finish_reason":null}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"c"},"finish_reason":null}]}\n\n',
    b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\ndata: [DONE]\n\n',
)


def read(*parts: bytes) -> StreamedAnswer:
    """Return the answer that arrives in these parts, one a second."""
    answer, seconds = StreamedAnswer(LoadRequest("a", 7, 3, seed=0), due_s=0.0), iter(range(1000))
    reader = AnswerReader(answer, lambda: float(next(seconds)))
    ended = [reader.feed(part) for part in parts]
    assert ended == [False] * (len(parts) - 1) + [True]
    return answer


def chunked(*events: bytes) -> list[bytes]:
    return [b"%x\r\n%s\r\n" % (len(event), event) for event in (*events, b"")]


def test_errors_in_a_stream_and_refusals_are_named_by_their_codes():
    error = b'{"error":{"message":"The \\"step\\" failed.","code":"step_failed"}}'
    broken = read(HEAD, *chunked(CHAT[1], b"data: " + error + b"\n\n"))
    assert broken.failure == "mid-stream: step_failed"
    refused = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: %d\r\n\r\n" % len(error)
    assert read(refused, error[:9], error[9:]).failure == "429 step_failed"
