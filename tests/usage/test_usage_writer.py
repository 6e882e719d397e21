"""Writer of usage: counted usage reaches the store exactly once."""

import json
import threading
import time

import pytest

from lorikeet.catalog.store.object_store import ObjectStore
from lorikeet.errors import StoreError
from lorikeet.usage.ledger import UsageCounts, UsageLedger
from lorikeet.usage.object_format import from_json
from lorikeet.usage.writer import UsageWriter
from tests.usage.replicas import (
    BASE,
    DAY_S,
    NOON,
    SUPPORT,
    YESTERDAY,
    Clock,
    Replica,
    objects,
    total,
)


class Flaky:
    """Store whose next writes fail, either before the write or with a lost answer."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.failures: list[str] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def put_if_absent(self, key: str, data: bytes) -> None:
        failure = self.failures.pop(0) if self.failures else ""
        if failure == "away":
            raise StoreError("away")
        self._store.put_if_absent(key, data)
        if failure == "answer lost":
            raise StoreError("no answer")


def test_usage_of_several_replicas_adds_up_by_account(store: ObjectStore) -> None:
    clock = Clock()
    one, two = Replica(store, clock), Replica(store, clock)
    one.uses(SUPPORT, requests=1, prompt_tokens=100, cached_tokens=64, output_tokens=7)
    one.uses(SUPPORT, slot_s=0.5, loads=1, load_bytes=4096)
    two.uses(SUPPORT, requests=1, prompt_tokens=10, output_tokens=3)
    two.uses(BASE, requests=1, prompt_tokens=5, output_tokens=1)
    assert one.flush()
    assert two.flush()
    one.uses(SUPPORT, requests=1, prompt_tokens=1, output_tokens=1)
    assert one.flush()
    assert total(store, clock) == {
        SUPPORT: UsageCounts(3, 111, 64, 11, 0.5, 1, 4096),
        BASE: UsageCounts(1, 5, 0, 1),
    }


def test_costs_add_up_exactly_and_only_objects_with_costs_need_a_newer_reader(
    store: ObjectStore,
) -> None:
    clock = Clock()
    replica = Replica(store, clock)
    replica.uses(SUPPORT, requests=1, output_tokens=1)
    replica.flush()
    replica.uses(SUPPORT, requests=1, output_tokens=1, cost=10**15 + 1)
    replica.uses(BASE, requests=1)
    replica.flush()
    schemas = [json.loads(store.get(key))["schema"] for key in objects(store)]
    assert schemas == [1, 2]
    assert b"cost" not in store.get(objects(store)[0])
    assert total(store, clock) == {
        SUPPORT: UsageCounts(requests=2, output_tokens=2, cost=10**15 + 1),
        BASE: UsageCounts(requests=1),
    }


def test_without_usage_no_object_is_written(store: ObjectStore) -> None:
    replica = Replica(store, Clock())
    assert replica.flush()
    assert objects(store) == []


@pytest.mark.parametrize("failure", ["away", "answer lost"])
def test_a_write_that_is_retried_counts_once(store: ObjectStore, failure: str) -> None:
    clock, flaky = Clock(), Flaky(store)
    replica = Replica(flaky, clock)
    flaky.failures = [failure]
    replica.uses(SUPPORT, output_tokens=10)
    assert not replica.flush()
    replica.uses(SUPPORT, output_tokens=1)  # counted while the store is unavailable
    clock.now += 3600.0
    assert replica.flush()
    assert total(store, clock) == {SUPPORT: UsageCounts(output_tokens=11)}
    assert len(objects(store)) == 2


def test_usage_counts_for_the_day_on_which_it_happened(store: ObjectStore) -> None:
    clock = Clock(NOON - DAY_S)
    replica = Replica(store, clock)
    replica.uses(SUPPORT, output_tokens=1)
    clock.now = NOON
    replica.uses(SUPPORT, output_tokens=2)
    assert replica.flush()
    assert total(store, clock, YESTERDAY, YESTERDAY) == {SUPPORT: UsageCounts(output_tokens=1)}
    assert total(store, clock) == {SUPPORT: UsageCounts(output_tokens=2)}


def test_the_writer_writes_at_intervals_and_once_more_when_closed(store: ObjectStore) -> None:
    ledger = UsageLedger()
    gathered = threading.Event()
    writer = UsageWriter(store, ledger, 0.05, gathered.set)
    writer.start()
    ledger.add(SUPPORT, UsageCounts(output_tokens=1))
    deadline = time.monotonic() + 20
    while not objects(store):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert gathered.is_set()
    ledger.add(SUPPORT, UsageCounts(output_tokens=2))
    writer.close(within_s=20)
    assert ledger.take() == {}
    assert sum(_output(store, key) for key in objects(store)) == 3


def _output(store: ObjectStore, key: str) -> int:
    return sum(counts.output_tokens for counts in from_json(store.get(key), key).use.values())
