"""Time for which tenants' requests leased adapters on the GPU, and loads that they caused."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.telemetry.status import SlotUse


class SlotUser(NamedTuple):
    """A tenant whose requests use an adapter."""

    tenant: str
    ref: AdapterRef


@dataclass(slots=True)
class _Leased:
    """An adapter's leases; since_s: until when their time is shared out already."""

    since_s: float
    leases: Counter[SlotUser] = field(default_factory=Counter)


class SlotUsage:
    """Written by the engine's thread; `take` is for any one. clock: seconds that only grow."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = Lock()
        self._leased: dict[str, _Leased] = {}  # by digest
        self._uses: dict[SlotUser, SlotUse] = {}  # since the last `take`

    def leased(self, user: SlotUser) -> None:
        """Count a lease that begins."""
        with self._lock:
            leased = self._settled(user.ref.digest)
            leased.leases[user] += 1

    def ended(self, user: SlotUser) -> None:
        """Count a lease's end."""
        digest = user.ref.digest
        with self._lock:
            leases = self._settled(digest).leases
            leases[user] -= 1
            if not leases[user]:
                del leases[user]
            if not leases:
                del self._leased[digest]

    def loaded(self, user: SlotUser, size_bytes: int) -> None:
        """Count a load to the GPU that this tenant's request caused."""
        with self._lock:
            used = self._use(user)
            used.loads += 1
            used.load_bytes += size_bytes

    def take(self) -> list[SlotUse]:
        """Return what was used since the call before."""
        with self._lock:
            for digest in self._leased:
                self._settled(digest)
            taken, self._uses = self._uses, {}
        return list(taken.values())

    def _use(self, user: SlotUser) -> SlotUse:
        return self._uses.setdefault(user, SlotUse(user.tenant, user.ref))

    def _settled(self, digest: str) -> _Leased:
        """The leases of an adapter, their time until now shared out."""
        now_s = self._clock()
        leased = self._leased.setdefault(digest, _Leased(now_s))
        if leased.leases:
            share_s = (now_s - leased.since_s) / len(leased.leases)
            for user in leased.leases:
                self._use(user).leased_s += share_s
        leased.since_s = now_s
        return leased
