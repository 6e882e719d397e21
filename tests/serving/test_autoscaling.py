"""Autoscaling policy, called as Serve calls it."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from ray.serve.config import AutoscalingContext

from lorikeet.placement.scaling import ScalingDelays
from lorikeet.serving.autoscaling import PressureScalingPolicy, autoscaling

policy = PressureScalingPolicy()
UPSCALE_S, DOWNSCALE_S = ScalingDelays().upscale_s, ScalingDelays().downscale_s
IDLE = {
    "working_bytes": 0,
    "arena_bytes": 100,
    "oldest_wait_s": 0,
    "running_share": 0,
    "kv_share": 0,
    "sole_copies": 0,
}


def context(
    stats: Mapping[str, Mapping[str, float]],
    now_s: float,
    state: Any,
    target: int,
    age_s: float = 0,
) -> AutoscalingContext:
    """Return Serve's context when these replicas' stats came `age_s` ago."""
    series: dict[str, dict[str, list[Any]]] = {}
    for replica, numbers in stats.items():
        for name, value in numbers.items():
            points = [(now_s - age_s - 2, 9e9), (now_s - age_s, value)]
            series.setdefault(name, {})[replica] = [
                SimpleNamespace(timestamp=at, value=each) for at, each in points
            ]
    return AutoscalingContext(
        deployment_id=None,  # type: ignore[arg-type]
        deployment_name="engine-tiny",
        app_name="default",
        current_num_replicas=len(stats),
        target_num_replicas=target,
        running_replicas=list(stats),  # type: ignore[arg-type]
        total_num_requests=0,
        total_queued_requests=0,
        aggregated_metrics={},
        raw_metrics=lambda: series,  # type: ignore[arg-type, return-value]
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=3,
        policy_state=state,
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=now_s,
        config=None,
    )


def decide(stats: Mapping[str, float], for_s: float, count: int, age_s: float = 0) -> int:
    """Return the policy's decision for `count` replicas after these stats have lasted `for_s`."""
    state: dict[str, Any] = {}
    said = count
    for second in range(0, int(for_s) + 1, 2):
        everyone = {f"r{n}": stats for n in range(count)}
        said, state = policy(context(everyone, 1e9 + second, state, count, age_s))
    return said


def test_the_policy_scales_by_the_last_stats():
    full = {**IDLE, "working_bytes": 250}
    assert decide(full, UPSCALE_S - 2, 1) == 1
    assert decide(full, UPSCALE_S, 1) == 3
    assert decide(IDLE, DOWNSCALE_S - 2, 3) == 3
    assert decide(IDLE, DOWNSCALE_S, 3) == 2
    assert decide({**IDLE, "sole_copies": 0.2}, DOWNSCALE_S, 3) == 3


def test_stale_or_missing_stats_change_nothing():
    assert decide({**IDLE, "running_share": 2}, UPSCALE_S, 1, age_s=60) == 1
    assert decide(IDLE, DOWNSCALE_S, 3, age_s=60) == 3
    assert decide({}, DOWNSCALE_S, 3) == 3


def test_a_stat_that_is_no_longer_sent_counts_as_unknown():
    at = context(
        {"r0": IDLE, "r1": IDLE},
        1e9,
        {"pressure": {"pressed_since_s": None, "calm_since_s": 0.0}},
        2,
    )
    del at.raw_metrics["sole_copies"]["r0"][-1]  # type: ignore[index]
    assert policy(at)[0] == 1  # it has waited long enough
    at.policy_state = {"pressure": {"pressed_since_s": None, "calm_since_s": 1e9 - DOWNSCALE_S}}
    assert policy(at)[0] == 2


def test_serve_gets_the_range_and_the_policys_delays_but_no_own_delays():
    config = autoscaling(2, 6, downscale_s=1.0)
    assert (config.min_replicas, config.max_replicas) == (2, 6)
    assert config.upscale_delay_s == config.downscale_delay_s == 0
    policy = config.policy.get_policy()(**config.policy.policy_kwargs)
    assert policy(context({}, 0.0, {}, 2))[0] == 2
