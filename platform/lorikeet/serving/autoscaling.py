"""Autoscaling policy for Ray Serve: `placement.scaling.scale` on the pressure that replicas report.

Serve calls each replica's `record_autoscaling_stats`, which returns a dict of numbers, every PUSH_S
seconds. Serve calls the policy about ten times a second, in the process of Serve's own controller.
"""

import logging
from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from lorikeet.placement.pressure import ReplicaPressure, from_stats
from lorikeet.placement.scaling import ScalingDelays, ScalingState, scale

log = logging.getLogger("ray.serve")  # only Serve's logger is configured in Serve's controller

PUSH_S = 2.0
"""Seconds between two reports of a replica's stats."""
_STALE_S = 15.0
"""Age in seconds beyond which a replica's last stats are ignored."""


def autoscaling(min_replicas: int, max_replicas: int, **delays: float) -> AutoscalingConfig:
    """Return Serve's autoscaling configuration with PressureScalingPolicy.

    min_replicas, max_replicas: limits on the number of replicas.
    delays: fields of ScalingDelays, in seconds: upscale_s and downscale_s before scaling up or
        down, and sole_copies_s, the longest further wait for second copies of adapters in use.
    """
    return AutoscalingConfig(
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        policy=AutoscalingPolicy(  # type: ignore[no-untyped-call]
            policy_function=f"{__name__}:PressureScalingPolicy", policy_kwargs=delays
        ),
        # Delays are the policy's own (ScalingDelays). metrics_interval_s is deprecated, but in Ray
        # 2.60 the environment variable that replaces it has no effect.
        upscale_delay_s=0,
        downscale_delay_s=0,
        metrics_interval_s=PUSH_S,
    )


class PressureScalingPolicy:
    """Policy that Serve calls to choose a deployment's number of replicas.

    It gives the pressure on the replicas to `scale` (placement/scaling.py), which decides.

    delays: fields of ScalingDelays, such as upscale_s: seconds before scaling up or down.
    """

    def __init__(self, **delays: float) -> None:
        self._delays = ScalingDelays(**delays)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the target number of replicas, and the policy's state for the next call."""
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
    """Return the pressure (use of memory, waits, load) on each replica whose last stats are at most
    _STALE_S seconds old.

    metrics: time series by metric name, then by replica.
    now_s: current time, by the clock of the series' timestamps.
    """
    pressures = []
    for replica, series in metrics.get("arena_bytes", {}).items():
        at_s = series[-1].timestamp if series else 0.0
        if now_s - at_s <= _STALE_S:
            last = {name: of[replica][-1] for name, of in metrics.items() if of.get(replica)}
            known = {name: each.value for name, each in last.items() if each.timestamp == at_s}
            pressures.append(from_stats(known))
    return [each for each in pressures if each is not None]
