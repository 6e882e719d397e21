"""Scaling for Ray Serve: our function as its autoscaling policy.

Serve asks each replica for `record_autoscaling_stats`, a dict of numbers, every PUSH_S, and calls
the policy some ten times a second in its own controller's process.
"""

import logging
from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from lorikeet.placement.pressure import ReplicaPressure, from_stats
from lorikeet.placement.scaling import ScalingDelays, Since, scale

log = logging.getLogger("ray.serve")  # the policy runs in a process where only Serve logs

PUSH_S = 2.0
# A replica that was not heard of for so long is not reckoned with.
_STALE_S = 15.0


def autoscaling(least: int, most: int, **pace: float) -> AutoscalingConfig:
    """From `least` to `most` replicas, as their pressure asks for; pace as for ScalingDelays."""
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
        self._pace = ScalingDelays(**pace)

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


def _heard(metrics: Mapping[str, Mapping[Any, Any]], now_s: float) -> list[ReplicaPressure]:
    """The last numbers of each replica that was heard of lately. metrics: by name, then replica."""
    heard = []
    for replica, series in metrics.get("arena_bytes", {}).items():
        at_s = series[-1].timestamp if series else 0.0
        if now_s - at_s <= _STALE_S:
            last = {name: of[replica][-1] for name, of in metrics.items() if of.get(replica)}
            known = {name: each.value for name, each in last.items() if each.timestamp == at_s}
            heard.append(from_stats(known))
    return [signals for signals in heard if signals is not None]
