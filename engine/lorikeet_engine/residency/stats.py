"""Statistics of the tiers: each adapter's tier, loads in progress, and load times between tiers."""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.costs import LoadCosts
from lorikeet_engine.residency.gpu.adapters import GpuAdapter, GpuAdapters
from lorikeet_engine.residency.gpu.image_copies import FinishedCopy, ImageCopies
from lorikeet_engine.residency.gpu.slots import PlacedImage, SlotPool
from lorikeet_engine.residency.loader import LoadResult
from lorikeet_engine.residency.pins import Pins
from lorikeet_engine.telemetry.counters import LOAD_S, Histogram
from lorikeet_engine.telemetry.status import AdapterStatus, Distribution

# Remembered adapters: those last requested, pinned or prefetched.
_MAX_SEEN = 16_384
# Weight of each load in the mean.
_WEIGHT = 0.1
_UNMEASURED = LoadCosts()


class ResidencyStats:
    """Counts and times of adapter loads since the engine's start, and the adapters last requested,
    pinned or prefetched.

    The engine's thread calls the recording methods; any thread may call the other methods.
    """

    def __init__(
        self,
        pool: SlotPool,
        itemsize: int,
        gpu: GpuAdapters,
        copies: ImageCopies,
        pins: Pins,
        residency: Callable[[str], Residency],
    ) -> None:
        """Start with nothing measured.

        pool: places of the images on the GPU.
        itemsize: bytes per element of an image.
        copies: copies to the GPU in flight.
        residency: returns the tier of the adapter with this digest.
        """
        self._pool, self._gpu, self._copies, self._pins = pool, gpu, copies, pins
        self._residency = residency
        self._itemsize = itemsize
        self._seen = SeenAdapters()
        self._times = LoadTimes()
        self._loads = {tier: Histogram(LOAD_S) for tier in Residency if tier is not Residency.GPU}
        self.failures = 0  # loads that ended with an error

    def remember(self, ref: AdapterRef) -> None:
        """Remember an adapter that is requested, pinned or prefetched. For any thread."""
        self._seen.add(ref)

    def ref(self, digest: str) -> AdapterRef | None:
        """Return the adapter with this digest if it is remembered."""
        return self._seen.ref(digest)

    def forget(self, digest: str) -> None:
        """Remember an adapter no longer."""
        self._seen.remove(digest)

    def remember_size(self, digest: str, elements: int) -> None:
        """Remember the size of an adapter's image on one GPU."""
        self._seen.measured(digest, elements)

    def elements(self, digest: str) -> int | None:
        """Return the size of an adapter's image on one GPU; None if unknown."""
        return self._seen.elements(digest)

    def on_result(self, result: LoadResult) -> None:
        """Count a load to host or disk that has ended, and include its time in the means."""
        self.failures += result.error is not None
        if result.download_s is not None:
            self._loads[Residency.REMOTE].add(result.download_s)
        if result.elements is not None:
            self._loads[Residency.DISK].add(result.read_s)
            size_bytes = result.elements * self._itemsize
            self.remember_size(result.ref.digest, result.elements)
            self._times.reads.add(result.read_s, size_bytes)
            if result.download_s is not None:
                self._times.downloads.add(result.download_s, size_bytes)

    def add_copy(self, copy: FinishedCopy) -> None:
        """Count a copy to the GPU that is complete, and include its time in the means."""
        self._loads[Residency.HOST].add(copy.took_s)
        self._times.copies.add(copy.took_s, copy.elements * self._itemsize)

    def costs(self) -> LoadCosts:
        """Return the measured costs of loads between tiers."""
        return self._times.costs()

    def loads(self) -> dict[Residency, Distribution]:
        """Return the distribution of load times, in seconds, by the tier from which adapters were
        loaded.
        """
        return {tier: seconds.read() for tier, seconds in self._loads.items()}

    def copy_s(self, digest: str) -> float:
        """Return the estimated seconds of an adapter's copy from the host to the GPU."""
        return self.costs().load_s(Residency.HOST, self._image_bytes(digest) or self._usual_bytes)

    def loading_bytes(self, requested: Iterable[str]) -> int:
        """Return the total bytes of images on their way to the GPU.

        An image of unknown size counts with the mean size.

        requested: digests of adapters that requests wait for and that are not on the GPU.
        """
        usual = self._usual_bytes
        sizes = (self._image_bytes(digest) or usual for digest in requested)
        return sum(sizes) + self._copies.elements * self._itemsize

    def adapters(self, tier: Residency) -> list[AdapterStatus]:
        """Return the status of the adapters on the GPU, and of the remembered adapters at `tier` or
        nearer to the GPU.

        Remembered adapters are those last requested, pinned or prefetched. For any thread.
        """
        # Snapshot before placed: an adapter evicted in between then has no image in its slot, or
        # another adapter's.
        on_gpu = {r.ref.digest: r for r in self._gpu.snapshot()}
        placed = self._pool.placed()
        refs = {digest: gpu_adapter.ref for digest, gpu_adapter in on_gpu.items()}
        if tier is not Residency.GPU:
            refs = self._seen.refs() | refs
        found = [self._adapter(ref, on_gpu.get(digest), placed) for digest, ref in refs.items()]
        return [each for each in found if each.pieces or each.residency >= tier]

    @property
    def _usual_bytes(self) -> int:
        return int(self._times.reads.size_bytes)

    def _image_bytes(self, digest: str) -> int | None:
        elements = self.elements(digest)
        return None if elements is None else elements * self._itemsize

    def _adapter(
        self, ref: AdapterRef, gpu_adapter: GpuAdapter | None, placed: Mapping[int, PlacedImage]
    ) -> AdapterStatus:
        digest, size = ref.digest, self._itemsize
        common = (
            *(ref.tenant, ref.name, ref.version, digest),
            self._residency(digest),
            gpu_adapter.layout.elements * size if gpu_adapter else self._image_bytes(digest),
            self._gpu.uses(digest),
            digest in self._pins,
        )
        image = placed.get(gpu_adapter.slot) if gpu_adapter else None
        if gpu_adapter is None or image is None or image.layout is not gpu_adapter.layout:
            return AdapterStatus(*common)
        return AdapterStatus(
            *common,
            rank=image.layout.max_rank,
            leases=gpu_adapter.leases,
            kept=self._gpu.is_pinned(digest),
            arriving=gpu_adapter.copying,
            pieces=tuple((p.offset * size, (p.end - p.begin) * size) for p in image.pieces),
        )


