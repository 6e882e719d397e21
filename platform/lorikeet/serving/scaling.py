"""Scaling for Ray Serve: our function as its autoscaling policy, and the numbers it is fed with.

Serve asks each replica for `record_autoscaling_stats`, a dict of numbers, every PUSH_S, and calls
the policy some ten times a second in its own controller's process.
"""

import logging
from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from lorikeet.placement.scaling import Pace, Signals, Since, scale
from lorikeet_engine.news import EngineLoad
from lorikeet_engine.request import EngineReport

log = logging.getLogger("ray.serve")  # the policy runs in a process where only Serve logs

PUSH_S = 2.0
# A replica that was not heard of for so long is not reckoned with.
_STALE_S = 15.0
# Uses from which an adapter belongs to the working set: more than one of late.
_IN_USE = 1.0


def autoscaling(least: int, most: int, **pace: float) -> AutoscalingConfig:
    """From `least` to `most` replicas, as the pressure on them asks for. pace: as Pace takes it."""
    return AutoscalingConfig(
        min_replicas=least,
        max_replicas=most,
        policy=AutoscalingPolicy(  # type: ignore[no-untyped-call]
            policy_function=f"{__name__}:Policy", policy_kwargs=pace
        ),
        # Our function knows its own delays. Serve's own name for the pushes' interval in the
        # environment does nothing in 2.60, this deprecated field does.
        upscale_delay_s=0,
        downscale_delay_s=0,
        metrics_interval_s=PUSH_S,
    )


class Policy:
    """Serve's view of `scale`."""

    def __init__(self, **pace: float) -> None:
        self._pace = Pace(**pace)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """How many replicas there should be, and the state to be called with next time."""
        now_s = context.current_time or 0.0
        verdict = scale(
            _heard(context.raw_metrics or {}, now_s),
            running=context.current_num_replicas,
            target=context.target_num_replicas,
            least=context.capacity_adjusted_min_replicas,
            most=context.capacity_adjusted_max_replicas,
            since=Since(**context.policy_state.get("since", {})),
            now_s=now_s,
            pace=self._pace,
        )
        if verdict.replicas != context.target_num_replicas:
            log.info(
                f"{context.deployment_name}: {context.target_num_replicas} → {verdict.replicas} "
                f"replicas, because {verdict.reason}"
            )
        return verdict.replicas, {"since": verdict.since._asdict()}


def stats_of(
    report: EngineReport, load: EngineLoad, max_running: int, alone: int | None
) -> dict[str, float]:
    """A replica's Signals, as the numbers that Serve takes."""
    used = (
        adapter.image_bytes
        for adapter in report.adapters
        if adapter.uses >= _IN_USE or (adapter.pinned and adapter.gpu_bytes)
    )
    stats = {
        "working_bytes": sum(used),
        "arena_bytes": report.arena_bytes_total,
        "oldest_wait_s": load.oldest_wait_s,
        "seats": (load.running + load.waiting) / max_running,
        "kv": load.kv_used,
    }
    return stats if alone is None else {**stats, "alone": alone}


def signals_of(stats: Mapping[str, float]) -> Signals:
    """What a replica's numbers say; Serve adds some of its own."""
    return Signals(**{name: stats[name] for name in Signals.__dataclass_fields__ if name in stats})


def _heard(metrics: Mapping[str, Mapping[Any, Any]], now_s: float) -> list[Signals]:
    """The last numbers of each replica that was heard of lately. metrics: by name, then replica."""
    heard = []
    for replica, series in metrics.get("arena_bytes", {}).items():
        at_s = series[-1].timestamp if series else 0.0
        if now_s - at_s <= _STALE_S:
            last = {name: of[replica][-1] for name, of in metrics.items() if of.get(replica)}
            known = {name: each.value for name, each in last.items() if each.timestamp == at_s}
            heard.append(signals_of(known))
    return heard
