"""Compositions on the GPU: slots that name several adapters, and their leases.

A composition is leased once all its adapters are on the GPU, and then leases each of them. Its slot
has no image: it lists the adapters' slots and weights (LoraWeights.members), which stay right as
long as the adapters are leased.
"""

from collections.abc import Callable, Sequence

from lorikeet_engine.adapter import Composition
from lorikeet_engine.errors import AdapterNotComposable, AdapterTooLarge
from lorikeet_engine.residency.gpu.adapters import GUARD_S, GpuAdapters, Lease
from lorikeet_engine.residency.gpu.arena import MAX_COMPOSITIONS, DeviceArena, WriteMembers
from lorikeet_engine.residency.packed_image import PackedLayout


class CompositionLease:
    """Right of a sequence to use all adapters of a composition (a weighted sum of adapters), and
    the composition's slot.

    Attributes are those of Lease; the ranks are sums over the adapters.
    """

    composed = True
    changes_experts = has_vectors = False
    head_rows = 0
    __slots__ = ("_ended", "_leases", "head_rank", "rank", "slot")

    def __init__(self, slot: int, leases: Sequence[Lease], ended: Callable[[], None]) -> None:
        """Start a lease of a composition.

        leases: a lease of each adapter.
        ended: called when the lease is released.
        """
        self.slot, self._leases, self._ended = slot, leases, ended
        self.rank = sum(lease.rank for lease in leases)
        self.head_rank = sum(lease.head_rank for lease in leases)

    def release(self) -> None:
        """End the lease and those of its adapters; a second call changes nothing."""
        leases, self._leases = self._leases, ()
        for lease in leases:
            lease.release()
        if leases:
            self._ended()


class Compositions:
    """Leases compositions (weighted sums of adapters), each of which has a slot while it is leased.
    For the engine's thread only.
    """

    def __init__(
        self,
        gpu: GpuAdapters,
        arena: DeviceArena,
        max_rank: int,
        first_slot: int,
        clock: Callable[[], float],
    ) -> None:
        """Start without compositions.

        gpu: the adapters on the GPU.
        arena: the arena on the GPU, in whose tables each composition's adapters are written.
        max_rank: largest sum of the ranks of a composition's adapters.
        first_slot: first of MAX_COMPOSITIONS slots, which no images use.
        clock: returns the time in seconds.
        """
        self._gpu, self._arena, self._max_rank, self._clock = gpu, arena, max_rank, clock
        self._free = list(range(first_slot, first_slot + MAX_COMPOSITIONS))
        self._slots: dict[str, int] = {}  # of the leased compositions, by digest
        self._leases: dict[str, int] = {}  # number of leases, by digest
        self._gathered, self._until_s = "", 0.0  # digest that `gather` protects, and until when

    def lease(
        self, composition: Composition, lease: Callable[[int], Lease | None]
    ) -> CompositionLease | None:
        """Lease a composition; return None unless all its adapters are on the GPU and there is a
        slot.

        lease: leases one of the composition's adapters, by its index.

        Raises AdapterNotComposable if an adapter cannot be added to others, as with DoRA, and
        AdapterTooLarge if the ranks add up to more than max_rank.
        """
        digest, members = composition.digest, composition.members
        found = [self._gpu.usable(ref.digest) for ref in members]
        adapters = [adapter for adapter in found if adapter is not None]
        for adapter in adapters:
            if obstacle := _obstacle(adapter.layout):
                raise AdapterNotComposable(
                    f"{adapter.ref} cannot be added to other adapters, since it has {obstacle}: "
                    "use it alone",
                    adapter=str(adapter.ref),
                    param="model",
                )
        rank = sum(adapter.layout.max_rank for adapter in adapters)
        if rank > self._max_rank:
            raise AdapterTooLarge(
                f"the ranks of {composition} add up to {rank}: the limit is {self._max_rank}; "
                "compose fewer adapters, or have the limit of ranks raised",
                rank=rank,
                max_rank=self._max_rank,
            )
        if len(adapters) < len(members) or not (digest in self._slots or self._free):
            return None
        leases = [each for index in range(len(members)) if (each := lease(index)) is not None]
        assert len(leases) == len(members), "a usable adapter without a lease"
        if digest not in self._slots:
            self._slots[digest], self._leases[digest] = self._free.pop(), 0
            slots = tuple(each.slot for each in leases)
            self._arena.run(WriteMembers(self._slots[digest], slots, composition.weights))
        self._leases[digest] += 1
        return CompositionLease(self._slots[digest], leases, lambda: self._ended(digest))

    def gather(self, composition: Composition) -> None:
        """Protect the adapters of a composition (a sum of adapters) on the GPU from eviction while
        its others load.

        Call again until all are on the GPU. Only one composition is protected at a time: two
        could each hold memory that the other needs.
        """
        now_s = self._clock()
        if composition.digest != self._gathered and now_s < self._until_s:
            return
        # twice GUARD_S, so that guards of other requests' adapters end first
        self._gathered, self._until_s = composition.digest, now_s + 2 * GUARD_S
        for ref in composition.members:
            self._gpu.guard_until(ref.digest, self._until_s)

    def _ended(self, digest: str) -> None:
        self._leases[digest] -= 1
        if not self._leases[digest]:
            del self._leases[digest]
            self._free.append(self._slots.pop(digest))


def _obstacle(layout: PackedLayout) -> str | None:
    """Return the part of an adapter that cannot be added to others; None if there is none."""
    if layout.vectors is not None:
        return "DoRA or biases"
    if layout.changes_experts:
        return "matrices of experts"
    return "trained tokens" if layout.has_token_rows else None
