"""What a replica tells gateways: plain and quickly pickled."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lorikeet_engine.adapter import Residency
from lorikeet_engine.costs import LoadCosts, StepCosts
from lorikeet_engine.news import EngineLoad


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """What steps and loads take on one replica, as its engine measured."""

    steps: StepCosts = field(default_factory=StepCosts)
    loads: LoadCosts = field(default_factory=LoadCosts)


@dataclass(frozen=True, slots=True)
class ReplicaNews:
    """A replica's load as it speaks, and what has moved since it spoke to this listener before.

    seq: grows with every word of a replica to whomever, so that what came late is known to be old.
    moved: where adapters are now, by digest. Between a message that begins and one that ends the
    whole of what it holds, each adapter nearer than remote is named at least once. costs: None
    where they are not said again.
    """

    seq: int
    load: EngineLoad
    moved: Mapping[str, Residency] = field(default_factory=dict)
    begins_whole: bool = False
    ends_whole: bool = False
    costs: MeasuredCosts | None = None


def to_stats(news: ReplicaNews) -> dict[str, Any]:
    """Its load and costs in plain values: Serve's own processes carry them, knowing no classes."""
    costs = asdict(news.costs) if news.costs else {}
    return {"seq": news.seq, "load": asdict(news.load), **costs}


def from_stats(stats: Mapping[str, Any]) -> ReplicaNews | None:
    """What to_stats was given; None of a replica that has said nothing yet."""
    if "seq" not in stats:
        return None
    costs = None
    if "steps" in stats:
        costs = MeasuredCosts(StepCosts(**stats["steps"]), LoadCosts(**stats["loads"]))
    return ReplicaNews(stats["seq"], EngineLoad(**stats["load"]), costs=costs)
