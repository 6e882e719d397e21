"""What the tiers can say of themselves: where adapters are, what is on its way, what loads take."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.costs import LoadCosts
from lorikeet_engine.counts import LOAD_S, Distribution, Histogram
from lorikeet_engine.request import AdapterReport
from lorikeet_engine.residency.copying import Copied, Copies
from lorikeet_engine.residency.known import Known
from lorikeet_engine.residency.load_times import LoadTimes
from lorikeet_engine.residency.loading import Landing
from lorikeet_engine.residency.pins import Pins
from lorikeet_engine.residency.resident import Resident
from lorikeet_engine.residency.residents import Residents
from lorikeet_engine.residency.slots import SlotPool


@dataclass(frozen=True, slots=True)
class ArenaLoad:
    """EngineLoad's fields about adapters."""

    loading_bytes: int
    free_bytes: int
    room_bytes: int
    victim_bytes: int
    victim_uses: float


class Accounts:
    """Told by the engine's thread, asked by any."""

    def __init__(
        self,
        pool: SlotPool,
        itemsize: int,
        residents: Residents,
        copies: Copies,
        pins: Pins,
        residency: Callable[[str], Residency],
    ) -> None:
        """itemsize: bytes per element of an image. residency: where an adapter is, by digest."""
        self._pool, self._residents, self._copies, self._pins = pool, residents, copies, pins
        self._residency = residency
        self._itemsize = itemsize
        self._known = Known()
        self._times = LoadTimes()
        self._loads = {tier: Histogram(LOAD_S) for tier in Residency if tier is not Residency.GPU}
        self.failures = 0  # loads that ended with an error

    def asked(self, ref: AdapterRef) -> None:
        """Somebody asks for it. On any thread."""
        self._known.add(ref)

    def seen(self, digest: str, elements: int) -> None:
        """Its image has so many elements."""
        self._known.measured(digest, elements)

    def landed(self, landing: Landing) -> None:
        """A load to the host or the disk is over."""
        self.failures += landing.error is not None
        if landing.download_s:
            self._loads[Residency.REMOTE].add(landing.download_s)
        if landing.elements:
            self._loads[Residency.DISK].add(landing.read_s)
            size_bytes = landing.elements * self._itemsize
            self.seen(landing.ref.digest, landing.elements)
            self._times.reads.add(landing.read_s, size_bytes)
            if landing.download_s:
                self._times.downloads.add(landing.download_s, size_bytes)

    def copied(self, copied: Copied) -> None:
        """A copy to the GPU is over."""
        self._loads[Residency.HOST].add(copied.took_s)
        self._times.copies.add(copied.took_s, copied.elements * self._itemsize)

    def costs(self) -> LoadCosts:
        """What loads take, as far as it was measured."""
        return self._times.costs()

    def loads(self) -> dict[Residency, Distribution]:
        """What loads took, by the tier that they were from."""
        return {tier: seconds.read() for tier, seconds in self._loads.items()}

    def copy_s(self, digest: str) -> float:
        """How long its copy from the host to the GPU takes."""
        size_bytes = self._known.elements(digest) * self._itemsize
        usual = int(self._times.reads.size_bytes)
        return self.costs().load_s(Residency.HOST, size_bytes or usual)

    def load(self, wanted: Iterable[str]) -> ArenaLoad:
        """What is on its way, what has room, what would be evicted first.

        wanted: the digests that requests wait for and that are not on the GPU.
        """
        victim, uses = self._residents.victim() or (0, 0.0)
        return ArenaLoad(
            loading_bytes=self._loading_bytes(wanted),
            free_bytes=(self._pool.elements - self._pool.used_elements) * self._itemsize,
            room_bytes=self._residents.room_elements * self._itemsize,
            victim_bytes=victim * self._itemsize,
            victim_uses=uses,
        )

    def report(self) -> tuple[AdapterReport, ...]:
        """Every adapter that is nearer than remote, as far as this process has seen it."""
        residents = {r.ref.digest: r for r in self._residents.snapshot()}
        refs = self._known.refs() | {digest: r.ref for digest, r in residents.items()}
        reports = [self._report(ref, residents.get(digest)) for digest, ref in refs.items()]
        return tuple(r for r in reports if r.residency is not Residency.REMOTE)

    def blocks(self) -> tuple[tuple[object, ...], ...]:
        """Who lies where in the arena: rows of a MemoryMap. For any thread; holds up none."""
        # In this order: who is evicted meanwhile has no place any more, or another has it.
        residents, placed = self._residents.snapshot(), self._pool.placed()
        size, keeps = self._itemsize, self._residents.keeps
        return tuple(
            (
                resident.ref.tenant,
                resident.ref.name,
                resident.ref.version,
                resident.ref.digest,
                image.layout.max_rank,
                resident.leases,
                keeps(resident.ref.digest),
                resident.arriving,
                tuple((p.offset * size, (p.end - p.begin) * size) for p in image.pieces),
            )
            for resident in residents
            if (image := placed.get(resident.slot)) and image.layout is resident.layout
        )

    def _report(self, ref: AdapterRef, resident: Resident | None) -> AdapterReport:
        elements = resident.layout.elements if resident else 0
        return AdapterReport(
            ref=ref,
            residency=self._residency(ref.digest),
            gpu_bytes=elements * self._itemsize,
            leases=resident.leases if resident else 0,
            pinned=ref.digest in self._pins,
            image_bytes=(elements or self._known.elements(ref.digest)) * self._itemsize,
            uses=self._residents.uses(ref.digest),
        )

    def _loading_bytes(self, wanted: Iterable[str]) -> int:
        """An image that was never seen is taken for one of the usual size."""
        usual = int(self._times.reads.size_bytes)
        sizes = [self._known.elements(digest) * self._itemsize for digest in wanted]
        return sum(size or usual for size in sizes) + self._copies.elements * self._itemsize
