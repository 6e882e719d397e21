"""Slots for the states of delta nets: states of running sequences, and cached states.

A state stands for all tokens of a sequence so far, in all layers with a delta net. A running
sequence owns a slot, in which each step updates its state. A cached state is a copy behind the last
token of a full KV page, found by the page's key. Cached states are evicted least recently used
first.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class StateCounts:
    """Counts of cached states of delta nets (linear attention) since the engine's start.

    restored: number of sequences that began with a cached state.
    saved: number of states that were cached.
    evicted: number of cached states that were evicted.
    """

    restored: int = 0
    saved: int = 0
    evicted: int = 0


class StatePool:
    """Pool of slots for states of delta nets (linear attention). Only the engine's thread calls it.

    A state stands for all tokens of a sequence so far. A cached state has the key of the KV page
    whose last token it stands behind.

    A slot is free, owned (by a running sequence, or while a state is being copied into it), or it
    holds a cached state. `take` gives away free slots, and slots of cached states that nobody
    holds.

    slots: number of slots.
    counts: counts of cached states.
    on_evict: called with slot, key, adapter's digest and tenant of a cached state whose slot is
        about to be given away.
    """

    def __init__(self, slots: int, running: int, counts: StateCounts | None = None) -> None:
        """Make a pool of free slots.

        slots: number of slots, more than `running`.
        running: maximum number of running sequences. `take_to_save` leaves a slot for each of them,
            and one for the cached state with which the next sequence begins.
        counts: counts that the pool increases; None: new counts.
        """
        self.slots, self.counts = slots, counts or StateCounts()
        self.on_evict: Callable[[int, bytes, str | None, str], None] = lambda *_: None
        self._most_saving = slots - running - 1
        self._saving = set[int]()  # owned slots into which states are being copied
        self._keys: list[bytes | None] = [None] * slots
        self._adapters: list[str | None] = [None] * slots  # digests; only for slots with a key
        self._tenants = [""] * slots  # meaningful only for slots with a key
        self._slot_of: dict[bytes, int] = {}
        self._holds = Counter[int]()
        # In the order in which slots are given out; those without a key come first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(slots))

    @property
    def free(self) -> int:
        """Number of slots that can be given away; includes slots of cached states."""
        return len(self._free)

    @property
    def owned(self) -> int:
        """Number of slots of running sequences, and of states being copied to the cache."""
        return self.slots - len(self._free) - len(self._holds)

    @property
    def cached(self) -> int:
        """Number of cached states."""
        return len(self._slot_of)

    def longest(self, keys: list[bytes]) -> int:
        """Return the number of leading keys up to and including the last one whose state is cached;
        0 if no state is.

        keys: keys of a sequence's first full pages.
        """
        return next((i for i in range(len(keys), 0, -1) if keys[i - 1] in self._slot_of), 0)

    def slot_of(self, key: bytes) -> int | None:
        """Return the slot of a cached state; None if it is not cached."""
        return self._slot_of.get(key)

    def hold(self, key: bytes) -> int:
        """Return the slot of a cached state, which is kept until `drop_hold`."""
        slot = self._slot_of[key]
        self.counts.restored += 1
        self._holds[slot] += 1
        self._free.pop(slot, None)
        return slot

    def drop_hold(self, slot: int) -> None:
        """Drop one hold of a cached state, which becomes the most recently used one."""
        self._holds[slot] -= 1
        if not self._holds[slot]:
            del self._holds[slot]
            self._free[slot] = None
            if self._keys[slot] is None:
                self._free.move_to_end(slot, last=False)

    def take(self) -> int | None:
        """Give a slot to an owner; evict the least recently used state if need be.

        Returns None if all slots have owners.
        """
        if not self._free:
            return None
        slot, _ = self._free.popitem(last=False)
        key = self._keys[slot]
        if key is not None:
            self.counts.evicted += 1
            self.on_evict(slot, key, self._adapters[slot], self._tenants[slot])
        self._forget(slot)
        return slot

    def take_to_save(self) -> int | None:
        """Give a slot to copy a state into; evict the least recently used state if need be.

        End with `publish`, which makes the copy a cached state, or with `release`. Returns None if
        sequences that begin may need all other slots.
        """
        if len(self._saving) >= self._most_saving:
            return None
        slot = self.take()
        if slot is not None:
            self._saving.add(slot)
        return slot

    def publish(self, slot: int, key: bytes, adapter_digest: str | None, tenant: str = "") -> None:
        """Let sequences find the state in an owned slot, and end the slot's ownership.

        If another slot has a state of this key, the slot becomes free.

        adapter_digest: adapter under which the state was computed; None for the base model alone.
        tenant: tenant for whom the state was computed.
        """
        if key in self._slot_of:
            self.release(slot)
            return
        self._saving.discard(slot)
        self.counts.saved += 1
        self._keys[slot], self._adapters[slot], self._tenants[slot] = key, adapter_digest, tenant
        self._slot_of[key] = slot
        self._free[slot] = None

    def release(self, slot: int) -> None:
        """Make an owned slot free."""
        assert slot not in self._free, f"state {slot} released twice"
        self._saving.discard(slot)
        self._free[slot] = None
        self._free.move_to_end(slot, last=False)

    def forget_keys(self, keys: Iterable[bytes]) -> None:
        """Drop the cached states of these keys."""
        for key in keys:
            slot = self._slot_of.get(key)
            if slot is not None:
                self._forget(slot)
                if slot in self._free:
                    self._free.move_to_end(slot, last=False)

    def forget_adapter(self, digest: str) -> None:
        """Drop all cached states that were computed with an adapter, alone or in a composition."""
        slots = [s for s in self._slot_of.values() if digest in (self._adapters[s] or "")]
        self.forget_keys([key for slot in slots if (key := self._keys[slot])])

    def _forget(self, slot: int) -> None:
        key = self._keys[slot]
        if key is not None:
            del self._slot_of[key]
            self._keys[slot] = None
