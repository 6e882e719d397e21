"""A replica under calls of all kinds, many left early, loses and leaks nothing."""

import asyncio
import time
from contextlib import aclosing
from random import Random

import pytest

from demo.fill_catalog import fill_catalog
from demo.tasks import TASKS
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.store.object_store import open_store
from lorikeet.protocol.messages import AnswerHeader, Call, Endpoint, FinalUsage, RunningUsage
from lorikeet.replica.replica import Replica
from lorikeet.settings import Settings
from lorikeet_engine.request import SamplingParams
from tests.serving.local_gateway import local_gateway

CALLERS = 12


@pytest.fixture
def settings(tmp_path):
    # Room for some adapters and some sequences only, so that both are evicted and preempted.
    given = {
        "LORIKEET_CATALOG": str(tmp_path / "catalog"),
        "LORIKEET_CACHE_DIR": str(tmp_path / "cache"),
        "LORIKEET_ADAPTER_GPU_MEMORY": "2MiB",
        "LORIKEET_ADAPTER_HOST_MEMORY": "3MiB",
        "LORIKEET_KV_CACHE_MEMORY": "3MiB",
        "LORIKEET_MAX_CONTEXT": "256",
        "LORIKEET_MAX_BATCH_ADAPTERS": "3",
    }
    settings = Settings.from_env(given)
    fill_catalog(settings, tmp_path)
    return settings


def random_call(rng, number, refs):
    return Call(
        request_id=f"r{number}",
        endpoint=Endpoint.COMPLETIONS,
        created=0,
        tenant=rng.choice(("a", "b")),
        model="any",
        adapter=rng.choice([None, *refs]),
        prompts=tuple("shared words " * rng.randint(1, 8) for _ in range(rng.randint(1, 3))),
        max_tokens=rng.randint(1, 60),
        sampling=SamplingParams(temperature=rng.choice((0.0, 1.0)), ignore_eos=True),
        n=rng.randint(1, 3),
        stop=rng.choice(((), ("e",))),
        stream=rng.random() < 0.7,
    )


async def answered(gateway, call, leave_after):
    """Return True if the call was answered to its end.

    leave_after: chunks after which the client leaves; None to stay.
    """
    chunks = 0
    async with aclosing(gateway.stream_answer(call)) as items:
        async for item in items:
            assert isinstance(item, AnswerHeader | RunningUsage | FinalUsage | bytes), item
            chunks += isinstance(item, bytes)
            if leave_after is not None and chunks > leave_after:
                return False
    assert chunks > 0
    return True


def idle(report):
    live, leases = report.status.live, sum(adapter.leases for adapter in report.adapters)
    return (live.running, live.waiting, live.kv_pages_used, leases) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    "seconds", [4, pytest.param(300, marks=[pytest.mark.soak, pytest.mark.timeout(900)])]
)
def test_every_call_ends_and_frees_its_resources(settings, seconds):
    async def scenario():
        replica = Replica("r0", "lorikeet-demo", settings)
        state = CatalogReader(open_store(settings.catalog)).refresh()
        refs = [state.resolve(task.model, task.tenant) for task in TASKS]
        deadline, numbers, ended = time.monotonic() + seconds, iter(range(10**9)), []

        async def caller(gateway, rng):
            while time.monotonic() < deadline:
                call = random_call(rng, next(numbers), refs)
                leave_after = rng.randint(0, 3) if rng.random() < 0.4 else None
                ended.append(await asyncio.wait_for(answered(gateway, call, leave_after), 60))

        try:
            async with local_gateway(replica) as gateway:
                await asyncio.gather(*(caller(gateway, Random(seed)) for seed in range(CALLERS)))
            deadline = time.monotonic() + 20
            while not idle(report := await replica.report()) and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            replica.check_health()
        finally:
            replica.close()
        return report, ended

    report, ended = asyncio.run(scenario())
    assert any(ended)
    assert not all(ended)
    assert idle(report)
