"""Readers count each object once, whatever they have read and whatever is compacted meanwhile."""

from datetime import date

import pytest

from lorikeet.catalog.store.object_store import ObjectStore
from lorikeet.errors import InvalidInput, StoreError
from lorikeet.usage.compaction import compact_day
from lorikeet.usage.day_reader import DayReader
from lorikeet.usage.ledger import UsageCounts
from lorikeet.usage.month_usage import MonthUsage
from lorikeet.usage.object_format import (
    UsageContent,
    UsageObjectId,
    compacted_key,
    object_key,
    to_json,
)
from lorikeet.usage.reader import UsageReader
from tests.usage.replicas import (
    BASE,
    DAY_S,
    GLOBEX,
    NOON,
    SUPPORT,
    TODAY,
    YESTERDAY,
    Clock,
    Replica,
    objects,
    total,
)


class Listening:
    """Store that records GETs and the start of each LIST."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.got: list[str] = []
        self.listed: list[str] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        self.got.append(key)
        return self._store.get(key)

    def list(self, prefix: str, start_after: str = "") -> object:
        self.listed.append(start_after)
        return self._store.list(prefix, start_after)


def tokens(day: DayReader[str]) -> dict[str, int]:
    return {tenant: counts.tokens for tenant, counts in day.sums.items()}


def put(store: ObjectStore, writer: str, number: int, made: float, output_tokens: int) -> None:
    content = UsageContent({SUPPORT: UsageCounts(output_tokens=output_tokens)})
    store.put_if_absent(
        object_key(TODAY, UsageObjectId(writer * 16, number), made), to_json(content)
    )


def test_a_period_is_read_by_day(store: ObjectStore) -> None:
    clock = Clock(NOON - DAY_S)
    replica = Replica(store, clock)
    replica.uses(SUPPORT, output_tokens=1)
    replica.flush()
    clock.now = NOON
    replica.uses(BASE, output_tokens=2)
    replica.flush()
    reader = UsageReader(store, clock)
    found = {
        YESTERDAY: {SUPPORT: UsageCounts(output_tokens=1)},
        TODAY: {BASE: UsageCounts(output_tokens=2)},
    }
    assert reader.read(date(2026, 11, 1), TODAY) == found
    replica.uses(BASE, output_tokens=2)
    replica.flush()
    assert reader.read(TODAY, TODAY) == {TODAY: {BASE: UsageCounts(output_tokens=4)}}
    assert reader.read(date(2026, 11, 1), date(2026, 11, 2)) == {}


@pytest.mark.parametrize("last", [date(2026, 10, 31), date(2028, 1, 1)])
def test_a_reversed_or_too_long_period_is_refused(last: date, store: ObjectStore) -> None:
    with pytest.raises(InvalidInput):
        UsageReader(store).read(date(2026, 11, 1), last)


def test_an_object_is_read_once_and_later_reads_need_one_short_list(store: ObjectStore) -> None:
    listening = Listening(store)
    day = DayReader(listening, TODAY, lambda account: account.tenant)
    put(store, "a", 0, NOON, 1)
    assert tokens_after(day, NOON) == {"acme": 1}
    put(store, "a", 1, NOON + 60, 2)
    put(store, "b", 0, NOON + 60, 4)
    assert tokens_after(day, NOON + 60) == {"acme": 7}
    assert tokens_after(day, NOON + 90) == {"acme": 7}
    assert len(listening.got) == 3
    assert listening.listed[0] == ""
    assert all(listening.listed[1:])


def tokens_after(day: DayReader[str], now: float) -> dict[str, int]:
    day.read_new(now)
    return tokens(day)


def test_a_late_object_is_missed_only_until_its_writers_next_object(store: ObjectStore) -> None:
    day = DayReader(store, TODAY, lambda account: account.tenant)
    put(store, "a", 0, NOON, 1)
    day.read_new(NOON)
    put(store, "a", 1, NOON, 2)  # made at noon, written after an outage of the store
    assert tokens_after(day, NOON + 3600) == {"acme": 1}
    put(store, "a", 2, NOON + 3600, 4)
    assert tokens_after(day, NOON + 3600) == {"acme": 7}


def test_objects_compacted_during_a_read_count_once(store: ObjectStore) -> None:
    clock = Clock()
    replica, other = Replica(store, clock), Replica(store, clock)
    day = DayReader(store, TODAY, lambda account: account.tenant)
    for each in (replica, other, replica):
        each.uses(SUPPORT, output_tokens=1)
        each.uses(GLOBEX, output_tokens=10)
        each.flush()
    day.read_new(clock.now)
    compact_day(store, TODAY)
    for key in objects(store)[:-1]:
        store.delete(key)
    replica.uses(SUPPORT, output_tokens=1)
    replica.flush()
    clock.now += 600
    assert tokens_after(day, clock.now) == {"acme": 4, "globex": 30}
    assert total(store, clock) == {
        SUPPORT: UsageCounts(output_tokens=4),
        GLOBEX: UsageCounts(output_tokens=30),
    }


def test_a_new_month_begins_at_zero(store: ObjectStore) -> None:
    clock = Clock(NOON - 22 * DAY_S)  # the last of October
    replica, month = Replica(store, clock), MonthUsage(store, clock)
    replica.uses(SUPPORT, prompt_tokens=100, cached_tokens=50, output_tokens=5)
    replica.flush()
    month.refresh()
    assert (month.of("acme").tokens, month.of("globex").tokens) == (105, 0)
    clock.now = NOON
    month.refresh()
    assert month.of("acme").tokens == 0
    for now in (NOON - DAY_S, NOON):
        clock.now = now
        replica.uses(SUPPORT, prompt_tokens=1, output_tokens=2)
        replica.uses(GLOBEX, output_tokens=7)
        replica.flush()
    clock.now += 1000  # by then all days are listed again
    month.refresh()
    assert (month.of("acme").tokens, month.of("globex").tokens) == (6, 14)


@pytest.mark.parametrize("data", [b"", b"[]", b'{"schema":3}', b'{"schema":1,"rows":[]}'])
def test_a_damaged_object_raises_and_does_not_count_as_empty(
    data: bytes, store: ObjectStore
) -> None:
    store.put_if_absent(compacted_key(TODAY, 1), data)
    with pytest.raises(StoreError, match="compacted-000001"):
        total(store, Clock())
