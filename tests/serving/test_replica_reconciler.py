"""Decisions that the controller sends to replicas: changes, until they are confirmed."""

import asyncio
from collections.abc import Mapping

import pytest

from lorikeet.placement.learned_prompts import Found, SharedPrefix
from lorikeet.protocol.placement_decision import (
    LearnedPrompt,
    PinTarget,
    PlacementDecision,
    PrefetchTarget,
)
from lorikeet.serving import replica_reconciler as deployment_module
from lorikeet.serving.replica_reconciler import ReplicaReconciler, RespondingReplicas
from lorikeet.settings import Settings
from lorikeet_engine.adapter import Residency
from tests.placement.builders import held, ref, report

A, B = ref("a"), ref("b")
KEEP_A = {A.digest: PinTarget(A, Residency.GPU)}


class Replicas:
    """Fake replicas of a handle: all receive broadcasts, except the deaf."""

    def __init__(self, *names: str) -> None:
        self.reports = {name: report(name) for name in names}
        self.stats: dict[str, float] = {}
        self.deaf: set[str] = set()
        self.prefixes: Found = {}
        self.received: list[tuple[str, PlacementDecision]] = []

    async def broadcast(self, _handle: object, method: str, *arguments: object) -> list[object]:
        there = [name for name in self.reports if name not in self.deaf]
        if method == "report":
            return [self.reports[name] for name in there]
        if method == "take_prefixes":
            return [self.prefixes] * len(there)
        if method == "record_autoscaling_stats":
            return [self.stats] * len(there)
        (plan,) = arguments
        assert isinstance(plan, Mapping)
        self.received += [(name, plan[name]) for name in there if name in plan]
        return [name if name in plan else None for name in there]

    def take(self) -> list[tuple[str, PlacementDecision]]:
        received, self.received = self.received, []
        return received


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> Replicas:
    replicas = Replicas("p", "q")
    monkeypatch.setattr(deployment_module, "broadcast", replicas.broadcast)
    return replicas


def deployment_of(**given: str) -> ReplicaReconciler:
    settings = Settings.from_env(given)
    return ReplicaReconciler(None, settings, "lorikeet-demo")  # type: ignore[arg-type]


def tick(
    reconciler: ReplicaReconciler,
    now_s: float,
    keeps: Mapping[str, PinTarget] = {},
    survey: bool = True,
) -> None:
    """Run one tick of the controller with pins `keeps` on replica p."""
    if survey:
        asyncio.run(reconciler.survey())
    plan = {each.replica: keeps if each.replica == "p" else {} for each in reconciler.reports}
    reconciler.decide(plan, now_s, surveyed=survey)
    asyncio.run(reconciler.send(now_s))


def test_a_decision_is_sent_once_and_again_only_when_it_changes(replicas: Replicas):
    reconciler = deployment_of()
    tick(reconciler, 0.0)
    assert replicas.take() == [("p", PlacementDecision()), ("q", PlacementDecision())]
    tick(reconciler, 3.0)
    assert replicas.take() == []
    tick(reconciler, 4.0, KEEP_A, survey=False)
    assert replicas.take() == [("p", PlacementDecision(KEEP_A))]
    tick(reconciler, 5.0, KEEP_A, survey=False)
    assert replicas.take() == []


def test_an_unconfirmed_decision_is_sent_again_and_a_new_replica_gets_its_own_at_once(
    replicas: Replicas,
):
    reconciler = deployment_of()
    tick(reconciler, 0.0)
    replicas.take()
    replicas.deaf = {"p"}
    tick(reconciler, 1.0, KEEP_A, survey=False)
    assert replicas.take() == []
    replicas.deaf = set()
    replicas.reports["new"] = report("new")
    tick(reconciler, 3.0, KEEP_A)
    assert replicas.take() == [("p", PlacementDecision(KEEP_A)), ("new", PlacementDecision())]


def test_a_confirmed_decision_is_sent_again_after_a_while(replicas: Replicas):
    reconciler = deployment_of()
    for now_s in range(0, 90, 3):
        tick(reconciler, float(now_s))
    assert len(replicas.take()) == 2 * 3


def test_prompts_that_replicas_have_learned_are_sent_to_those_with_the_adapter(
    replicas: Replicas,
):
    replicas.prefixes = {("acme", "a"): [SharedPrefix(b"tokens", 20.0, 0.0)]}
    for name in ("p", "q"):
        tier = Residency.GPU if name == "p" else Residency.HOST
        replicas.reports[name] = report(name, adapters=(held(A, tier, 10),))
    tick(deployment_of(), 0.0)
    assert [decision.learned for _, decision in replicas.take()] == [(), ()], "not without asking"
    learning = deployment_of(LORIKEET_LEARNED_PROMPTS="8")
    tick(learning, 0.0)
    assert learning.replicas.learned == 1
    assert [decision.learned for _, decision in replicas.take()] == [
        (LearnedPrompt(A, b"tokens"),),
        (),
    ]


def test_prefetches_are_sent_once(replicas: Replicas):
    wanted = held(A, Residency.DISK, 10, 3.0)
    replicas.reports["p"] = report("p", gpu=20, adapters=(wanted,))
    reconciler = deployment_of()
    tick(reconciler, 0.0)
    tick(reconciler, 3.0)
    assert replicas.take() == [
        ("p", PlacementDecision(prefetches=(PrefetchTarget(A, Residency.GPU, 3.0),))),
        ("q", PlacementDecision()),
    ]


def test_while_the_fleet_may_shrink_second_copies_are_prefetched_and_sole_copies_counted(
    replicas: Replicas,
):
    used = held(A, Residency.GPU, 10, 3.0)
    replicas.reports["p"] = report("p", adapters=(used,))
    replicas.stats = dict.fromkeys(
        ["working_bytes", "oldest_wait_s", "running_share", "kv_share"], 0.0
    )
    replicas.stats["arena_bytes"] = 100
    tick(deployment_of(), 0.0)
    assert replicas.take() == [("p", PlacementDecision()), ("q", PlacementDecision())]
    scaling = {"LORIKEET_REPLICAS": "1", "LORIKEET_MAX_REPLICAS": "4"}
    tick(deployment_of(**scaling), 0.0)
    spare = (PrefetchTarget(A, Residency.HOST, 1.5),)
    assert replicas.take() == [
        ("p", PlacementDecision(sole_copies=1)),
        ("q", PlacementDecision(sole_copies=0, prefetches=spare)),
    ]
    replicas.stats["running_share"] = 0.7
    tick(deployment_of(**scaling), 0.0)
    assert replicas.take() == [("p", PlacementDecision()), ("q", PlacementDecision())]


def test_a_replica_counts_as_alive_until_its_silence_exceeds_the_timeout() -> None:
    now_s = [0.0]
    responding = RespondingReplicas(5.0, lambda: now_s[0])
    assert responding.update([report("r1"), report("r0")]) == [report("r0"), report("r1")]
    now_s[0] = 5.0
    assert responding.update([report("r1", gpu=7)]) == [report("r0"), report("r1", gpu=7)]
    now_s[0] = 6.0
    assert responding.update([]) == [report("r1", gpu=7)]
    assert responding.update([report("r0")]) == [report("r0"), report("r1", gpu=7)]