@dataclass(slots=True)
class _Seen:
    ref: AdapterRef
    elements: int | None


class SeenAdapters:
    """Adapters most recently requested, pinned or prefetched, and the sizes of their images.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._lock = threading.Lock()

    def add(self, ref: AdapterRef) -> None:
        """Remember an adapter that was requested, pinned or prefetched."""
        with self._lock:
            seen = self._seen.pop(ref.digest, None)
            self._seen[ref.digest] = _Seen(ref, seen.elements if seen else None)
            if len(self._seen) > _MAX_SEEN:
                del self._seen[next(iter(self._seen))]

    def remove(self, digest: str) -> None:
        """Remember an adapter no longer."""
        with self._lock:
            self._seen.pop(digest, None)

    def measured(self, digest: str, elements: int) -> None:
        """Remember the size of an adapter's image on one GPU, if the adapter is remembered."""
        with self._lock:
            if digest in self._seen:
                self._seen[digest].elements = elements

    def ref(self, digest: str) -> AdapterRef | None:
        """Return the remembered adapter with this digest; None if there is none."""
        seen = self._seen.get(digest)
        return seen.ref if seen else None

    def elements(self, digest: str) -> int | None:
        """Return the elements of an adapter's image; None if unknown."""
        seen = self._seen.get(digest)
        return seen.elements if seen else None

    def refs(self) -> dict[str, AdapterRef]:
        """Return all remembered adapters, by digest."""
        with self._lock:
            return {digest: seen.ref for digest, seen in self._seen.items()}


@dataclass(slots=True)
class Hop:
    """Means, over loads from one tier to the next one nearer to the GPU, of a load's time and size.

    The means are exponentially weighted.

    seconds: mean time of a load, without waiting for a thread or for earlier loads.
    size_bytes: mean size of the loaded images; 0 while nothing was measured.
    """

    seconds: float = 0.0
    size_bytes: float = 0.0

    def add(self, seconds: float, size_bytes: int) -> None:
        """Include a finished load in the means.

        size_bytes: size of the image.
        """
        weight = _WEIGHT if self.size_bytes else 1.0
        self.seconds += weight * (seconds - self.seconds)
        self.size_bytes += weight * (size_bytes - self.size_bytes)

    def scaled(self, latency_s: float, bytes_per_s: float) -> tuple[float, float]:
        """Scale an assumed latency and rate so that they predict the measured mean time for a load
        of mean size.

        Returns (latency, rate), both changed by the same factor; unchanged while nothing was
        measured.

        latency_s, bytes_per_s: the assumed latency and rate.
        """
        if not self.size_bytes:
            return latency_s, bytes_per_s
        slower = self.seconds / (latency_s + self.size_bytes / bytes_per_s)
        return latency_s * slower, bytes_per_s / slower


class LoadTimes:
    """Mean load times between all tiers. Written by one thread; any thread may call `costs`."""

    def __init__(self) -> None:
        self.downloads, self.reads, self.copies = Hop(), Hop(), Hop()

    def costs(self) -> LoadCosts:
        """Return the measured costs of loads; LoadCosts' defaults where nothing was measured."""
        default = _UNMEASURED
        host = self.copies.scaled(default.host_latency_s, default.host_bytes_per_s)
        disk = self.reads.scaled(default.disk_latency_s, default.disk_bytes_per_s)
        remote = self.downloads.scaled(default.remote_latency_s, default.remote_bytes_per_s)
        return LoadCosts(*host, *disk, *remote)
