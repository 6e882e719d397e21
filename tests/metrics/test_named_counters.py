"""Counters by name: the busiest have series of their own, and every use counts once."""

import random
from collections import Counter

from lorikeet.metrics.named_counters import OTHER, ROUND_S, BusiestNames, NamedCounter


class Watched:
    """Counters of the busiest names with a simulated scraper, which sums each name's increase."""

    def __init__(self, most: int) -> None:
        self.now = 0.0
        self.counter = NamedCounter("requests_total", "Requests.", ("name",))
        self.names = BusiestNames(most, self.counter.drop, lambda: self.now)
        self.increase: Counter[str] = Counter()
        self.last: dict[str, float] = {}

    def use(self, name: str) -> str:
        shown = self.names.count(name)
        self.counter.add(1, shown)
        return shown

    def scrape(self) -> dict[str, float]:
        family = self.counter.collect()
        values = {sample.labels["name"]: sample.value for sample in family.samples}
        for name, value in values.items():
            before = self.last.get(name, 0)
            self.increase[name] += value - before if value >= before else value
        self.last |= values
        return values


def test_names_up_to_the_limit_are_shown_from_their_first_use() -> None:
    watched = Watched(most=3)
    assert [watched.use(name) for name in "abcabba"] == list("abcabba")
    assert watched.scrape() == {"a": 3, "b": 3, "c": 1}


def test_names_beyond_the_limit_are_counted_together() -> None:
    watched = Watched(most=2)
    for name in "abcdcd":
        watched.use(name)
    assert watched.scrape() == {"a": 1, "b": 1, OTHER: 4}


def test_a_busier_name_replaces_the_least_busy_in_the_next_round() -> None:
    watched = Watched(most=2)
    for name in "aaab" + 5 * "c":
        watched.use(name)
    watched.now += ROUND_S
    assert watched.use("c") == "c"
    assert watched.use("b") == OTHER
    assert watched.scrape() == {"a": 3, "b": 1, "c": 1, OTHER: 6}
    watched.now += ROUND_S
    watched.use("c")
    assert watched.scrape() == {"a": 3, "c": 2, OTHER: 6}


def test_a_name_that_returns_within_a_round_continues_its_count() -> None:
    watched = Watched(most=1)
    for name in "a" + 5 * "b":
        watched.use(name)
    watched.now += ROUND_S
    for name in "b" + 50 * "a":
        watched.use(name)
    watched.now += ROUND_S
    assert watched.use("a") == "a"
    assert watched.scrape() == {"a": 2, "b": 1, OTHER: 5 + 50}


def test_equally_busy_names_do_not_replace_each_other() -> None:
    watched, numbers = Watched(most=5), random.Random(1)
    names = [str(n) for n in range(10)]
    for name in names[:5]:
        watched.use(name)
    for _ in range(60):
        for _ in range(600):
            watched.use(numbers.choice(names))
        watched.now += ROUND_S
    assert watched.scrape().keys() == {*names[:5], OTHER}


def test_the_busiest_names_are_shown_in_any_order_of_arrival_and_every_use_counts_once() -> None:
    watched, numbers = Watched(most=20), random.Random(2)
    weights = [1 / rank for rank in range(1, 5_001)]
    names = [f"n{rank}" for rank in range(5_000)]
    numbers.shuffle(names)
    uses: Counter[str] = Counter()
    for second in range(600):
        if second == 300:
            numbers.shuffle(names)  # other names become popular
        for name in numbers.choices(names, weights, k=40):
            watched.use(name)
            uses[name] += 1
        watched.now += 1.0
        if second % 15 == 0:
            assert len(watched.scrape()) <= 20 + 5 + 1
    shown = watched.scrape()
    assert set(names[:8]) <= shown.keys()
    assert sum(watched.increase.values()) == uses.total()
    assert all(watched.increase[name] <= uses[name] for name in shown if name != OTHER)


def test_memory_of_other_names_is_bounded() -> None:
    watched = Watched(most=1)
    for n in range(30_000):
        watched.use(f"n{n}")
    assert len(watched.names._others) <= 10_000
    assert watched.scrape() == {"n0": 1, OTHER: 29_999}
