"""The replicas of one base model, as the controller asks and tells them."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from ray.serve.handle import DeploymentHandle

from lorikeet.metrics.controller import Replicas
from lorikeet.placement.plan import Plan
from lorikeet.placement.prefetching import Prefetching
from lorikeet.placement.pressure import from_stats
from lorikeet.placement.scaling import could_shrink
from lorikeet.protocol.placement_decision import PlacementDecision, PrefetchTarget
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet.serving.replica_calls import broadcast
from lorikeet.settings import Settings

log = logging.getLogger(__name__)

_PATIENCE_S = 8.0  # a replica that is silent for longer has gone
_RETELL_S = 30.0  # even what a replica has said that it got


class EngineDeployment:
    """Asks replicas what they hold, and tells each what was decided for it until it has it.

    survey and tell belong to the event loop, decide to any thread, one at a time.
    """

    def __init__(self, engine: DeploymentHandle[Any], settings: Settings, base_model: str) -> None:
        self.base_model = base_model
        self.reports: list[ReplicaReport] = []
        self._engine = engine
        self._least = settings.replicas[base_model]
        self._scales = settings.most_replicas(base_model) > self._least
        self._liveness = Liveness(_PATIENCE_S)
        self._prefetching = Prefetching()
        self._spares = False
        self._sole_copies: Mapping[str, float] = {}
        self._decisions: dict[str, PlacementDecision] = {}
        self._told: dict[str, tuple[PlacementDecision, float]] = {}

    @property
    def replicas(self) -> Replicas:
        """How many there are."""
        return Replicas(self._least, len(self.reports))

    async def survey(self) -> None:
        """Ask all replicas what they hold, and how hard they work if that matters."""
        self.reports = self._liveness.answered(await broadcast(self._engine, "report"))
        self._spares = False
        if self._scales and len(self.reports) > self._least:
            stats = await broadcast(self._engine, "record_autoscaling_stats")
            signals = [each for one in stats if (each := from_stats(one)) is not None]
            self._spares = len(signals) == len(self.reports) and could_shrink(signals)

    def decide(self, plan: Plan, now_s: float, *, surveyed: bool) -> None:
        """What each replica should hold: pins, and after a survey what should come nearer."""
        prefetches: Mapping[str, tuple[PrefetchTarget, ...]] = {}
        if surveyed:
            listed = self._prefetching.decide(self.reports, plan, now_s, spares=self._spares)
            prefetches = listed.prefetches
            self._sole_copies = listed.sole_copies if self._spares else {}
        if prefetches:
            adapters = sum(map(len, prefetches.values()))
            log.info("prefetches_ordered", extra={"adapters": adapters})
        self._decisions = {
            name: PlacementDecision(
                plan[name], self._sole_copies.get(name), prefetches.get(name, ())
            )
            for name in (report.replica for report in self.reports)
        }

    async def tell(self, now_s: float) -> None:
        """Tell replicas what was decided: what is new to them, or was told long ago.

        What should come nearer is told once, as far as they listen.
        """
        due = {name: each for name, each in self._decisions.items() if self._is_due(name, now_s)}
        for name, decision in self._decisions.items():
            self._decisions[name] = replace(decision, prefetches=())
        if due:
            heard = await broadcast(self._engine, "apply_plan", due)
            self._told |= {name: (self._decisions[name], now_s) for name in heard if name in due}
        self._told = {name: told for name, told in self._told.items() if name in self._decisions}

    def _is_due(self, name: str, now_s: float) -> bool:
        if name not in self._told:
            return True
        decision, told_s = self._told[name]
        return self._decisions[name] != decision or now_s - told_s >= _RETELL_S


class Liveness:
    """The last report of every replica that answered within `patience_s`.

    Without patience, one late answer would move a replica's pins to others and back again.
    """

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._last: dict[str, tuple[float, ReplicaReport]] = {}

    def answered(self, reports: Iterable[ReplicaReport]) -> list[ReplicaReport]:
        """Take these answers in; the reports of all who count as there, by name."""
        now_s = self._clock()
        self._last.update((report.replica, (now_s, report)) for report in reports)
        for replica, (heard_s, _) in list(self._last.items()):
            if now_s - heard_s > self._patience_s:
                del self._last[replica]
        return [self._last[replica][1] for replica in sorted(self._last)]
