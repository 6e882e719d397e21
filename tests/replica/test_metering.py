"""Billed usage of a replica, up to the store: the demo model, a catalog in a folder."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from datetime import date, timedelta

import pytest

from demo.fill_catalog import fill_catalog
from demo.tasks import TASKS
from lorikeet.answer_stream.billed_tokens import BilledTokens
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.store.object_store import open_store
from lorikeet.protocol.messages import (
    AnswerHeader,
    Call,
    Endpoint,
    FinalUsage,
    Refusal,
    StreamItem,
)
from lorikeet.replica.replica import Replica
from lorikeet.settings import Settings
from lorikeet.usage.ledger import UsageAccount, UsageCounts, add_to
from lorikeet.usage.reader import UsageReader
from lorikeet_engine.adapter import Composition, Residency
from lorikeet_engine.errors import StepFailed
from lorikeet_engine.request import EngineTimings, Failed, SamplingParams, SchedulingParams, Tokens
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
PROMPTS = ((1, 2, 3), (4, 5))


def tokens(choice: int, *token_ids: int, cached: int | None = None) -> Tokens:
    timings = None if cached is None else EngineTimings(cached_tokens=cached)
    return Tokens("r", choice, token_ids, timings=timings)


def test_a_complete_answer_is_billed_by_its_final_usage():
    meter = BilledTokens(CALL, PROMPTS)
    meter.on_output(tokens(0, 7, cached=0))
    meter.on_output(tokens(1, 7, 8, 9))  # some after a stop string
    meter.on_item(FinalUsage(5, 2, 3))
    assert meter.counts() == UsageCounts(1, 5, 2, 3)


def test_a_client_that_left_pays_for_tokens_until_then():
    meter = BilledTokens(CALL, PROMPTS)
    assert meter.counts() == UsageCounts(requests=1)
    meter.on_output(tokens(0, 7, cached=2))
    meter.on_output(tokens(1, 7, cached=3))
    meter.on_output(tokens(0, 8))
    meter.on_output(tokens(1, 8))
    assert meter.counts() == UsageCounts(1, 3, 2, 4)  # nothing yet of the second prompt
    meter.on_output(tokens(2, 7, cached=0))
    assert meter.counts() == UsageCounts(1, 5, 2, 5)


def test_a_failure_before_the_first_byte_is_not_billed():
    meter = BilledTokens(CALL, PROMPTS)
    meter.on_output(tokens(0, 7, cached=0))
    meter.on_output(Failed("r", StepFailed("it broke")))
    meter.on_item(Refusal("generation_failed", "it broke"))
    assert meter.counts() is None


def test_a_failure_within_an_answer_bills_the_tokens_until_then():
    meter = BilledTokens(CALL, PROMPTS)
    meter.on_output(tokens(0, 7, cached=0))
    meter.on_item(b"data: ...")
    meter.failed()
    assert meter.counts() == UsageCounts(1, 3, 0, 1)


def test_an_answer_that_another_replica_may_go_on_with_is_not_billed():
    for refusal in (Refusal("unavailable", "the engine was closed"), None):
        meter = BilledTokens(CALL, PROMPTS)
        meter.on_output(tokens(0, 7, cached=0))
        meter.on_item(b"data: ...")
        if refusal is None:
            meter.failed(is_given_up=True)
        else:
            meter.on_item(refusal)
        assert meter.counts() is None


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    root = tmp_path_factory.mktemp("metering")
    given = {
        "LORIKEET_CATALOG": str(root / "catalog"),
        "LORIKEET_CACHE_DIR": str(root / "cache"),
        "LORIKEET_USAGE_FLUSH_S": "0.2",
        "LORIKEET_PRICES": f"{BASE}=0.15/0.03/0.6,{BASE}:flex=0.05/0.01/0.2,quillon/rot13=3/1/9",
    }
    settings = Settings.from_env(given)
    fill_catalog(settings, root)
    return settings


def billed(counts: UsageCounts) -> tuple[int, int, int]:
    return counts.prompt_tokens, counts.cached_tokens, counts.output_tokens


def used(settings) -> dict[UsageAccount, UsageCounts]:
    today = date.today()
    day = timedelta(days=1)
    sums: dict[UsageAccount, UsageCounts] = {}
    reader = UsageReader(open_store(settings.catalog))
    for use in reader.read(today - day, today + day).values():
        for account, counts in use.items():
            add_to(sums, account, counts)
    return sums


def test_a_replica_writes_usage_regularly_and_at_close(settings):
    state = CatalogReader(open_store(settings.catalog)).refresh()
    ref = state.resolve(TASK.model, TASK.tenant)
    adapted = replace(CALL, adapter=ref, prompts=("once upon",), n=1)
    behind = replace(adapted.scheduling, background=True)
    flex = replace(adapted, request_id="f", scheduling=behind)
    support = UsageAccount(TASK.tenant, BASE, f"{ref.tenant}/{ref.name}")
    base = UsageAccount(TASK.tenant, BASE)

    async def scenario() -> tuple[FinalUsage, FinalUsage]:
        replica = Replica("r0", BASE, settings)
        try:
            items = [item async for item in answer_of(replica, adapted)]
            usage = next(item for item in items if isinstance(item, FinalUsage))
            async with asyncio.timeout(30):
                while support not in used(settings) or not used(settings)[support].requests:
                    await asyncio.sleep(0.05)
            assert not used(settings)[support].flex_output_tokens
            items = [item async for item in answer_of(replica, flex)]
            later = next(item for item in items if isinstance(item, FinalUsage))
            endless = replace(CALL, request_id="s", n=1, max_tokens=1000, stream=True)
            async with aclosing(answer_of(replica, endless)) as left:
                async for item in left:
                    if isinstance(item, bytes):
                        break
            too_long = replace(CALL, request_id="t", prompts=(tuple([1] * 100_000),))
            assert isinstance([item async for item in answer_of(replica, too_long)][-1], Refusal)
        finally:
            replica.close()
        return usage, later

    usage, later = asyncio.run(scenario())
    counted = used(settings)
    said, flexed = (
        (one.prompt_tokens, one.cached_tokens, one.completion_tokens) for one in (usage, later)
    )
    adapter = counted[support]
    both = tuple(map(sum, zip(said, flexed, strict=True)))
    assert (adapter.requests, adapter.prompt_tokens, adapter.cached_tokens) == (2, *both[:2])
    assert adapter.output_tokens == both[2] == 16
    assert flexed == (
        adapter.flex_prompt_tokens,
        adapter.flex_cached_tokens,
        adapter.flex_output_tokens,
    )
    assert (adapter.loads, adapter.load_bytes > 0, 0 < adapter.slot_s < 30) == (1, True, True)
    assert counted.keys() == {support, base}
    assert counted[base].requests == 1
    assert counted[base].prompt_tokens > 0
    assert counted[base].output_tokens >= 1
    assert counted[base].slot_s == counted[base].loads == 0
    assert counted[base].cost == settings.prices[BASE].cost(*billed(counted[base])) > 0
    usual, cheap = settings.prices[BASE], settings.prices[f"{BASE}:flex"]
    assert adapter.cost == usual.cost(*said) + cheap.cost(*flexed) > 0


def test_a_composition_is_billed_once_and_its_loads_by_adapter(settings):
    state = CatalogReader(open_store(settings.catalog)).refresh()
    refs = [state.resolve(f"{TASK.tenant}/{name}", TASK.tenant) for name in ("rot13", "reverse")]
    composition = Composition(tuple(refs), (0.5, 1.5))
    composed = replace(CALL, adapter=composition, prompts=("once upon",), n=1)
    both, *each = (
        UsageAccount(TASK.tenant, BASE, name)
        for name in ("quillon/reverse+quillon/rot13", "quillon/rot13", "quillon/reverse")
    )

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
    assert (counted[both].requests, counted[both].output_tokens) == (1, 8)
    assert counted[both].loads == counted[both].slot_s == 0
    assert counted[both].cost == settings.prices["quillon/rot13"].cost(*billed(counted[both])) > 0
    for account in each:
        assert (counted[account].requests, counted[account].loads) == (0, 1)
        assert counted[account].slot_s > 0
