"""Adapters on the GPU, the right to use them, and which tenants used them for how long.

A lease begins in GpuAdapters.lease (adapters.py) and ends where its sequence releases it
(scheduling/scheduler.py); SlotUsage counts the time between for the tenants' usage.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.residency.checksums import LayerSums
from lorikeet_engine.residency.packing import PackedLayout
from lorikeet_engine.telemetry.status import SlotUse


@dataclass(slots=True, eq=False)
class GpuAdapter:
    """One adapter on the GPU.

    sums: of its image. guarded_until_s: while a request waits to lease it. copying: nobody can
    lease it yet. damaged: nobody can any more.
    """

    ref: AdapterRef
    slot: int
    layout: PackedLayout
    sums: LayerSums
    last_used_s: float
    score: float
    leases: int = 0
    guarded_until_s: float | None = None
    copying: bool = True
    damaged: bool = False
    loaded_at_s: float = 0.0

    def held_at(self, now_s: float) -> bool:
        """Whether the adapter is in use or about to be, and must stay."""
        guarded = self.guarded_until_s is not None and self.guarded_until_s > now_s
        return bool(self.leases) or self.copying or guarded


class Lease:
    """While it lasts, the adapter stays on the GPU, in this slot of the table.

    rank: the adapter's largest. head_rank: lm_head's; head_rows: how many rows it replaces there.
    changes_experts: whether it changes linears of experts.
    Use as a context manager, or release once done.
    """

    __slots__ = (
        *("_adapter", "_ended", "_on_release"),
        *("changes_experts", "head_rank", "head_rows", "rank", "slot"),
    )

    def __init__(
        self,
        adapter: GpuAdapter,
        ended: Callable[[GpuAdapter], None],
        on_release: Callable[[], None],
    ) -> None:
        """ended, on_release: called, in this order, when the lease is released."""
        adapter.leases += 1
        self._adapter: GpuAdapter | None = adapter
        self._ended, self._on_release = ended, on_release
        self.slot = adapter.slot
        self.rank = adapter.layout.max_rank
        self.head_rank = adapter.layout.head_rank
        self.head_rows = adapter.layout.head_rows
        self.changes_experts = adapter.layout.changes_experts

    def release(self) -> None:
        """End the lease; doing so again changes nothing."""
        adapter, self._adapter = self._adapter, None
        if adapter is not None:
            self._ended(adapter)
            self._on_release()

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


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
