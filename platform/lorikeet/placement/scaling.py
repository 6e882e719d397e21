"""How many replicas there should be: a pure function of what each says of its pressure.

Grows after seconds of pressure, by as many as it takes. Shrinks one by one, after minutes in which
one replica fewer would have been far from pressure, and only when adapters in use have been
brought to second replicas: which replica goes is not ours to say.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from lorikeet.placement.pressure import ReplicaPressure

# What one replica should bear, and what of that each may bear after one has gone.
_WORKING = 0.9  # adapters in use, of the arena
_SEATS = 0.85
_KV = 0.9
_WAIT_S = 1.0
_RELAXED = 0.75
# Of the adapters in use, what may go with a replica; some have always just come into use.
_SOLE_COPIES = 0.05


@dataclass(frozen=True, slots=True)
class ScalingDelays:
    """How long, in seconds, pressure must last; how long one replica fewer must have been enough;
    and how much longer at most is waited for adapters to come to second replicas.
    """

    pressed_s: float = 10.0
    calm_s: float = 300.0
    moving_s: float = 120.0


class Since(NamedTuple):
    """Since when, in seconds of the caller's clock, there has been pressure, or calm."""

    pressed_s: float | None = None
    calm_s: float | None = None


class ScalingDecision(NamedTuple):
    """How many replicas there should be, why, and what to hand in next time."""

    replicas: int
    reason: str | None
    since: Since


def scale(
    signals: Collection[ReplicaPressure],
    running: int,
    target: int,
    least: int,
    most: int,
    since: Since,
    now_s: float,
    pace: ScalingDelays,
) -> ScalingDecision:
    """How many of `least` to `most` replicas there should be.

    signals: of the replicas heard of lately. running: how many there are; target: how many were
    asked for last. While nothing is to be done the answer is the target.
    """
    wanted, reason = _wanted(signals)
    if min(wanted, most) > target:
        began_s = now_s if since.pressed_s is None else since.pressed_s
        if now_s - began_s >= pace.pressed_s:
            return ScalingDecision(min(wanted, most), reason, Since())
        return ScalingDecision(target, reason, Since(pressed_s=began_s))
    if not running == target == len(signals) > least or not could_shrink(signals):
        return ScalingDecision(target, None, Since())
    began_s = now_s if since.calm_s is None else since.calm_s
    calm_s = now_s - began_s
    shares = [each.sole_copies for each in signals]
    moved = all(share is not None and share <= _SOLE_COPIES for share in shares)
    if calm_s >= pace.calm_s + (0 if moved else pace.moving_s):
        return ScalingDecision(target - 1, f"one fewer has been enough for {calm_s:.0f} s", Since())
    return ScalingDecision(target, None, Since(calm_s=began_s))


def could_shrink(signals: Collection[ReplicaPressure]) -> bool:
    """Whether one replica fewer would be far from pressure."""
    count = len(signals)
    if count < 2:
        return False
    volume, _ = _volume(signals)
    return volume * count / (count - 1) <= _RELAXED and _queue(signals) <= _RELAXED


def _wanted(signals: Collection[ReplicaPressure]) -> tuple[int, str | None]:
    """Replicas that would bear it, and why; the queue says that more are needed, not how many."""
    count = len(signals)
    if not count:
        return 0, None
    volume, reason = _volume(signals)
    if volume > 1:
        return math.ceil(count * volume), reason
    if _queue(signals) > 1:
        return count + 1, f"requests wait {_queue(signals) * _WAIT_S:.1f} s"
    return count, None


def _volume(signals: Collection[ReplicaPressure]) -> tuple[float, str]:
    """How much of what they should bear they bear; more replicas would have less each."""
    count = len(signals)
    arenas = max(1.0, sum(each.arena_bytes for each in signals))
    working = sum(each.working_bytes for each in signals) / arenas
    seats = sum(each.seats for each in signals) / count
    kv = sum(each.kv for each in signals) / count
    return max(
        (working / _WORKING, f"adapters in use would fill {working:.0%} of the arenas"),
        (seats / _SEATS, f"{seats:.0%} of the seats are taken"),
        (kv / _KV, f"{kv:.0%} of the KV pages are taken"),
    )


def _queue(signals: Collection[ReplicaPressure]) -> float:
    """The mean, so that one replica's queue alone does not count for much: others could take it."""
    waits = [min(each.oldest_wait_s, 4 * _WAIT_S) for each in signals]
    return sum(waits) / len(waits) / _WAIT_S
