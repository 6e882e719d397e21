"""Who used the slots of adapters, for how long, and for whom they were filled."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.telemetry.status import SlotUse


class SlotHold(NamedTuple):
    """Whose it is, and of what."""

    tenant: str
    ref: AdapterRef


@dataclass(slots=True)
class _Leased:
    """An adapter that is leased now, and what is settled already."""

    since_s: float
    leases: Counter[SlotHold] = field(default_factory=Counter)


class SlotUsage:
    """Told by the engine's thread; `take` is for any one. clock: seconds that only grow."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = Lock()
        self._leased: dict[str, _Leased] = {}  # by digest
        self._uses: dict[SlotHold, SlotUse] = {}  # since the last `take`

    def leased(self, use: SlotHold) -> None:
        """A lease begins."""
        with self._lock:
            leased = self._settled(use.ref.digest)
            leased.leases[use] += 1

    def ended(self, use: SlotHold) -> None:
        """It ends."""
        digest = use.ref.digest
        with self._lock:
            leases = self._settled(digest).leases
            leases[use] -= 1
            if not leases[use]:
                del leases[use]
            if not leases:
                del self._leased[digest]

    def loaded(self, use: SlotHold, size_bytes: int) -> None:
        """It was brought to the GPU because this tenant's request wanted it."""
        with self._lock:
            used = self._use(use)
            used.loads += 1
            used.load_bytes += size_bytes

    def take(self) -> list[SlotUse]:
        """What was used since the call before."""
        with self._lock:
            for digest in self._leased:
                self._settled(digest)
            taken, self._uses = self._uses, {}
        return list(taken.values())

    def _use(self, use: SlotHold) -> SlotUse:
        return self._uses.setdefault(use, SlotUse(use.tenant, use.ref))

    def _settled(self, digest: str) -> _Leased:
        """What is leased of this adapter, its time until now shared out."""
        now_s = self._clock()
        leased = self._leased.setdefault(digest, _Leased(now_s))
        if leased.leases:
            part_s = (now_s - leased.since_s) / len(leased.leases)
            for use in leased.leases:
                self._use(use).leased_s += part_s
        leased.since_s = now_s
        return leased
