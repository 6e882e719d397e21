"""Driver for tests: tiers of a few adapters' size, stepped by hand."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path

import torch

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.adapter_format import AdapterLimits
from lorikeet_engine.errors import AdapterLoadFailed, AdapterTooLarge
from lorikeet_engine.residency.checksums import layer_sums
from lorikeet_engine.residency.gpu.adapters import GpuAdapters, Lease, LoadReason
from lorikeet_engine.residency.packed_image import PackedImage, PackedLayout
from lorikeet_engine.residency.tiers import Tiers
from lorikeet_engine.telemetry.status import TierStatus
from tests.engine.blobs import SHAPE, Ranks, Shelf, elements, everywhere

LIMITS = AdapterLimits(max_rank=16, max_bytes=1 << 20)
ONE = everywhere(4)
SIZE = elements(ONE)  # of an adapter of rank 4, elements


class TiersDriver:
    """Tiers of a few adapters' size, stepped as an engine would."""

    def __init__(
        self,
        shelf: Shelf,
        folder: Path,
        gpu: float,
        host: float,
        slots: int = 8,
        limits: AdapterLimits = LIMITS,
        dtype: torch.dtype = torch.float32,
        disk_bytes: int = 1 << 30,
        device: str = "cpu",
    ) -> None:
        self.shelf, self.folder = shelf, folder
        self.woken = threading.Event()
        self.tiers = Tiers(
            SHAPE,
            limits,
            shelf,
            device=torch.device(device),
            dtype=dtype,
            gpu_bytes=int(gpu * SIZE) * dtype.itemsize,
            host_bytes=int(host * SIZE) * dtype.itemsize,
            disk_bytes=disk_bytes,
            cache_dir=folder,
            max_slots=slots,
            wake=self.woken.set,
        )

    def until(self, holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
        end_s = time.monotonic() + timeout_s
        while True:
            again_s = self.tiers.advance()
            if holds():
                return
            left_s = end_s - time.monotonic()
            assert left_s > 0, "nothing woke the engine in time"
            self.woken.wait(left_s if again_s is None else min(left_s, again_s))
            self.woken.clear()

    def load(self, *refs: AdapterRef, to: Residency = Residency.GPU) -> None:
        def there() -> bool:
            for ref in refs:  # every time, as an engine does: it may have been evicted again
                self.tiers.request(ref)
            return all(self.tiers.residency(ref) >= to for ref in refs)

        self.until(there)

    def lease(self, ref: AdapterRef) -> Lease:
        self.load(ref)
        lease = self.tiers.lease(ref)
        assert lease is not None
        self.shelf.check(ref, self.tiers.weights, lease.slot)
        return lease

    def failure(self, ref: AdapterRef) -> Exception:
        self.tiers.request(ref)
        caught = []

        def failed() -> bool:
            try:
                assert self.tiers.lease(ref) is None
            except (AdapterLoadFailed, AdapterTooLarge) as error:
                caught.append(error)
            return bool(caught)

        self.until(failed)
        return caught[0]

    def image(self, ref: AdapterRef) -> Path:
        """Wait for the image's file, and return its path."""
        end_s = time.monotonic() + 10.0
        while not self.tiers._disk.has_image(ref.digest):
            assert time.monotonic() < end_s, f"nobody wrote the image of {ref}"
            time.sleep(0.001)
        return self.folder / self.tiers._disk.image_name(ref.digest)

    @property
    def gpu(self) -> TierStatus:
        return self.tiers.status()[Residency.GPU]

    def report(self) -> dict[str, tuple[Residency, int, bool]]:
        return {r.ref.name: (r.residency, r.leases, r.pinned) for r in self.tiers.adapters()}


def finish_sums(tiers: Tiers) -> None:
    """Wait for pending checksums; in an engine, checksums are complete before the next check."""
    under_way = tiers._checks._under_way
    if under_way is not None:
        wait([under_way.totals], 10)


def put(gpu: GpuAdapters, ref: AdapterRef, layout: PackedLayout) -> None:
    """Place an adapter of zeros on the GPU, which must have memory for it."""
    zeros = torch.zeros(layout.elements)
    image = PackedImage(layout, zeros, layer_sums(zeros, layout.layers))
    copy = gpu.place(ref, image, LoadReason.PIN)
    assert copy is not None
    assert gpu.copy_finished(ref.digest, int(copy.total.wait()))


def make(shelf: Shelf, names: str, ranks: Ranks = ONE) -> list[AdapterRef]:
    return [shelf.make(name, ranks) for name in names]
