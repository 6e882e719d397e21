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


Plan = Mapping[str, Mapping[AdapterRef, Residency]]
"""replica → the adapters it must hold, each at this tier or nearer."""


def make_plan(pins: Iterable[PinnedAdapter], replicas: Sequence[str]) -> Plan:
    """Give each pin its replicas, the ones its requests are routed to first.

    Where two pins name one adapter on one replica the nearer tier holds.
    """
    plan: dict[str, dict[AdapterRef, Residency]] = {replica: {} for replica in replicas}
    for pin in pins:
        for replica in by_preference(pin.ref.digest, replicas)[: pin.replicas]:
            held = plan[replica].get(pin.ref, Residency.REMOTE)
            plan[replica][pin.ref] = max(held, pin.tier)
    return plan
