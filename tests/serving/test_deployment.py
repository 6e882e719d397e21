"""What the controller tells replicas: what changed, until they have it, and no more than that."""

import asyncio
from collections.abc import Mapping

import pytest

from lorikeet.protocol.placement_decision import PinTarget, PlacementDecision, PrefetchTarget
from lorikeet.serving import replica_reconciler as deployment_module
from lorikeet.serving.replica_reconciler import EngineDeployment
from lorikeet.settings import Settings
from lorikeet_engine.adapter import Residency
from tests.placement.given import held, ref, report

A, B = ref("a"), ref("b")
KEEP_A = {A.digest: PinTarget(A, Residency.GPU)}


class Replicas:
    """Stand behind the handle: all hear what is broadcast but those who are deaf."""

    def __init__(self, *names: str) -> None:
        self.reports = {name: report(name) for name in names}
        self.stats: dict[str, float] = {}
        self.deaf: set[str] = set()
        self.heard: list[tuple[str, PlacementDecision]] = []

    async def broadcast(self, _handle: object, method: str, *arguments: object) -> list[object]:
        there = [name for name in self.reports if name not in self.deaf]
        if method == "report":
            return [self.reports[name] for name in there]
        if method == "record_autoscaling_stats":
            return [self.stats] * len(there)
        (plan,) = arguments
        assert isinstance(plan, Mapping)
        self.heard += [(name, plan[name]) for name in there if name in plan]
        return [name if name in plan else None for name in there]

    def take(self) -> list[tuple[str, PlacementDecision]]:
        heard, self.heard = self.heard, []
        return heard


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> Replicas:
    replicas = Replicas("p", "q")
    monkeypatch.setattr(deployment_module, "broadcast", replicas.broadcast)
    return replicas


def deployment_of(**given: str) -> EngineDeployment:
    settings = Settings.from_env(given)
    return EngineDeployment(None, settings, "lorikeet-demo")  # type: ignore[arg-type]


def tick(
    deployment: EngineDeployment,
    now_s: float,
    keeps: Mapping[str, PinTarget] = {},
    survey: bool = True,
) -> None:
    """`keeps` on p; nothing is pinned elsewhere."""
    if survey:
        asyncio.run(deployment.survey())
    plan = {each.replica: keeps if each.replica == "p" else {} for each in deployment.reports}
    deployment.decide(plan, now_s, surveyed=survey)
    asyncio.run(deployment.tell(now_s))


def test_every_replica_is_told_once_and_then_only_what_changed(replicas: Replicas):
    deployment = deployment_of()
    tick(deployment, 0.0)
    assert replicas.take() == [("p", PlacementDecision()), ("q", PlacementDecision())]
    tick(deployment, 3.0)
    assert replicas.take() == []
    tick(deployment, 4.0, KEEP_A, survey=False)
    assert replicas.take() == [("p", PlacementDecision(KEEP_A))]
    tick(deployment, 5.0, KEEP_A, survey=False)
    assert replicas.take() == []


def test_who_did_not_hear_is_told_again_and_a_newcomer_at_once(replicas: Replicas):
    deployment = deployment_of()
    tick(deployment, 0.0)
    replicas.take()
    replicas.deaf = {"p"}
    tick(deployment, 1.0, KEEP_A, survey=False)
    assert replicas.take() == []
    replicas.deaf = set()
    replicas.reports["new"] = report("new")
    tick(deployment, 3.0, KEEP_A)
    assert replicas.take() == [("p", PlacementDecision(KEEP_A)), ("new", PlacementDecision())]


def test_every_so_often_all_are_told_though_nothing_changed(replicas: Replicas):
    deployment = deployment_of()
    for now_s in range(0, 90, 3):
        tick(deployment, float(now_s))
    assert len(replicas.take()) == 2 * 3


def test_what_should_come_nearer_is_told_once(replicas: Replicas):
    wanted = held(A, Residency.DISK, 10, 3.0)
    replicas.reports["p"] = report("p", gpu=20, adapters=(wanted,))
    deployment = deployment_of()
    tick(deployment, 0.0)
    tick(deployment, 3.0)
    assert replicas.take() == [
        ("p", PlacementDecision(prefetches=(PrefetchTarget(A, Residency.GPU, 3.0),))),
        ("q", PlacementDecision()),
    ]


def test_while_one_replica_could_go_spares_are_brought_and_counted(replicas: Replicas):
    used = held(A, Residency.GPU, 10, 3.0)
    replicas.reports["p"] = report("p", adapters=(used,))
    replicas.stats = dict.fromkeys(["working_bytes", "oldest_wait_s", "seats", "kv"], 0.0)
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
    replicas.stats["seats"] = 0.7
    tick(deployment_of(**scaling), 0.0)
    assert replicas.take() == [("p", PlacementDecision()), ("q", PlacementDecision())]
