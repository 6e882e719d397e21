"""Number of replicas of a base model: a pure function of the pressure on each replica.

The fleet grows after seconds of pressure, by as many replicas as the pressure needs. The fleet
shrinks one by one, after minutes in which one replica fewer would have been far from pressure, and
after adapters in use have second copies, because Ray Serve chooses the replica that goes.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from lorikeet.placement.pressure import ReplicaPressure

# Bounds per replica, above which the fleet is under pressure.
_WORKING = 0.9  # images of adapters in use, as a fraction of the arena
_RUNNING = 0.85
_KV = 0.9
_WAIT_S = 1.0
_RELAXED = 0.75  # fraction of the bounds that may remain after a replica has gone
_SOLE_COPIES = 0.05  # fraction of adapters in use that may be lost; some have just come into use


@dataclass(frozen=True, slots=True)
class ScalingDelays:
    """Seconds that a condition must last before the fleet is scaled.

    upscale_s: seconds of pressure.
    downscale_s: seconds in which one replica fewer would have been enough.
    sole_copies_s: limit on the seconds beyond downscale_s for which a replica too many is kept,
        until the adapters in use have second copies.
    """

    upscale_s: float = 10.0
    downscale_s: float = 300.0
    sole_copies_s: float = 120.0


class ScalingState(NamedTuple):
    """Start of the present period of pressure, in which more replicas are wanted, or of calm, in
    which one fewer would do, in seconds of the caller's clock. None: there is no such period now.
    """

    pressed_since_s: float | None = None
    calm_since_s: float | None = None


class ScalingDecision(NamedTuple):
    """Decision on the number of replicas.

    replicas: number that there should be.
    reason: explanation of a change; None without a change.
    state: argument for the next call of `scale`.
    """

    replicas: int
    reason: str | None
    state: ScalingState


def scale(
    pressures: Collection[ReplicaPressure],
    running: int,
    target: int,
    min_replicas: int,
    max_replicas: int,
    state: ScalingState,
    now_s: float,
    delays: ScalingDelays,
) -> ScalingDecision:
    """Decide the number of replicas, from min_replicas to max_replicas.

    pressures: pressures of the replicas that reported recently.
    running: number of running replicas.
    target: number last requested, which is the decision if nothing is to change.
    state: state in the previous decision; ScalingState() for the first.
    now_s: seconds of the caller's clock.
    delays: seconds that pressure or calm must last before the number changes.
    """
    wanted, reason = _wanted(pressures)
    if min(wanted, max_replicas) > target:
        began_s = now_s if state.pressed_since_s is None else state.pressed_since_s
        if now_s - began_s >= delays.upscale_s:
            return ScalingDecision(min(wanted, max_replicas), reason, ScalingState())
        return ScalingDecision(target, reason, ScalingState(pressed_since_s=began_s))
    if not running == target == len(pressures) > min_replicas or not could_shrink(pressures):
        return ScalingDecision(target, None, ScalingState())
    began_s = now_s if state.calm_since_s is None else state.calm_since_s
    calm_s = now_s - began_s
    shares = [each.sole_copies for each in pressures]
    moved = all(share is not None and share <= _SOLE_COPIES for share in shares)
    if calm_s >= delays.downscale_s + (0 if moved else delays.sole_copies_s):
        return ScalingDecision(
            target - 1, f"one fewer has been enough for {calm_s:.0f} s", ScalingState()
        )
    return ScalingDecision(target, None, ScalingState(calm_since_s=began_s))


def could_shrink(pressures: Collection[ReplicaPressure]) -> bool:
    """Whether the fleet would be far from pressure with one replica fewer."""
    count = len(pressures)
    if count < 2:
        return False
    volume, _ = _volume(pressures)
    return volume * count / (count - 1) <= _RELAXED and _queue(pressures) <= _RELAXED


def _wanted(pressures: Collection[ReplicaPressure]) -> tuple[int, str | None]:
    """Return the number of replicas that the pressure needs, and the reason if that is more than
    there are.
    """
    count = len(pressures)
    if not count:
        return 0, None
    volume, reason = _volume(pressures)
    if volume > 1:
        return math.ceil(count * volume), reason
    if _queue(pressures) > 1:
        return count + 1, f"requests wait {_queue(pressures) * _WAIT_S:.1f} s"
    return count, None


def _volume(pressures: Collection[ReplicaPressure]) -> tuple[float, str]:
    """Return the load that is highest relative to its bound: (ratio of load to bound, the load in
    words).

    A ratio above 1 needs more replicas. Only loads that more replicas reduce are considered, each
    averaged over the replicas: adapters in use, running sequences, KV pages.
    """
    count = len(pressures)
    arenas = max(1.0, sum(each.arena_bytes for each in pressures))
    working = sum(each.working_bytes for each in pressures) / arenas
    running = sum(each.running_share for each in pressures) / count
    kv = sum(each.kv_share for each in pressures) / count
    return max(
        (working / _WORKING, f"adapters in use would fill {working:.0%} of the arenas"),
        (running / _RUNNING, f"{running:.0%} of max_running sequences run or wait"),
        (kv / _KV, f"{kv:.0%} of the KV pages are taken"),
    )


def _queue(pressures: Collection[ReplicaPressure]) -> float:
    """Return the average of the replicas' longest waits for a first token, as a ratio to _WAIT_S.

    Each wait counts as at most 4 * _WAIT_S.
    """
    waits = [min(each.oldest_wait_s, 4 * _WAIT_S) for each in pressures]
    return sum(waits) / len(waits) / _WAIT_S
