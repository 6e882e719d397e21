"""Two tenants of a real service each ask for more than half of it, one for ten times as much."""

import asyncio
import json
import random
import string
import time
from dataclasses import dataclass
from statistics import quantiles

import httpx
import pytest

from lorikeet_engine.scheduling.fairness import OUTPUT_TOKEN, PROMPT_TOKEN
from tests.e2e.conftest import REPLICAS, Service

pytestmark = [pytest.mark.ray, pytest.mark.soak]

STREAMS = 8 * REPLICAS  # enough that some requests wait on each replica
STEP_TOKENS = 2048
PROMPT, ANSWER = 900, 2  # tokens: tenants compete for the prompt tokens of a step
ON_THE_WAY_S = 0.5  # largest delay from a client to the engine
BOUND = 2 * max(PROMPT_TOKEN * PROMPT, OUTPUT_TOKEN * STEP_TOKENS)


@dataclass(frozen=True)
class Served:
    """An answered request: tenant, replica, time sent and time of the first token."""

    tenant: str
    replica: str
    sent_s: float
    begun_s: float


class Rivals:
    """Clients of two tenants; each client sends one request after the other."""

    def __init__(self, service: Service, streams: dict[str, int]) -> None:
        self._service, self._streams = service, streams
        self._rng = random.Random(0)
        self.served: list[Served] = []

    async def run(self, for_s: float) -> None:
        self._until_s = time.monotonic() + for_s
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            await asyncio.gather(
                *(
                    self._ask_on(client, tenant)
                    for tenant, streams in self._streams.items()
                    for _ in range(streams)
                )
            )

    async def _ask_on(self, client: httpx.AsyncClient, tenant: str) -> None:
        url = f"{self._service.url}/v1/completions"
        headers = {"Authorization": f"Bearer {self._service.tenant_keys[tenant]}"}
        while (sent_s := time.monotonic()) < self._until_s:
            prompt = "".join(self._rng.choices(string.ascii_letters, k=PROMPT - 1))
            body = {"model": "lorikeet-demo", "prompt": prompt, "max_tokens": ANSWER}
            body |= {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
            async with client.stream("POST", url, json=body, headers=headers) as answer:
                if answer.status_code == 503:  # refused: it would wait too long
                    assert "overloaded" in (await answer.aread()).decode()
                    await asyncio.sleep(float(answer.headers["retry-after"]))
                    continue
                assert answer.status_code == 200, await answer.aread()
                begun_s, usage = 0.0, None
                async for line in answer.aiter_lines():
                    begun_s = begun_s or time.monotonic()
                    if line.startswith("data: {"):
                        usage = json.loads(line.removeprefix("data: ")).get("usage") or usage
                assert usage["completion_tokens"] == ANSWER
                assert 0.9 * PROMPT < usage["prompt_tokens"] <= PROMPT
                replica = answer.headers["x-lorikeet-replica"]
            self.served.append(Served(tenant, replica, sent_s, begun_s))

    def ahead(self, replica: str) -> list[float]:
        """Return the first tenant's lead in service over time, while both wait at this replica."""
        here = [one for one in self.served if one.replica == replica]
        first, spans = next(iter(self._streams)), [[0.0]]
        for one in sorted(here, key=lambda one: one.begun_s):
            wait = {w.tenant for w in here if w.sent_s + ON_THE_WAY_S < one.begun_s < w.begun_s}
            if len(wait) < 2:
                spans.append([0.0])
                continue
            worth = PROMPT_TOKEN * PROMPT + OUTPUT_TOKEN * ANSWER
            spans[-1].append(spans[-1][-1] + (worth if one.tenant == first else -worth))
        return max(spans, key=len)

    def p99_s(self, tenant: str) -> float:
        return quantiles([s.begun_s - s.sent_s for s in self.served if s.tenant == tenant], n=100)[
            98
        ]


def compete(service: Service, for_s: float, times: int) -> Rivals:
    quiet, noisy = sorted(service.tenant_keys)[:2]
    rivals = Rivals(service, {quiet: STREAMS, noisy: times * STREAMS})
    asyncio.run(rivals.run(for_s))
    return rivals


def test_a_tenant_with_ten_times_the_load_gets_no_more_and_hardly_delays_the_other(
    service: Service,
) -> None:
    quiet = min(service.tenant_keys)
    compete(service, for_s=5, times=1)
    alike = compete(service, for_s=60, times=1)
    one_noisy = compete(service, for_s=60, times=10)
    replicas = {one.replica for one in one_noisy.served}
    assert len(replicas) == REPLICAS
    for replica in replicas:
        ahead = one_noisy.ahead(replica)
        assert max(ahead) - min(ahead) <= BOUND
        assert len(ahead) * PROMPT > 2 * BOUND, "else this would prove nothing"
    assert one_noisy.p99_s(quiet) < 1.25 * alike.p99_s(quiet)
