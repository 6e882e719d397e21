"""Memory of a simulated replica for adapters and their system prompts: GPU, host, disk, and the
links between them.

Adapters are numbers, sizes are bytes. The eviction policy and its counts of uses are the engine's.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from lorikeet.routing.ranking import evicted_uses
from lorikeet_engine.adapter import Residency
from lorikeet_engine.residency.eviction_score import EvictionPolicy, RecentUses, UsageRecord


class SimulatedAdapter:
    """An adapter in the arena, a GPU's memory for adapters.

    leases: number of requests that use it now, plus 1 if it is pinned; it is evicted only at 0.
    loading: whether it is still being copied to the GPU.
    score: eviction score at its last use.
    ranked: score under which the heap of eviction candidates has the adapter; None: the heap does
        not have it.
    """

    __slots__ = ("leases", "loading", "ranked", "score")

    def __init__(self, score: float) -> None:
        self.score = score
        self.leases = 0
        self.loading = True
        self.ranked: float | None = None


class Arena:
    """Simulated GPU memory for adapters, and the adapters in it.

    The adapter with the lowest score among those neither leased nor loading is evicted first.

    free: bytes without an adapter.
    room: free bytes plus the bytes of adapters that may be evicted.
    """

    def __init__(
        self,
        capacity: int,
        sizes: Sequence[int],
        names: Sequence[str],
        policy: EvictionPolicy,
        evicted: Callable[[int], None],
    ) -> None:
        """Make an empty arena.

        capacity: bytes.
        sizes, names: bytes and name of each adapter, [adapters].
        policy: scores adapters by their uses; the lowest score is evicted first.
        evicted: called with each evicted adapter.
        """
        self._sizes, self._names, self._policy, self._evicted = sizes, names, policy, evicted
        self.residents: dict[int, SimulatedAdapter] = {}
        self.free = self.room = capacity
        self._uses = RecentUses()
        self._pinned: set[int] = set()
        self._by_score: list[tuple[float, int]] = []  # heap, with outdated entries

    def holds(self, adapter: int) -> bool:
        """Whether an adapter is loaded; False while it is still being copied to the GPU."""
        resident = self.residents.get(adapter)
        return resident is not None and not resident.loading

    def lease(self, adapter: int, now_s: float) -> None:
        """Count a request's use of a loaded adapter, and keep it from eviction until `release`."""
        resident, name = self.residents[adapter], self._names[adapter]
        if not resident.leases:
            self.room -= self._sizes[adapter]
        resident.leases += 1
        uses = self._uses.count(name, now_s) + 1.0
        resident.score = self._policy.score(UsageRecord(self._sizes[adapter] // 2, uses, now_s))
        self._uses.add(name, now_s)

    def release(self, adapter: int) -> None:
        """End a request's lease of an adapter, which kept it from eviction."""
        resident = self.residents[adapter]
        resident.leases -= 1
        if not resident.leases:
            self.room += self._sizes[adapter]
            self._rank(adapter, resident)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned adapters."""
        return sum(self._sizes[adapter] for adapter in self._pinned)

    def pin(self, adapter: int) -> bool:
        """Pin an adapter permanently; return False if it does not fit beside other pins.

        Enough bytes for the largest adapter always stay unpinned, as in the engine.
        """
        if adapter in self._pinned:
            return True
        if self.room - self._sizes[adapter] < max(self._sizes) or not self.place(adapter, 0.0):
            return False
        self.finish_load(adapter)
        self.residents[adapter].leases += 1
        self.room -= self._sizes[adapter]
        self._pinned.add(adapter)
        return True

    def place(self, adapter: int, now_s: float) -> bool:
        """Reserve space for an adapter that begins to load, evicting other adapters if needed.

        Returns False, without any change, if the adapter cannot fit.
        """
        size = self._sizes[adapter]
        if self.room < size:
            return False
        while self.free < size:
            assert self._front()
            self._leave(heappop(self._by_score)[1])
        uses = self._uses.count(self._names[adapter], now_s) + 1.0
        self._enter(adapter, self._policy.score(UsageRecord(size // 2, uses, now_s)))
        return True

    def uses(self, adapter: int, now_s: float) -> float:
        """Return the number of an adapter's uses, loaded or not; older uses count less."""
        return self._uses.count(self._names[adapter], now_s)

    def finish_load(self, adapter: int) -> None:
        """Mark an adapter as loaded. The adapter may then be evicted while it has no lease."""
        resident = self.residents[adapter]
        resident.loading = False
        self.room += self._sizes[adapter]
        self._rank(adapter, resident)

    def evicted_uses(self, adapter: int, now_s: float) -> float:
        """Estimate the number of recent uses of the adapters that loading this adapter would evict;
        0 if the arena has it already.
        """
        if adapter in self.residents or not self._front():
            return 0.0
        _, victim = self._by_score[0]
        victim_uses = self.uses(victim, now_s)
        return evicted_uses(self._sizes[adapter], self.free, self._sizes[victim], victim_uses)

    def _front(self) -> bool:
        """Drop outdated entries from the front of the heap of eviction candidates.

        Returns whether an entry is left.
        """
        heap = self._by_score
        while heap:
            score, adapter = heap[0]
            resident = self.residents.get(adapter)
            if resident is not None and resident.score == score and not resident.leases:
                return True
            heappop(heap)
            if resident is not None and resident.ranked == score:
                resident.ranked = None
        return False

    def _rank(self, adapter: int, resident: SimulatedAdapter) -> None:
        if resident.ranked != resident.score:
            resident.ranked = resident.score
            heappush(self._by_score, (resident.score, adapter))
            if len(self._by_score) > 64 + 4 * len(self.residents):
                self._tidy()

    def _tidy(self) -> None:
        residents = self.residents
        self._by_score = [
            (resident.score, adapter)
            for adapter, resident in residents.items()
            if not resident.leases and not resident.loading
        ]
        for score, adapter in self._by_score:
            residents[adapter].ranked = score
        heapify(self._by_score)

    def _enter(self, adapter: int, score: float) -> None:
        self.free -= self._sizes[adapter]
        self.room -= self._sizes[adapter]
        self.residents[adapter] = SimulatedAdapter(score)

    def _leave(self, adapter: int) -> None:
        del self.residents[adapter]
        self.free += self._sizes[adapter]
        self._evicted(adapter)


class ByteLru:
    """Adapters in a replica's host memory or on its disk. The least recently used adapter is
    evicted first.
    """

    def __init__(
        self,
        capacity: int,
        sizes: Sequence[int],
        added: Callable[[int], None],
        evicted: Callable[[int], None],
    ) -> None:
        """Make an empty tier.

        capacity: bytes.
        sizes: bytes of each adapter, [adapters].
        added, evicted: called with each adapter that comes or leaves.
        """
        self._free, self._sizes = capacity, sizes
        self._added, self._evicted = added, evicted
        self._held: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, adapter: int) -> bool:
        return adapter in self._held

    def __iter__(self) -> Iterator[int]:
        return iter(self._held)

    def use(self, adapter: int) -> bool:
        """Mark an adapter as used most recently; return False if it is absent."""
        if adapter not in self._held:
            return False
        self._held.move_to_end(adapter)
        return True

    def add(self, adapter: int) -> None:
        """Add an adapter, and evict other adapters if needed."""
        if self.use(adapter):
            return
        self._held[adapter] = None
        self._free -= self._sizes[adapter]
        self._added(adapter)
        while self._free < 0:
            victim = self._held.popitem(last=False)[0]
            self._free += self._sizes[victim]
            self._evicted(victim)


class SystemPrompts:
    """Adapters' system prompts in a replica's KV cache, and in host memory behind it.

    A prompt that requests use stays in the KV cache. If there is no room, the least recently used
    of the others goes to the host, and the least recently used prompt there is dropped.
    """

    def __init__(self, tokens: Sequence[int], host_tokens: int) -> None:
        """Begin without prompts.

        tokens: tokens of each adapter's prompt, [adapters].
        host_tokens: tokens that the host holds.
        """
        self._tokens, self._host_left = tokens, host_tokens
        self._used = Counter[int]()
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._on_host: OrderedDict[int, None] = OrderedDict()
        self.idle_tokens = 0

    def tier(self, adapter: int) -> Residency:
        """Return where an adapter's prompt is; REMOTE if it must be computed."""
        if adapter in self._used or adapter in self._idle:
            return Residency.GPU
        return Residency.HOST if adapter in self._on_host else Residency.REMOTE

    def use(self, adapter: int) -> int:
        """Use a prompt until `release`; return the tokens that it takes beyond those in use."""
        self._used[adapter] += 1
        if self._used[adapter] > 1:
            return 0
        if adapter in self._idle:
            del self._idle[adapter]
            self.idle_tokens -= self._tokens[adapter]
        return self._tokens[adapter]

    def taken_by(self, adapter: int) -> int:
        """Return what `use` would return."""
        return 0 if adapter in self._used else self._tokens[adapter]

    def release(self, adapter: int) -> int:
        """End one use of a prompt; return the tokens that are no longer in use."""
        self._used[adapter] -= 1
        if self._used[adapter]:
            return 0
        del self._used[adapter]
        self.bring(adapter)
        return self._tokens[adapter]

    def bring(self, adapter: int) -> None:
        """Put a prompt into the KV cache, unless it is there."""
        if adapter not in self._used and adapter not in self._idle:
            self._idle[adapter] = None
            self.idle_tokens += self._tokens[adapter]

    def trim(self, room: float) -> None:
        """Move idle prompts to the host until those left take at most `room` tokens."""
        while self.idle_tokens > room:
            adapter, _ = self._idle.popitem(last=False)
            size = self._tokens[adapter]
            self.idle_tokens -= size
            if adapter in self._on_host:
                self._on_host.move_to_end(adapter)
                continue
            self._on_host[adapter] = None
            self._host_left -= size
            while self._host_left < 0:
                self._host_left += self._tokens[self._on_host.popitem(last=False)[0]]


class Link:
    """Link that transfers one adapter after another.

    A transfer ends a latency after its last byte was sent; the next one is sent meanwhile.
    """

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self._latency_s, self._bytes_per_s = latency_s, bytes_per_s
        self._free_at_s = 0.0

    def carry(self, size_bytes: int, now_s: float) -> float:
        """Queue a transfer of size_bytes; return the time at which it ends."""
        self._free_at_s = max(self._free_at_s, now_s) + size_bytes / self._bytes_per_s
        return self._free_at_s + self._latency_s
