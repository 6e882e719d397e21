"""Sends requests when they are due, whatever has become of those before."""

import asyncio
import time
from dataclasses import dataclass

import httpx
import numpy as np

from loadtest.fleet.adapters import model_name
from lorikeet.simulator.traffic import Requests

_TIMEOUT_S = 120.0
_VOCABULARY = range(6, 262)


@dataclass(frozen=True, slots=True)
class Served:
    """What became of one request. ttft_s: from when it was due. late_s: of the client itself."""

    ttft_s: float
    residency: str
    replica: str
    late_s: float


class Unanswered(Exception):
    """A request without the answer that it asked for."""


def send(url: str, key: str, requests: Requests, seed: int = 0) -> tuple[float, list[Served]]:
    """All of them: when the first was due, in Unix time, and what became of each.

    Raises Unanswered.
    """
    return asyncio.run(_send(url, key, requests, seed))


async def _send(url: str, key: str, requests: Requests, seed: int) -> tuple[float, list[Served]]:
    dice = np.random.default_rng(seed)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(
        base_url=url, headers=headers, limits=limits, timeout=_TIMEOUT_S
    ) as client:
        began_s = time.perf_counter()
        unix_s = time.time()
        tasks = []
        for i, at_s in enumerate(requests.times_s.tolist()):
            prompt = dice.choice(_VOCABULARY, int(requests.prompts[i])).tolist()
            body = {
                "model": model_name(int(requests.adapters[i])),
                "prompt": prompt,
                "max_tokens": int(requests.answers[i]),
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
            await asyncio.sleep(began_s + at_s - time.perf_counter())
            tasks.append(asyncio.create_task(_ask(client, body, began_s + at_s)))
        return unix_s, await asyncio.gather(*tasks)


async def _ask(client: httpx.AsyncClient, body: dict[str, object], due_s: float) -> Served:
    late_s, first_s, text = time.perf_counter() - due_s, None, b""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for piece in response.aiter_bytes():
            first_s = first_s or time.perf_counter()
            text += piece
        if (
            response.status_code != 200
            or not text.endswith(b"data: [DONE]\n\n")
            or b'"error"' in text
        ):
            raise Unanswered(f"{response.status_code}: {text[-300:]!r}")
        assert first_s is not None
        found = response.headers.get("x-lorikeet-residency", "")
        return Served(first_s - due_s, found, response.headers["x-lorikeet-replica"], late_s)
