"""Tenants' usage of GPU slots: time of their leases, and loads that their requests caused."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.telemetry.status import SlotUse


class SlotUser(NamedTuple):
    """Tenant, and an adapter that the tenant's requests use."""

    tenant: str
    ref: AdapterRef


@dataclass(slots=True)
class _Leased:
    """Leases of one adapter, by the tenants that hold them.

    since_s: time up to which leased time has been counted.
    leases: number of leases of each SlotUser.
    """

    since_s: float
    leases: Counter[SlotUser] = field(default_factory=Counter)


class SlotUsage:
    """Counts for how long each tenant leases each adapter on the GPU (uses it in requests), and the
    loads that its requests cause. Time in which several tenants lease an adapter is divided equally
    among them.

    The engine's thread calls the recording methods; any one thread may call `take`.

    clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = Lock()
        self._leased: dict[str, _Leased] = {}  # by digest
        self._uses: dict[SlotUser, SlotUse] = {}  # since the last `take`

    def leased(self, user: SlotUser) -> None:
        """Record that a lease, a request's use of an adapter on the GPU, begins."""
        with self._lock:
            leased = self._settled(user.ref.digest)
            leased.leases[user] += 1

    def ended(self, user: SlotUser) -> None:
        """Record that a lease ends."""
        digest = user.ref.digest
        with self._lock:
            leases = self._settled(digest).leases
            leases[user] -= 1
            if not leases[user]:
                del leases[user]
            if not leases:
                del self._leased[digest]

    def loaded(self, user: SlotUser, size_bytes: int) -> None:
        """Record a load to the GPU that a request of this tenant caused.

        size_bytes: size of the loaded adapter.
        """
        with self._lock:
            used = self._use(user)
            used.loads += 1
            used.load_bytes += size_bytes

    def take(self) -> list[SlotUse]:
        """Return the use of each adapter's slot by each tenant since the last call: seconds of
        leases, loads and loaded bytes.
        """
        with self._lock:
            for digest in self._leased:
                self._settled(digest)
            taken, self._uses = self._uses, {}
        return list(taken.values())

    def _use(self, user: SlotUser) -> SlotUse:
        return self._uses.setdefault(user, SlotUse(user.tenant, user.ref))

    def _settled(self, digest: str) -> _Leased:
        """Add an adapter's leased time up to now to the counts of the tenants that lease it;
        return its leases.
        """
        now_s = self._clock()
        leased = self._leased.setdefault(digest, _Leased(now_s))
        if leased.leases:
            share_s = (now_s - leased.since_s) / len(leased.leases)
            for user in leased.leases:
                self._use(user).leased_s += share_s
        leased.since_s = now_s
        return leased
