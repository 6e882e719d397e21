"""Streaming load on the service, and the outcome of every request."""

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

import httpx

PAUSE_S = 0.3  # pause of a client between requests: other tests share the machine
PATIENCE_S = 90.0  # longer than the gateway's, so that its own error arrives


class Outcome(StrEnum):
    """End of a request, as its client sees it."""

    WHOLE = "whole"
    REFUSED = "refused"  # before the first byte: a client may send the request again
    ENDED = "ended"  # after the first byte, with an error event that a client can read
    CUT = "cut"  # after the first byte, without an error event


@dataclass(frozen=True, slots=True)
class Target:
    """A model and a key that may use it."""

    model: str
    key: str


@dataclass(slots=True)
class Result:
    """Result of one request: times are time.monotonic(); status is None if no answer came."""

    model: str
    sent_s: float
    status: int | None = None
    begun_s: float | None = None
    ended_s: float = 0.0
    residency: str | None = None
    replica: str | None = None
    retry_after: str | None = None
    error: str = ""
    outcome: Outcome = Outcome.REFUSED


@dataclass
class Load:
    """Load by `streams` clients that send one request after the other until the `with` block ends.

    Each target is used once, then random ones. Requests in flight at the end run to completion.
    `results` grows while the load runs.
    """

    url: str
    targets: Sequence[Target]
    streams: int = 8
    tokens: int = 16
    results: list[Result] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.send_no_more()
        self._thread.join()

    def send_no_more(self) -> None:
        """Send no more requests; those in flight run to completion."""
        self._stopped.set()

    def wait_for(self, answers: int, within_s: float = 60) -> None:
        """Wait until `answers` more requests have been answered completely."""
        wanted = self.counts()[Outcome.WHOLE] + answers
        deadline = time.monotonic() + within_s
        while self.counts()[Outcome.WHOLE] < wanted:
            assert time.monotonic() < deadline, f"too few answers in {within_s} s: {self.counts()}"
            time.sleep(0.05)

    def unfinished(self) -> list[Result]:
        """Results of requests that were not answered completely."""
        return [result for result in list(self.results) if result.outcome is not Outcome.WHOLE]

    def counts(self) -> Counter[Outcome]:
        """Number of requests by outcome."""
        return Counter(result.outcome for result in list(self.results))

    def sent(self, after_s: float) -> list[Result]:
        """Results of completed requests that were sent at `after_s` or later."""
        return [result for result in list(self.results) if result.sent_s >= after_s]

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        targets = self._targets()
        async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as client:
            await asyncio.gather(*(self._client(client, targets) for _ in range(self.streams)))

    def _targets(self) -> Iterator[Target]:
        yield from self.targets
        rng = random.Random(0)
        while True:
            yield rng.choice(self.targets)

    async def _client(self, client: httpx.AsyncClient, targets: Iterator[Target]) -> None:
        while not self._stopped.is_set():
            self.results.append(await self._ask(client, next(targets)))
            await asyncio.sleep(PAUSE_S)

    async def _ask(self, client: httpx.AsyncClient, target: Target) -> Result:
        result = Result(target.model, time.monotonic())
        body = {"model": target.model, "prompt": "a few words", "max_tokens": self.tokens}
        body |= {"stream": True, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {target.key}"}
        url = f"{self.url}/v1/completions"
        try:
            async with client.stream("POST", url, json=body, headers=headers) as answer:
                await _read(answer, result)
        except httpx.HTTPError as error:
            result.error = repr(error)
        result.ended_s = time.monotonic()
        return result


async def _read(answer: httpx.Response, result: Result) -> None:
    result.status = answer.status_code
    result.residency = answer.headers.get("x-lorikeet-residency")
    result.replica = answer.headers.get("x-lorikeet-replica")
    result.retry_after = answer.headers.get("retry-after")
    if answer.status_code != 200:
        result.error = (await answer.aread()).decode()
        return
    async for line in answer.aiter_lines():
        if not line or line.startswith(":"):  # a comment keeps a silent stream alive
            continue
        result.begun_s = result.begun_s or time.monotonic()
        result.outcome = Outcome.CUT
        if line == "data: [DONE]":
            result.outcome = Outcome.WHOLE
        elif "error" in (event := json.loads(line.removeprefix("data: "))):
            result.error = event["error"]["message"]
            result.outcome = Outcome.ENDED
            return


def hit_rate(results: Iterable[Result]) -> float:
    """Share of answered adapter requests whose adapter was already on the GPU."""
    found = [r.residency for r in results if r.begun_s and r.residency]
    return found.count("gpu") / len(found) if found else 0.0
