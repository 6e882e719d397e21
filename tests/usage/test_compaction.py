"""Compaction of days: a crash at any point loses no usage and counts none twice."""

from dataclasses import replace

import pytest

from lorikeet.catalog.store.local import LocalStore
from lorikeet.catalog.store.object_store import ObjectStore
from lorikeet.usage.compaction import (
    SPARED_S,
    clean_up,
    compact_day,
    compact_recent_days,
    days_with_usage,
)
from lorikeet.usage.ledger import UsageCounts
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

USED = {SUPPORT: UsageCounts(output_tokens=12), BASE: UsageCounts(output_tokens=4)}


class Killed(Exception):
    pass


class Mortal:
    """Store whose n-th change kills the process, before or after the change happens."""

    def __init__(self, store: ObjectStore, dies_at: int, *, after: bool) -> None:
        self._store, self._left, self._after = store, dies_at, after

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._change(lambda: self._store.put_if_absent(key, data))

    def delete(self, key: str) -> None:
        self._change(lambda: self._store.delete(key))

    def _change(self, change) -> None:
        self._left -= 1
        if self._left == 0 and not self._after:
            raise Killed
        change()
        if self._left == 0:
            raise Killed


def use_two_days(store: ObjectStore, clock: Clock) -> list[Replica]:
    """Write two objects of yesterday and one of today by each of two replicas."""
    replicas = [Replica(store, clock), Replica(store, clock)]
    for at in (NOON - DAY_S, NOON - DAY_S + 60, NOON):
        clock.now = at
        for replica in replicas:
            replica.uses(SUPPORT, output_tokens=2)
            replica.flush()
    replicas[0].uses(BASE, output_tokens=4)
    replicas[0].flush()
    return replicas


def all_used(store: ObjectStore, clock: Clock):
    return total(store, clock, YESTERDAY, TODAY)


def run(store: ObjectStore, clock: Clock, later_s: float = 0.0) -> list[str]:
    """Clean up `later_s` after everything was written; the store's own clock stands still."""
    return [one.key for one in clean_up(store, lambda: clock.now + later_s, dry_run=False)]


@pytest.fixture
def local(tmp_path) -> LocalStore:
    return LocalStore(tmp_path / "store")


class Dated:
    """Store that dates its objects by the test's clock."""

    def __init__(self, store: ObjectStore, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._written: dict[str, float] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._store.put_if_absent(key, data)
        self._written[key] = self._clock.now

    def scan(self, prefix: str):
        for one in self._store.scan(prefix):
            yield replace(one, modified=self._written[one.key])


def test_a_day_that_is_over_becomes_one_object(store: ObjectStore) -> None:
    clock = Clock()
    dated = Dated(store, clock)
    use_two_days(dated, clock)
    assert run(dated, clock) == []
    assert run(dated, clock) == []
    assert len(objects(store)) == 4 + 1 + 3
    clock.now += SPARED_S + 1
    deleted = run(dated, clock)
    assert len(deleted) == 4
    assert len(objects(store)) == 1 + 3
    assert all_used(store, clock) == USED
    assert list(days_with_usage(store)) == [YESTERDAY, TODAY]


def test_a_late_object_is_compacted_too(store: ObjectStore) -> None:
    clock = Clock()
    dated = Dated(store, clock)
    late = Replica(dated, clock)
    clock.now = NOON - DAY_S
    late.uses(GLOBEX, output_tokens=5)
    replicas = use_two_days(dated, clock)
    for _ in range(2):
        run(dated, clock)
        clock.now += SPARED_S + 1
    late.flush()
    replicas[0].flush()
    used = {**USED, GLOBEX: UsageCounts(output_tokens=5)}
    assert all_used(store, clock) == used
    for _ in range(3):
        run(dated, clock)
        assert all_used(store, clock) == used
        clock.now += SPARED_S + 1
    yesterdays = [key for key in objects(store) if str(YESTERDAY) in key]
    assert [key.rpartition("/")[2] for key in yesterdays] == ["compacted-000002.json"]


def test_an_object_written_again_after_compaction_does_not_count_again(local) -> None:
    clock = Clock()
    dated = Dated(local, clock)
    use_two_days(dated, clock)
    again = {key: local.get(key) for key in objects(local)}
    run(dated, clock)
    clock.now += SPARED_S + 1
    assert run(dated, clock)
    for key, data in again.items():
        if key not in objects(local):
            dated.put_if_absent(key, data)  # the answer to the first write was lost
    assert all_used(local, clock) == USED
    assert len(run(dated, clock)) == 4
    assert all_used(local, clock) == USED


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_kill_at_any_point_loses_nothing_and_counts_nothing_twice(local, after: bool) -> None:
    clock = Clock()
    dated = Dated(local, clock)
    use_two_days(dated, clock)
    died = set()
    for round_ in range(2):  # the first run joins, the second deletes
        for dies_at in range(1, 100):
            try:
                run(Mortal(dated, dies_at, after=after), clock)
            except Killed:
                died.add(round_)
                assert all_used(local, clock) == USED, (round_, dies_at)
            else:
                break
        clock.now += SPARED_S + 1
    assert died == {0, 1}
    assert all_used(local, clock) == USED
    assert len([key for key in objects(local) if str(YESTERDAY) in key]) == 1


def test_only_one_of_two_concurrent_compactions_writes(local) -> None:
    clock = Clock()
    use_two_days(local, clock)

    class Other:
        """Store that writes after a concurrent compaction has written."""

        def __getattr__(self, name: str) -> object:
            return getattr(local, name)

        def put_if_absent(self, key: str, data: bytes) -> None:
            compact_day(local, YESTERDAY)
            local.put_if_absent(key, data)

    compact_day(Other(), YESTERDAY)
    assert all_used(local, clock) == USED


def test_a_day_can_be_compacted_again_and_again_while_it_lasts(store: ObjectStore) -> None:
    clock = Clock()
    replica = Replica(store, clock)
    for hour in range(1, 4):
        replica.uses(SUPPORT, output_tokens=1)
        replica.flush()
        compact_recent_days(store, clock.now)
        compact_recent_days(store, clock.now)  # without new objects
        assert total(store, clock) == {SUPPORT: UsageCounts(output_tokens=hour)}
        assert objects(store)[-1].endswith(f"compacted-{hour:06d}.json")
        clock.now += 3600


def test_a_dry_run_changes_nothing(local) -> None:
    clock = Clock()
    dated = Dated(local, clock)
    use_two_days(dated, clock)
    run(dated, clock)
    clock.now += SPARED_S + 1
    there = objects(local)
    found = list(clean_up(dated, clock, dry_run=True))
    assert len(found) == 4
    assert objects(local) == there
