"""The autoscaling policy that Ray Serve calls: placement's scaling on replicas' pressure.

Serve asks each replica for `record_autoscaling_stats`, a dict of numbers, every PUSH_S, and calls
the policy some ten times a second in its own controller's process.
"""

import logging
from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from lorikeet.placement.pressure import ReplicaPressure, from_stats
from lorikeet.placement.scaling import ScalingDelays, ScalingState, scale

log = logging.getLogger("ray.serve")  # the policy runs in a process where only Serve logs

PUSH_S = 2.0
# A replica without stats for so long does not count.
_STALE_S = 15.0


def autoscaling(min_replicas: int, max_replicas: int, **delays: float) -> AutoscalingConfig:
    """Serve's autoscaling configuration with our policy; delays: as for ScalingDelays."""
    return AutoscalingConfig(
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        policy=AutoscalingPolicy(  # type: ignore[no-untyped-call]
            policy_function=f"{__name__}:PressureScalingPolicy", policy_kwargs=delays
        ),
        # Our function knows its own delays. Serve's own name for the pushes' interval in the
        # environment does nothing in 2.60, this deprecated field does.
        upscale_delay_s=0,
        downscale_delay_s=0,
        metrics_interval_s=PUSH_S,
    )


class PressureScalingPolicy:
    """Calls `scale` with what Serve knows of a deployment."""

    def __init__(self, **delays: float) -> None:
        self._delays = ScalingDelays(**delays)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """How many replicas there should be, and the state for the next call."""
        now_s = context.current_time or 0.0
        decision = scale(
            _recent_pressures(context.raw_metrics or {}, now_s),
            running=context.current_num_replicas,
            target=context.target_num_replicas,
            min_replicas=context.capacity_adjusted_min_replicas,
            max_replicas=context.capacity_adjusted_max_replicas,
            state=ScalingState(**context.policy_state.get("pressure", {})),
            now_s=now_s,
            delays=self._delays,
        )
        if decision.replicas != context.target_num_replicas:
            log.info(
                f"{context.deployment_name}: {context.target_num_replicas} → {decision.replicas} "
                f"replicas, because {decision.reason}"
            )
        return decision.replicas, {"pressure": decision.state._asdict()}


def _recent_pressures(
    metrics: Mapping[str, Mapping[Any, Any]], now_s: float
) -> list[ReplicaPressure]:
    """The pressure on each replica with recent stats. metrics: by name, then replica."""
    pressures = []
    for replica, series in metrics.get("arena_bytes", {}).items():
        at_s = series[-1].timestamp if series else 0.0
        if now_s - at_s <= _STALE_S:
            last = {name: of[replica][-1] for name, of in metrics.items() if of.get(replica)}
            known = {name: each.value for name, each in last.items() if each.timestamp == at_s}
            pressures.append(from_stats(known))
    return [each for each in pressures if each is not None]
