"""Small server that streams answers with known delays, and records its real delays."""

import asyncio
import json
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

MODELS = {
    "lk_acme": {"tiny": None, "acme/a": "tiny", "acme/b": "tiny"},
    "lk_bolt": {"tiny": None, "bolt/c": "tiny"},
}
RESIDENCY = {"tiny": "none", "acme/a": "gpu", "acme/b": "host", "bolt/c": "disk"}
TEMPLATE_TOKENS, TOKENS_PER_WORD = 6, 3


@dataclass
class FakeServer:
    """Settings of the fake server, and records of its requests. Times are time.perf_counter()."""

    first_token_s: dict[str, float] = field(
        default_factory=lambda: {"none": 0.05, "gpu": 0.1, "host": 0.2, "disk": 0.4}
    )
    gap_s: float = 0.02
    refused: frozenset[str] = frozenset()
    broken: frozenset[str] = frozenset()
    last_words: bytes = b""
    url: str = ""
    seen: list[dict[str, Any]] = field(default_factory=list)
    received_s: list[float] = field(default_factory=list)
    ttft_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    itl_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/models")
        async def models(request: Request) -> Any:
            own = MODELS[request.headers["authorization"].removeprefix("Bearer ")]
            return {"data": [{"id": model, "parent": parent} for model, parent in own.items()]}

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            received_s, body = time.perf_counter(), await request.json()
            model = body["model"]
            assert model in MODELS[request.headers["authorization"].removeprefix("Bearer ")]
            if model in self.refused:
                return JSONResponse({"error": {"code": "rate_limited"}}, 429)
            self.seen.append(body)
            self.received_s.append(received_s)
            tier = RESIDENCY[model]
            headers = {} if tier == "none" else {"x-lorikeet-residency": tier}
            events = self._events(body, tier, received_s)
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)

        return app

    async def _events(
        self, body: dict[str, Any], tier: str, received_s: float
    ) -> AsyncIterator[bytes]:
        yield _event({"role": "assistant", "content": ""})
        last_s = received_s
        for index in range(body["max_tokens"]):
            await asyncio.sleep(self.gap_s if index else self.first_token_s[tier])
            if index and body["model"] in self.broken:
                yield self.last_words
                return
            yield _event({"content": "word "})
            now_s = time.perf_counter()
            (self.itl_s if index else self.ttft_s)[tier].append(now_s - last_s)
            last_s = now_s
        yield _event({}, "length")
        words = len(body["messages"][0]["content"].split())
        usage = {
            "prompt_tokens": TEMPLATE_TOKENS + TOKENS_PER_WORD * words,
            "completion_tokens": body["max_tokens"],
        }
        yield b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"


def _event(delta: dict[str, str], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    config = uvicorn.Config(fake.app(), port=0, log_level="warning", timeout_graceful_shutdown=1)
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        assert thread.is_alive()
        time.sleep(0.01)
    fake.url = f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    yield fake
    running.should_exit = True
    thread.join()
