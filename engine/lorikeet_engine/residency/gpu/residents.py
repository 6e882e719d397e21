"""The adapters on the GPU: who uses them, who may not be evicted, who is evicted for whom."""

import logging
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

import torch

from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.residency.eviction import EvictionPolicy, UsageRecord, Uses
from lorikeet_engine.residency.gpu.arena import DeviceArena
from lorikeet_engine.residency.gpu.resident import Lease, Resident
from lorikeet_engine.residency.gpu.slots import SlotPool
from lorikeet_engine.residency.journal import Note, unnoted
from lorikeet_engine.residency.packing import PackedLayout
from lorikeet_engine.residency.reservations import MemoryReservations
from lorikeet_engine.telemetry.status import TierStatus, Victim

log = logging.getLogger(__name__)

# How long an adapter that a request wants is spared while nobody has leased it. Without this, two
# waiting requests could evict each other's adapters forever; with no end, one that was aborted
# would keep its adapter's place.
GUARD_S = 0.5
# So much is evicted, in images of the size to be placed, before another has to move for it. Loading
# ranks 4 to 256 at random, nothing moved any more, and 0.9% less of the arena was in use.
_RATHER_EVICT = 2


class Residents:
    """Belongs to the engine's thread; holds, snapshot, room_elements and victim are for any."""

    def __init__(
        self,
        pool: SlotPool,
        arena: DeviceArena,
        policy: EvictionPolicy,
        clock: Callable[[], float],
        note: Note = unnoted,
    ) -> None:
        """note: called with the digest of what can be used from now on, or no longer."""
        self._pool, self._arena, self._policy, self._clock = pool, arena, policy, clock
        self._residents: dict[str, Resident] = {}
        self._by_worth: list[tuple[float, str]] = []  # all of them, what to evict first in front
        # Those that perhaps may not be evicted, pinned ones aside: a few even of thousands.
        self._held: dict[str, Resident] = {}
        self._uses = Uses()
        self._pledges = MemoryReservations(pool.elements)
        self._note = note
        self._evictions = 0

    @property
    def room_elements(self) -> int:
        """What is free or could be evicted now."""
        now_s, pledges = self._clock(), self._pledges
        held = sum(
            resident.layout.elements
            for digest, resident in list(self._held.items())
            if digest not in pledges and resident.held_at(now_s)
        )
        return self._pool.elements - pledges.granted - held

    def status(self, itemsize: int) -> TierStatus:
        """What is here or being copied here, and what was evicted. itemsize: bytes per element.

        Pins can take less as soon as a request asks for a larger adapter.
        """
        elements = self._pool.used_elements, self._pool.elements, self._pledges.capacity
        used, capacity, pinnable = (each * itemsize for each in elements)
        return TierStatus(len(self._residents), used, capacity, pinnable, self._evictions)

    def victim(self, itemsize: int) -> Victim | None:
        """The one to be evicted first, its uses to a tenth: they fade all the time."""
        resident = next(self._evictable(), None)
        if resident is None:
            return None
        uses = round(self.uses(resident.ref.digest), 1)
        return Victim(resident.layout.elements * itemsize, uses)

    def uses(self, digest: str) -> float:
        """How often it was used of late, wherever it is; halved every HALF_LIFE_S."""
        return self._uses.at(digest, self._clock())

    def holds(self, digest: str) -> bool:
        """Whether its weights are on the GPU, all of them."""
        resident = self._residents.get(digest)
        return resident is not None and not resident.arriving

    def placed(self, digest: str) -> bool:
        """Whether it is there or being copied there."""
        return digest in self._residents

    def rank(self, digest: str) -> int | None:
        """The largest of one that is here."""
        resident = self._residents.get(digest)
        return resident.layout.max_rank if resident is not None else None

    def since_s(self, digest: str) -> float:
        """When one that is here came."""
        return self._residents[digest].since_s

    def snapshot(self) -> list[Resident]:
        """All of them at this moment."""
        return list(self._residents.values())

    def want(self, digest: str) -> bool:
        """Spare it until it is leased, for GUARD_S at most; False if it is not here."""
        resident = self._residents.get(digest)
        if resident is None:
            return False
        # Never prolonged: a request that waits for something else must not hold memory as well.
        if resident.guarded_until_s is None:
            resident.guarded_until_s = self._clock() + GUARD_S
            self._held[digest] = resident
        return True

    def lease(self, digest: str, then: Callable[[], None] = lambda: None) -> Lease | None:
        """None while it is not here. then: called when it is released."""
        if not self.holds(digest):
            return None
        resident, now_s = self._residents[digest], self._clock()
        self._unrank(resident)
        resident.worth = self._worth(digest, resident.layout, now_s)
        self._rank(resident)
        self._uses.add(digest, now_s)
        resident.last_used_s = now_s
        resident.guarded_until_s = None
        self._held[digest] = resident
        return Lease(resident, self._lease_ended, then)

    def worth_unasked(self, digest: str, layout: PackedLayout, elsewhere: float) -> float:
        """What it is worth to have it here now though nobody asks for it here.

        elsewhere: its uses by other replicas that this one could serve.
        """
        uses, now_s = max(self.uses(digest), elsewhere), self._clock()
        return self._policy.worth(UsageRecord(layout.elements, uses, now_s)) if uses else -math.inf

    def make_room(self, elements: int, *, insist: bool, below: float = math.inf) -> bool:
        """Evict what it takes to place an image of this size; nothing if that would not do.

        insist: a request wants it, so pins give way if nothing else does. below: evict only what is
        worth less than this.
        """
        if insist:
            self._pledges.yield_to(elements)
        if self._pool.has_room(elements):
            return True
        victims, free = list[Resident](), self._pool.elements - self._pool.used_elements
        for resident in self._evictable(below):
            victims.append(resident)
            free += resident.layout.elements
            if free >= elements:
                break
        if not victims or free < elements:
            return False
        for resident in victims:
            self._evict(resident)
        return True

    def place(
        self,
        ref: AdapterRef,
        layout: PackedLayout,
        image: torch.Tensor,
        *,
        wanted: bool,
        worth: float | None = None,
    ) -> torch.cuda.Event | None:
        """Copy an image into the room made for it; the event, if any, is over when it has arrived.

        With an event, nobody can lease it before `arrived`. worth: what it is to count for, if not
        as much as if it were used now.
        """
        digest, now_s = ref.digest, self._clock()
        assert digest not in self._residents
        self._evict_rather_than_move(layout, math.inf if worth is None else worth)
        placement = self._pool.place(layout)
        self._arena.run(*placement.commands)
        event = self._arena.copy(image, placement.pieces)
        if worth is None:
            worth = self._worth(digest, layout, now_s)
        slot, arriving = placement.slot, event is not None
        resident = Resident(ref, slot, layout, now_s, worth, arriving=arriving, since_s=now_s)
        self._residents[digest] = resident
        self._rank(resident)
        if resident.arriving:
            self._held[digest] = resident
        else:
            self._note(digest)
        if wanted:
            self.want(digest)
        log.info("adapter_admitted", extra={"adapter": str(ref), "slot": slot, "wanted": wanted})
        return event

    def arrived(self, digest: str) -> None:
        """Its copy is over."""
        resident = self._residents[digest]
        resident.arriving, resident.since_s = False, self._clock()
        self._let_go(resident)
        self._note(digest)

    def keeps(self, digest: str) -> bool:
        """Whether it is here and pinned."""
        return digest in self._pledges and digest in self._residents

    def may_pin(self, elements: int) -> bool:
        """Whether one more adapter of this size could be pinned."""
        return len(self._pledges) + 1 < self._pool.slots and self._pledges.leaves_room(elements)

    def pin(self, digest: str) -> bool:
        """Keep one that is here from now on; False when too much is pinned."""
        elements = self._residents[digest].layout.elements
        if digest not in self._pledges and not self.may_pin(elements):
            return False
        return self._pledges.grant(digest, elements)

    def unpin(self, digest: str) -> None:
        """Let it be evicted again."""
        self._pledges.revoke(digest)

    def guarded_for_s(self, since_s: float) -> float | None:
        """How long until the next guard ends of those that stood at since_s; None without one."""
        guards = (resident.guarded_until_s for resident in self._residents.values())
        ends = [end_s for end_s in guards if end_s is not None and end_s > since_s]
        return max(0.0, min(ends) - self._clock()) if ends else None

    def _lease_ended(self, resident: Resident) -> None:
        resident.leases -= 1
        resident.last_used_s = self._clock()
        if not resident.leases:
            resident.reads = self._arena.reads()
            self._let_go(resident)

    def _let_go(self, resident: Resident) -> None:
        if not resident.leases and resident.guarded_until_s is None:
            self._held.pop(resident.ref.digest, None)

    def _evictable(self, below: float = math.inf) -> Iterator[Resident]:
        """Those worth less that may go, what to evict first in front; evict none meanwhile.

        On another thread than the engine's, the first may just have become another.
        """
        now_s = self._clock()
        for worth, digest in self._by_worth:
            if worth >= below:
                return
            resident = self._residents.get(digest)
            if resident and digest not in self._pledges and not resident.held_at(now_s):
                yield resident

    def _evict_rather_than_move(self, layout: PackedLayout, below: float) -> None:
        """Everybody waits while images move; for one that is little worth, perhaps nobody does."""
        left = _RATHER_EVICT * layout.elements
        while left > 0 and not self._pool.fits(layout):
            resident = next(self._evictable(below), None)
            if resident is None:
                return
            left -= resident.layout.elements
            self._evict(resident)

    def _worth(self, digest: str, layout: PackedLayout, now_s: float) -> float:
        """What it is worth if it is used now: it is, or it has been brought for that."""
        uses = self._uses.at(digest, now_s) + 1.0
        return self._policy.worth(UsageRecord(layout.elements, uses, now_s))

    def _rank(self, resident: Resident) -> None:
        insort(self._by_worth, (resident.worth, resident.ref.digest))

    def _unrank(self, resident: Resident) -> None:
        del self._by_worth[bisect_left(self._by_worth, (resident.worth, resident.ref.digest))]

    def _evict(self, resident: Resident) -> None:
        digest = resident.ref.digest
        self._evictions += 1
        del self._residents[digest]
        self._held.pop(digest, None)
        self._unrank(resident)
        self._note(digest)
        self._arena.wait_for(resident.reads)
        self._arena.run(self._pool.evict(resident.slot))
        idle_s = self._clock() - resident.last_used_s
        log.info("adapter_evicted", extra={"adapter": str(resident.ref), "idle_s": idle_s})
