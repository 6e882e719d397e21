"""Clients that stream answers known beforehand, and what each of them saw."""

import asyncio
import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from tests.e2e.load import Target

PATIENCE_S = 150.0


@dataclass(frozen=True, slots=True)
class Known:
    """Request, and its undisturbed answer.

    said: text by choice.
    usage: prompt and completion tokens.
    """

    target: Target
    body: dict[str, Any]
    said: dict[int, str]
    usage: tuple[int, int]


@dataclass(slots=True)
class Seen:
    """What a client saw of one answer.

    reasons: why other replicas went on with it, in order.
    pauses_s: seconds without an event around each of these changes.
    first_s: seconds until the first event.
    """

    known: Known
    said: dict[int, str] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    reasons: list[str] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)
    first_s: float | None = None
    ended: bool = False
    error: str = ""

    @property
    def is_right(self) -> bool:
        """Whether the answer is whole, and equals the undisturbed one in text and usage."""
        known = self.known
        return self.ended and (self.said, self.usage) == (known.said, known.usage)


async def read(client: httpx.AsyncClient, url: str, known: Known) -> Seen:
    """Ask for an answer and read it."""
    seen, last_s, resumed = Seen(known), time.monotonic(), False
    headers = {"Authorization": f"Bearer {known.target.key}"}
    body = {**known.body, "model": known.target.model, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", url, json=body, headers=headers) as answer:
            if reasons := answer.headers.get("x-lorikeet-resumed"):
                seen.reasons += reasons.split(", ")
            async for line in answer.aiter_lines():
                if line.startswith(": x-lorikeet-resumed: "):
                    seen.reasons.append(line.removeprefix(": x-lorikeet-resumed: "))
                    resumed = True
                if not line.startswith("data: "):
                    seen.error += line if answer.status_code != 200 else ""
                    continue
                now_s = time.monotonic()
                if seen.first_s is None:
                    seen.first_s = now_s - last_s
                elif resumed:
                    seen.pauses_s.append(now_s - last_s)
                last_s, resumed = now_s, False
                _add(seen, line.removeprefix("data: "))
    except httpx.HTTPError as error:
        seen.error = repr(error)
    return seen


def _add(seen: Seen, data: str) -> None:
    if data == "[DONE]":
        seen.ended = True
        return
    event = json.loads(data)
    if "error" in event:
        seen.error = event["error"]["message"]
        return
    if usage := event.get("usage"):
        seen.usage = usage["prompt_tokens"], usage["completion_tokens"]
    for choice in event["choices"]:
        seen.said[choice["index"]] = seen.said.get(choice["index"], "") + choice["text"]


def undisturbed(url: str, target: Target, **body: Any) -> Known:
    """Return a request with the answer that it has now."""

    async def ask() -> Seen:
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            return await read(client, url, Known(target, body, {}, (0, 0)))

    seen = asyncio.run(ask())
    assert seen.ended, seen.error
    assert seen.usage is not None
    assert not seen.reasons
    return Known(target, body, seen.said, seen.usage)


def has_near_tie(url: str, known: Known) -> bool:
    """Return whether rounding might change a greedy answer: whether a token's log probability is
    nearly that of the next likely one.

    Log probabilities depend on a batch by 1e-5.
    """
    body = {**known.body, "model": known.target.model, "logprobs": 2}
    headers = {"Authorization": f"Bearer {known.target.key}"}
    answer = httpx.post(url, json=body, headers=headers, timeout=PATIENCE_S).json()
    tops = answer["choices"][0]["logprobs"]["top_logprobs"]
    return any(abs(float.__sub__(*top.values())) < 1e-3 for top in tops)


class KnownStreams:
    """Clients that each send one request after the other until the `with` block ends.

    Requests in flight at the end run to completion.
    """

    def __init__(self, url: str, known: list[Known], streams: int) -> None:
        self.seen: list[Seen] = []
        self._url, self._known, self._streams = url, known, streams

    def __enter__(self) -> Self:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="streams")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    @property
    def wrong(self) -> list[Seen]:
        """Answers that were cut, or differ from the undisturbed ones."""
        return [seen for seen in self.seen if not seen.is_right]

    @property
    def faults(self) -> Counter[tuple[str, ...]]:
        """Number of wrong answers by error and replicas' losses."""
        return Counter((seen.error, *seen.reasons) for seen in self.wrong)

    @property
    def reasons(self) -> list[str]:
        """Reasons why other replicas went on with answers."""
        return [reason for seen in self.seen for reason in seen.reasons]

    @property
    def pauses_s(self) -> list[float]:
        """Seconds without an event around each change of replica, ascending."""
        return sorted(pause_s for seen in self.seen for pause_s in seen.pauses_s)

    @property
    def firsts_s(self) -> list[float]:
        """Seconds until answers' first events, ascending."""
        return sorted(seen.first_s for seen in self.seen if seen.first_s is not None)

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as client:
            await asyncio.gather(*(self._client(client, n) for n in range(self._streams)))

    async def _client(self, client: httpx.AsyncClient, number: int) -> None:
        rng = random.Random(number)
        while not self._stopped.is_set():
            self.seen.append(await read(client, self._url, rng.choice(self._known)))
