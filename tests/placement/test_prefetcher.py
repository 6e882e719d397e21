"""Prefetcher: sends no prefetch twice, and hardly any to a fleet at work."""

import random
from collections.abc import Iterable

from lorikeet.placement.demand import HALF_LIFE_S
from lorikeet.placement.prefetcher import Prefetcher, PrefetchList
from lorikeet.protocol.placement_decision import PinTarget, PrefetchTarget
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet_engine.adapter import Residency
from lorikeet_engine.residency.eviction_score import LeastUsedForItsSize, RecentUses, UsageRecord
from lorikeet_engine.telemetry.status import AdapterStatus
from tests.placement.builders import held, ref, report

GPU, HOST, DISK = Residency.GPU, Residency.HOST, Residency.DISK
A, B = ref("a"), ref("b")


def adapter(ref, tier=DISK, uses=3.0, size=10) -> AdapterStatus:
    return held(ref, tier, size, uses)


def replica(name: str, *adapters: AdapterStatus, gpu: int = 20, host: int = 0) -> ReplicaReport:
    return report(name, gpu=gpu, host=host, adapters=adapters)


def prefetches_of(
    prefetcher: Prefetcher, reports: Iterable[ReplicaReport], now_s: float, plan=None
):
    decided = prefetcher.decide(list(reports), plan or {}, now_s, spares=False)
    return dict(decided.prefetches)


def test_a_prefetch_is_sent_again_only_if_it_was_never_loaded():
    prefetcher = Prefetcher()
    reports = [replica("p", adapter(A))]
    assert prefetches_of(prefetcher, reports, 0.0) == {"p": (PrefetchTarget(A, GPU, 3.0),)}
    assert prefetches_of(prefetcher, reports, 3.0) == {}
    assert prefetches_of(prefetcher, reports, 29.0) == {}
    assert prefetches_of(prefetcher, reports, 31.0) == {"p": (PrefetchTarget(A, GPU, 3.0),)}
    assert prefetches_of(prefetcher, [replica("p", adapter(A, GPU))], 90.0) == {}


def test_adapters_being_loaded_take_their_bytes():
    prefetcher = Prefetcher()
    assert prefetches_of(prefetcher, [replica("p", adapter(A), gpu=10)], 0.0)
    assert (
        prefetches_of(prefetcher, [replica("p", adapter(A), adapter(B, uses=5.0), gpu=10)], 3.0)
        == {}
    )


def test_adapters_of_a_lost_replica_come_to_another():
    prefetcher = Prefetcher()
    both = [replica("p", adapter(A, GPU, uses=9.0)), replica("q")]
    assert prefetches_of(prefetcher, both, 0.0) == {}
    (bring,) = prefetches_of(prefetcher, both[1:], HALF_LIFE_S)["q"]
    assert bring == PrefetchTarget(A, GPU, 4.5)


def test_pins_take_their_bytes_before_they_are_loaded():
    prefetcher = Prefetcher()
    reports = [replica("p", adapter(A), adapter(B), gpu=20)]
    plan = {"p": {A.digest: PinTarget(A, GPU)}}
    assert prefetches_of(prefetcher, reports, 0.0, plan) == {"p": (PrefetchTarget(B, GPU, 3.0),)}
    small = [replica("p", adapter(A), adapter(B), gpu=10)]
    assert prefetches_of(Prefetcher(), small, 0.0, plan) == {}


def test_spares_are_planned_and_sole_copies_reported():
    prefetcher = Prefetcher()
    reports = [replica("p", adapter(A, GPU), host=10), replica("q", host=10)]
    decided = prefetcher.decide(reports, {}, 0.0, spares=True)
    assert decided.prefetches == {"q": (PrefetchTarget(A, HOST, 1.5),)}
    assert decided.sole_copies == {"p": 1, "q": 0}
    arrived = [reports[0], replica("q", adapter(A, HOST), host=10)]
    assert prefetcher.decide(arrived, {}, 3.0, spares=True).sole_copies == {"p": 0, "q": 0}


def test_a_host_has_room_for_a_part_for_each_gpu_that_shares_an_adapter():
    def bring(room: int) -> PrefetchList:
        shared = report("q", gpu=0, host=room, tensor_parallel=2)
        return Prefetcher().decide([replica("p", adapter(A, GPU)), shared], {}, 0.0, spares=True)

    assert bring(20).prefetches == {"q": (PrefetchTarget(A, HOST, 1.5),)}
    assert bring(19).prefetches == {}


class Engine:
    """GPU of a replica with the engines' own eviction, without durations."""

    def __init__(self, name: str, room: int) -> None:
        self.name, self._room = name, room
        self._scores: dict[str, float] = {}
        self._uses, self._policy = RecentUses(), LeastUsedForItsSize()
        self._seen: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._scores

    def use(self, name: str, now_s: float) -> None:
        self._uses.add(name, now_s)
        self._seen.add(name)
        if name not in self and len(self._scores) == self._room:
            del self._scores[min(self._scores, key=self._scores.__getitem__)]
        self._scores[name] = self._policy.score(
            UsageRecord(10, self._uses.count(name, now_s), now_s)
        )

    def report(self, now_s: float) -> ReplicaReport:
        adapters = (
            adapter(ref(name), GPU if name in self else DISK, self._uses.count(name, now_s))
            for name in self._seen
        )
        return replica(self.name, *adapters, gpu=10 * self._room)


def test_a_fleet_at_work_gets_hardly_any_prefetches():
    rng = random.Random(7)
    names = [f"a{n}" for n in range(200)]
    weights = [1 / (n + 1) for n in range(200)]
    engines = [Engine(name, 20) for name in "pqrs"]
    prefetcher = Prefetcher()
    loads = ordered = 0
    for second in range(900):
        for name in rng.choices(names, weights, k=20):
            having = [engine for engine in engines if name in engine]
            engine = rng.choice(having or engines)
            engine.use(name, float(second))
            loads += second >= 300 and not having
        if second % 3 == 0:
            reports = [engine.report(float(second)) for engine in engines]
            some = prefetches_of(prefetcher, reports, float(second))
            ordered += sum(map(len, some.values())) if second >= 300 else 0
    assert loads > 1000
    assert ordered < 0.05 * loads
