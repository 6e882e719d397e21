"""Use of a replica's slots by tenant, up to the store: the demo model, a catalog in a folder."""

import asyncio
from dataclasses import replace
from datetime import date, timedelta

import pytest

from demo.fill_catalog import fill_catalog
from demo.tasks import TASKS
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.store.object_store import open_store
from lorikeet.protocol.messages import (
    AnswerHeader,
    Call,
    Endpoint,
    FinalUsage,
    StreamItem,
)
from lorikeet.replica.replica import Replica
from lorikeet.settings import Settings
from lorikeet.usage.ledger import UsageAccount, UsageCounts, add_to
from lorikeet.usage.reader import UsageReader
from lorikeet_engine.adapter import Composition, Residency
from lorikeet_engine.request import SamplingParams, SchedulingParams
from tests.serving.local_gateway import answer_of

BASE = "lorikeet-demo"
TASK = TASKS[0]
CALL = Call(
    request_id="r",
    endpoint=Endpoint.COMPLETIONS,
    created=0,
    tenant=TASK.tenant,
    model=BASE,
    adapter=None,
    prompts=("once upon", "twice"),
    max_tokens=8,
    sampling=SamplingParams(temperature=0, ignore_eos=True),
    n=2,
    scheduling=SchedulingParams(tenant=TASK.tenant),
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    root = tmp_path_factory.mktemp("metering")
    given = {
        "LORIKEET_CATALOG": str(root / "catalog"),
        "LORIKEET_CACHE_DIR": str(root / "cache"),
        "LORIKEET_USAGE_FLUSH_S": "0.2",
    }
    settings = Settings.from_env(given)
    fill_catalog(settings, root)
    return settings


def used(settings) -> dict[UsageAccount, UsageCounts]:
    today = date.today()
    day = timedelta(days=1)
    sums: dict[UsageAccount, UsageCounts] = {}
    reader = UsageReader(open_store(settings.catalog))
    for use in reader.read(today - day, today + day).values():
        for account, counts in use.items():
            add_to(sums, account, counts)
    return sums


async def until_written(settings, account: UsageAccount) -> None:
    async with asyncio.timeout(30):
        while account not in used(settings):
            await asyncio.sleep(0.05)


def test_a_replica_writes_use_of_slots_regularly_and_at_close_and_no_tokens(settings):
    state = CatalogReader(open_store(settings.catalog)).refresh()
    ref = state.resolve(TASK.model, TASK.tenant)
    adapted = replace(CALL, adapter=ref, prompts=("once upon",), n=1)
    account = UsageAccount(TASK.tenant, BASE, f"{ref.tenant}/{ref.name}")

    async def scenario() -> UsageCounts:
        replica = Replica("r0", BASE, settings)
        try:
            assert [item async for item in answer_of(replica, adapted)]
            await until_written(settings, account)
            before = used(settings)[account]
            again = replace(adapted, request_id="s")
            assert [item async for item in answer_of(replica, again)]
            assert [item async for item in answer_of(replica, replace(CALL, request_id="t"))]
        finally:
            replica.close()
        return before

    before = asyncio.run(scenario())
    counted = used(settings)
    assert counted.keys() == {account}
    counts = counted[account]
    assert (counts.loads, counts.load_bytes > 0) == (1, True)
    assert 0 < before.slot_s < counts.slot_s < 30
    assert (counts.requests, counts.tokens, counts.cost) == (0, 0, 0)


def test_loads_of_a_composition_count_by_adapter(settings):
    state = CatalogReader(open_store(settings.catalog)).refresh()
    refs = [state.resolve(f"{TASK.tenant}/{name}", TASK.tenant) for name in ("rot13", "reverse")]
    composition = Composition(tuple(refs), (0.5, 1.5))
    composed = replace(CALL, adapter=composition, prompts=("once upon",), n=1)
    before = used(settings)

    async def scenario() -> list[StreamItem]:
        replica = Replica("r1", BASE, settings)
        try:
            return [item async for item in answer_of(replica, composed)]
        finally:
            replica.close()

    items = asyncio.run(scenario())
    (usage,) = (item for item in items if isinstance(item, FinalUsage))
    header = next(item for item in items if isinstance(item, AnswerHeader))
    assert (header.digest, header.residency) == (composition.digest, Residency.REMOTE)
    (timings,) = usage.timings
    assert [load.residency for load in timings.members] == [Residency.REMOTE] * 2
    assert max(load.load_s for load in timings.members) == timings.load_s > 0
    counted = used(settings)
    for name in ("quillon/rot13", "quillon/reverse"):
        account = UsageAccount(TASK.tenant, BASE, name)
        earlier = before.get(account, UsageCounts())
        assert counted[account].loads == earlier.loads + 1
        assert counted[account].slot_s > earlier.slot_s
