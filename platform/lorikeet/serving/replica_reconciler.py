"""Reconciliation of one base model's replicas with the controller's plan."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from ray.serve.handle import DeploymentHandle

from lorikeet.metrics.controller import ReplicaCount
from lorikeet.placement.learned_prompts import LearnedPrompts
from lorikeet.placement.pin_placement import PinTargets
from lorikeet.placement.prefetcher import Prefetcher
from lorikeet.placement.pressure import from_stats
from lorikeet.placement.scaling import could_shrink
from lorikeet.protocol.placement_decision import PlacementDecision, PrefetchTarget
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet.serving.replica_calls import broadcast
from lorikeet.settings import Settings

log = logging.getLogger(__name__)

_SILENCE_S = 8.0
"""Seconds without a report until a replica counts as gone."""
_LEARN_S = 60.0
"""Seconds between two collections of the beginnings that replicas' prompts share."""
_RESEND_S = 30.0
"""Seconds after which an unchanged decision is repeated although its replica confirmed it."""


class ReplicaReconciler:
    """Reconciler that collects the replicas' reports, and sends each replica the decision which
    adapters it pins and prefetches, until the replica confirms it.

    `survey` and `send` run on the event loop, `decide` on any thread; only one of them at a time.
    """

    def __init__(self, engine: DeploymentHandle[Any], settings: Settings, base_model: str) -> None:
        self.base_model = base_model
        self.reports: list[ReplicaReport] = []
        self._engine = engine
        self._min_replicas = settings.replicas[base_model]
        self._is_autoscaled = settings.most_replicas(base_model) > self._min_replicas
        self._responding = RespondingReplicas(_SILENCE_S)
        self._prefetcher = Prefetcher()
        self._learns = settings.learned_prompts > 0
        self._learned, self._learn_due_s = LearnedPrompts(settings.learned_prompts), 0.0
        self._may_shrink = False
        self._sole_copies: Mapping[str, float] = {}
        self._decisions: dict[str, PlacementDecision] = {}
        self._confirmed: dict[str, tuple[PlacementDecision, float]] = {}

    @property
    def replicas(self) -> ReplicaCount:
        """Minimum number of replicas, number of those that report, and number of prompts that they
        have learned.
        """
        learned = sum(len(each.learned) for each in self._decisions.values())
        return ReplicaCount(self._min_replicas, len(self.reports), learned)

    async def survey(self) -> None:
        """Collect the replicas' reports; note for `decide` whether the fleet may soon shrink.

        It may if it is autoscaled, has more than its minimum of replicas, and their load allows it.
        Once a minute, collect also what the prompts of the replicas' adapters begin with.
        """
        self.reports = self._responding.update(await broadcast(self._engine, "report"))
        if self._learns and (now_s := time.monotonic()) >= self._learn_due_s:
            self._learn_due_s = now_s + _LEARN_S
            for found in await broadcast(self._engine, "take_prefixes"):
                self._learned.add(found, now_s)
        self._may_shrink = False
        if self._is_autoscaled and len(self.reports) > self._min_replicas:
            stats = await broadcast(self._engine, "record_autoscaling_stats")
            pressures = [each for one in stats if (each := from_stats(one)) is not None]
            self._may_shrink = len(pressures) == len(self.reports) and could_shrink(pressures)

    def decide(self, targets: PinTargets, now_s: float, *, surveyed: bool) -> None:
        """Compute the decision for each replica: its pinned adapters, and after a survey its
        prefetches.

        targets: adapters that pins require, by replica.
        now_s: current time, same clock as in `send`.
        surveyed: whether a survey has renewed the reports since the last call; without one, no
            prefetch is planned.
        """
        prefetches: Mapping[str, tuple[PrefetchTarget, ...]] = {}
        if surveyed:
            listed = self._prefetcher.decide(self.reports, targets, now_s, spares=self._may_shrink)
            prefetches = listed.prefetches
            self._sole_copies = listed.sole_copies if self._may_shrink else {}
        if prefetches:
            adapters = sum(map(len, prefetches.values()))
            log.info("prefetches_sent", extra={"adapters": adapters})
        learned = self._learned.wanted(self.reports, time.monotonic()) if self._learns else {}
        self._decisions = {
            name: PlacementDecision(
                targets[name],
                self._sole_copies.get(name),
                prefetches.get(name, ()),
                learned.get(name, ()),
            )
            for name in (report.replica for report in self.reports)
        }

    async def send(self, now_s: float) -> None:
        """Send the placement decisions that are due, each to the replica it was made for.
        A decision is due until its replica has confirmed it, and then every _RESEND_S seconds.
        Prefetches are sent once, even if the replica does not confirm them.
        """
        due = {name: each for name, each in self._decisions.items() if self._is_due(name, now_s)}
        for name, decision in self._decisions.items():
            self._decisions[name] = replace(decision, prefetches=())
        if due:
            confirmed = await broadcast(self._engine, "apply_plan", due)
            self._confirmed |= {
                name: (self._decisions[name], now_s) for name in confirmed if name in due
            }
        self._confirmed = {
            name: sent for name, sent in self._confirmed.items() if name in self._decisions
        }

    def _is_due(self, name: str, now_s: float) -> bool:
        if name not in self._confirmed:
            return True
        decision, sent_s = self._confirmed[name]
        return self._decisions[name] != decision or now_s - sent_s >= _RESEND_S


class RespondingReplicas:
    """Last report of each replica that has reported within the last `timeout_s` seconds.

    The timeout spans several rounds of reports, so that one late report does not move a replica's
    pins to other replicas and back.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._last: dict[str, tuple[float, ReplicaReport]] = {}

    def update(self, reports: Iterable[ReplicaReport]) -> list[ReplicaReport]:
        """Add new reports; return the last report of each live replica, sorted by replica."""
        now_s = self._clock()
        self._last.update((report.replica, (now_s, report)) for report in reports)
        for replica, (reported_s, _) in list(self._last.items()):
            if now_s - reported_s > self._timeout_s:
                del self._last[replica]
        return [self._last[replica][1] for replica in sorted(self._last)]
