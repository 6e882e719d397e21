"""Measurement of tenants' requests to a running service: each tenant's alone, then all together."""

import asyncio
import json
import random
import string
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import httpx
import numpy as np

from lorikeet.errors import LorikeetError
from lorikeet.simulator.workload_models import poisson

_TIMEOUT = httpx.Timeout(60.0, connect=5.0)
_WORDS, _LETTERS = 50, 4  # words of a prompt, letters of a word


@dataclass(frozen=True, slots=True)
class MeasuredTenant:
    """Tenant with its key, the requested model and the rate of requests."""

    name: str
    key: str
    model: str
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Parameters of a run, in which tenants' requests are sent and measured.

    seconds: seconds in which requests are sent.
    tokens: number of tokens of each answer.
    seed: seed of arrival times and prompts.
    """

    seconds: float
    tokens: int
    seed: int


@dataclass(slots=True)
class RunMeasurements:
    """Measurements of one tenant in one run.

    requests: number of requests sent.
    first_s: for each answered request, seconds from its due time to the first token.
    between_s: seconds between two consecutive tokens, of all answers.
    errors: number of errors by kind.
    late_s: largest delay from due time to sending, in seconds.
    """

    requests: int = 0
    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    late_s: float = 0.0


@dataclass(slots=True)
class TenantComparison:
    """A tenant's measurements alone and beside the other tenants."""

    tenant: MeasuredTenant
    alone: RunMeasurements = field(default_factory=RunMeasurements)
    shared: RunMeasurements = field(default_factory=RunMeasurements)


class _Failed(Exception):
    """Failure of a request to get a complete answer.

    The message is short, so that equal failures are counted together.
    """


async def find_models(url: str, keys: Mapping[str, str]) -> dict[str, str]:
    """Choose the model of each tenant: an adapter of the tenant, else any model that it may use.

    Raises LorikeetError if the server does not answer or does not accept a key.
    """
    try:
        client = _client(url)
    except httpx.InvalidURL as error:
        raise LorikeetError(f"cannot ask {url}: {error}") from error
    async with client:
        return {tenant: await _model_of(client, tenant, key) for tenant, key in keys.items()}


async def compare(
    url: str, rows: Sequence[TenantComparison], run: LoadRun, watch: Callable[[str], None]
) -> None:
    """Send each tenant's requests alone, then those of all tenants together; fill the rows as
    answers come.

    Each tenant first sends one uncounted request, so that no request waits for an adapter to load.

    watch: called with a text that says whose requests are sent now.
    """
    async with _client(url) as client:
        for number, row in enumerate(rows, 1):
            watch(f"{row.tenant.name} alone, {number} of {len(rows)}")
            with suppress(_Failed):  # a lasting failure shows in the counted requests
                await _tokens_s(client, row.tenant, run, "a few words")
            await _send_all(client, row.tenant, run, "alone", row.alone)
        watch("all together")
        async with asyncio.TaskGroup() as tasks:
            for row in rows:
                tasks.create_task(_send_all(client, row.tenant, run, "shared", row.shared))


def _client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=_TIMEOUT, limits=limits)


async def _model_of(client: httpx.AsyncClient, tenant: str, key: str) -> str:
    try:
        answer = await client.get("/v1/models", headers=_headers(key))
        models = answer.json()["data"] if answer.is_success else []
        ranked = sorted(models, key=lambda m: (m["owned_by"] != tenant, m["parent"] is None))
    except httpx.HTTPError as error:
        raise LorikeetError(
            f"nothing answers at {client.base_url}: start the service, or give the address"
            " at which tenants reach it with --url"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise LorikeetError(
            f"{client.base_url} does not answer like Lorikeet: is it the gateway's address?"
        ) from error
    if answer.is_error:
        raise LorikeetError(f"the service does not accept {tenant}'s key: {_reason(answer)}")
    if not ranked:
        raise LorikeetError(f"{tenant} may use no model: register an adapter for it")
    return str(ranked[0]["id"])


async def _send_all(
    client: httpx.AsyncClient,
    tenant: MeasuredTenant,
    run: LoadRun,
    kind: str,
    seen: RunMeasurements,
) -> None:
    """Send a tenant's requests at their due times, whether or not earlier requests are answered.

    A tenant's requests have equal arrival times and different prompts in a run alone and in a run
    with others.

    kind: alone or shared; part of the seed of the prompts.
    seen: measurements, to which the outcomes are added.
    """
    words = random.Random(f"{run.seed} {tenant.name} {kind}")
    dice = np.random.default_rng(list(f"{run.seed} {tenant.name}".encode()))
    due_s = poisson(tenant.requests_per_s).times(dice, run.seconds).tolist()
    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for at_s in due_s:
            await asyncio.sleep(began_s + at_s - time.perf_counter())
            asked = _ask(client, tenant, run, _prompt(words), began_s + at_s, seen)
            tasks.create_task(asked)


async def _ask(
    client: httpx.AsyncClient,
    tenant: MeasuredTenant,
    run: LoadRun,
    prompt: str,
    due_s: float,
    seen: RunMeasurements,
) -> None:
    """Send one request, and add its outcome to the measurements `seen`.

    due_s: time.perf_counter() at which the request is due.
    """
    seen.requests += 1
    seen.late_s = max(seen.late_s, time.perf_counter() - due_s)
    try:
        tokens_s = await _tokens_s(client, tenant, run, prompt)
    except _Failed as failed:
        seen.errors[str(failed)] += 1
    else:
        seen.first_s.append(tokens_s[0] - due_s)
        seen.between_s += [later - sooner for sooner, later in pairwise(tokens_s)]


async def _tokens_s(
    client: httpx.AsyncClient, tenant: MeasuredTenant, run: LoadRun, prompt: str
) -> list[float]:
    """Send a request; return the times (time.perf_counter) at which its pieces of text arrived, at
    least one. Raises _Failed without a complete answer.
    """
    body = {
        "model": tenant.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": run.tokens,
        "min_tokens": run.tokens,
        "stream": True,
    }
    came_s: list[float] = []
    try:
        async with client.stream(
            "POST", "/v1/chat/completions", json=body, headers=_headers(tenant.key)
        ) as answer:
            if answer.is_error:
                await answer.aread()
                raise _Failed(_reason(answer))
            async for line in answer.aiter_lines():
                if line == "data: [DONE]" and came_s:
                    return came_s
                if _has_text(line):
                    came_s.append(time.perf_counter())
    except httpx.HTTPError as error:
        raise _Failed(type(error).__name__) from error
    raise _Failed("the stream broke off" if came_s else "an answer without text")


def _has_text(line: str) -> bool:
    """Whether this line of an event stream has text of the answer.

    Raises _Failed for an error event.
    """
    if not line.startswith("data: {"):
        return False
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        raise _Failed(f"mid-stream {event['error']['code']}")
    return any(choice["delta"].get("content") for choice in event["choices"])


def _reason(answer: httpx.Response) -> str:
    """Return status and code, such as 429 rate_limit_exceeded."""
    try:
        return f"{answer.status_code} {answer.json()['error']['code']}"
    except (ValueError, KeyError, TypeError):
        return str(answer.status_code)


def _headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _prompt(dice: random.Random) -> str:
    letters = dice.choices(string.ascii_lowercase, k=_WORDS * _LETTERS)
    return " ".join("".join(letters[at::_WORDS]) for at in range(_WORDS))


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return a quantile: the smallest value that at least `share` of all values do not exceed.

    share: fraction, such as 0.99. Returns None without values.
    """
    if not values:
        return None
    return float(np.quantile(values, share, method="inverted_cdf"))
