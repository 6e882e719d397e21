"""What each replica must keep: a pure function of pins and replicas."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lorikeet.rendezvous import by_preference
from lorikeet_engine.adapter import AdapterRef, Residency


@dataclass(frozen=True, slots=True)
class PinnedAdapter:
    """One pin, resolved to the version that its alias names now. replicas None means all."""

    ref: AdapterRef
    tier: Residency
    replicas: int | None


@dataclass(frozen=True, slots=True)
class Keep:
    """An adapter that a replica must hold at this tier or nearer."""

    ref: AdapterRef
    tier: Residency


Plan = Mapping[str, Mapping[str, Keep]]
"""replica → digest → what to keep. By digest: two names may share one adapter's weights."""


def make_plan(pins: Iterable[PinnedAdapter], replicas: Sequence[str]) -> Plan:
    """Give each pin its replicas, the ones its requests are routed to first.

    Every replica has its part, if only an empty one. Where two pins name one adapter's weights on
    one replica the nearer tier holds.
    """
    plan: dict[str, dict[str, Keep]] = {replica: {} for replica in replicas}
    for pin in pins:
        digest = pin.ref.digest
        for replica in by_preference(digest, replicas)[: pin.replicas]:
            held = plan[replica].get(digest)
            if held is None or held.tier < pin.tier:
                plan[replica][digest] = Keep(pin.ref, pin.tier)
    return plan
