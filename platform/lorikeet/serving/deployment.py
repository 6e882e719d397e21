"""The replicas of one base model, as the controller asks and tells them."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray.serve.handle import DeploymentHandle

from lorikeet.metrics.controller import Replicas
from lorikeet.placement.orders import Orders
from lorikeet.placement.plan import Keep, Plan
from lorikeet.placement.prefetching import Prefetching
from lorikeet.placement.report import ReplicaReport
from lorikeet.placement.roll_call import RollCall
from lorikeet.placement.scaling import could_shrink
from lorikeet.placement.signals import from_stats
from lorikeet.serving.handles import broadcast
from lorikeet.settings import Settings

log = logging.getLogger(__name__)

_PATIENCE_S = 8.0  # a replica that is silent for longer has gone
_RETELL_S = 30.0  # even what a replica has said that it got


class EngineDeployment:
    """Asks replicas what they hold, and tells each what has changed in its orders until it has it.

    survey and tell belong to the event loop, keep and prefetch to any thread, one at a time.
    """

    def __init__(self, engine: DeploymentHandle[Any], settings: Settings, base_model: str) -> None:
        self.base_model = base_model
        self.reports: list[ReplicaReport] = []
        self._engine = engine
        self._least = settings.replicas[base_model]
        self._scales = settings.most_replicas(base_model) > self._least
        self._roll_call = RollCall(_PATIENCE_S)
        self._prefetching = Prefetching()
        self._spares = False
        self._orders: dict[str, Orders] = {}
        self._told: dict[str, tuple[Orders, float]] = {}

    @property
    def replicas(self) -> Replicas:
        """How many there are."""
        return Replicas(self._least, len(self.reports))

    async def survey(self) -> None:
        """Ask all replicas what they hold, and how hard they work if that matters."""
        self.reports = self._roll_call.answered(await broadcast(self._engine, "report"))
        self._spares = False
        if self._scales and len(self.reports) > self._least:
            stats = await broadcast(self._engine, "record_autoscaling_stats")
            signals = [each for one in stats if (each := from_stats(one)) is not None]
            self._spares = len(signals) == len(self.reports) and could_shrink(signals)

    def keep(self, plan: Plan) -> None:
        """What pins keep where."""
        keeps: dict[str, Mapping[str, Keep]] = {r.replica: plan[r.replica] for r in self.reports}
        self._orders = {
            name: replace(self._orders.get(name, Orders()), keeps=each)
            for name, each in keeps.items()
        }

    def prefetch(self, now_s: float) -> None:
        """What should come nearer, by demand."""
        plan = {name: orders.keeps for name, orders in self._orders.items()}
        wishes = self._prefetching.wishes(self.reports, plan, now_s, spares=self._spares)
        for name, orders in self._orders.items():
            alone = wishes.alone[name] if self._spares else None
            self._orders[name] = replace(orders, brings=wishes.brings.get(name, ()), alone=alone)
        if wishes.brings:
            adapters = sum(map(len, wishes.brings.values()))
            log.info("prefetches_ordered", extra={"adapters": adapters})

    async def tell(self, now_s: float) -> None:
        """Tell replicas their orders: those that are new to them, or were told long ago.

        What should come nearer is told once, as far as they listen.
        """
        news = {name: orders for name, orders in self._orders.items() if self._is_due(name, now_s)}
        for name, orders in self._orders.items():
            self._orders[name] = replace(orders, brings=())
        if news:
            heard = await broadcast(self._engine, "apply_plan", news)
            self._told |= {name: (self._orders[name], now_s) for name in heard if name in news}
        self._told = {name: told for name, told in self._told.items() if name in self._orders}

    def _is_due(self, name: str, now_s: float) -> bool:
        orders, told_s = self._told.get(name, (None, 0.0))
        return self._orders[name] != orders or now_s - told_s >= _RETELL_S
