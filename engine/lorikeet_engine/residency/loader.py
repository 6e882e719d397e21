"""Loads of adapters from the remote store to the disk and to the host, on background threads.

A blob (an adapter's safetensors file) is packed once: its image, which the GPU reads, is kept on
the disk (disk/image_file.py). An adapter that is loaded only for temporary pins gets no image file,
nor does a transient one (AdapterRef), nor one with vectors (vector_packing.py), whose image depends
on the base model's weights.

Downloads, packing and writing of images have separate threads, so a source that hangs or a slow
disk delays no adapter that is on the disk already. A blob that does not fit on a full or broken
disk is downloaded into memory, one blob at a time, and packed from there.
"""

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.adapter_format import AdapterLimits, BaseShape, read_spec
from lorikeet_engine.errors import (
    AdapterError,
    AdapterLoadFailed,
    AdapterMissing,
    AdapterRejected,
    AdapterTooLarge,
    LoadFault,
)
from lorikeet_engine.residency.base_rows import BaseRows
from lorikeet_engine.residency.blob_packing import pack
from lorikeet_engine.residency.checksums import LayerSums
from lorikeet_engine.residency.disk.cache import DiskCache, is_disk_error, memory_file
from lorikeet_engine.residency.disk.image_file import ImageFile, ImageWriter
from lorikeet_engine.residency.disk.incoming_blobs import IncomingBlobs
from lorikeet_engine.residency.host_arena import HostArena
from lorikeet_engine.residency.packed_image import PackedLayout
from lorikeet_engine.residency.workers import Workers

log = logging.getLogger(__name__)

_DOWNLOADERS = 8
_PACKERS = 2
_DOWNLOADS = 3  # of one load: other processes may remove a downloaded blob
_SOURCE_HANGS_S = 3.0
"""Seconds that a failed download must have taken to show that the store it reads from hangs.

A download that fails sooner, or while other downloads succeed, says nothing about the store.
"""
_SOURCE_RETRY_S = 10.0
"""Seconds until a client should retry after a failed load."""
_REPAIR_S = 300.0
"""Seconds until a client should retry an adapter whose blob is missing, damaged or not acceptable:
each load fails until an admin has replaced or repaired the blob.
"""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Result of a load that has ended.

    residency: HOST if the packed adapter is on the host, where it is held until the receiver of
        this result releases it. DISK without an error if DISK was asked for, or if the host had no
        memory. If the host had no memory, try again once the host arena's `frees` differs from this
        result's. REMOTE if the load failed.
    error: reason why the load failed; None if it did not.
    frees: if the host had no memory: the host arena's `frees` before the attempt, a counter that
        grows when memory may have become free.
    elements: size of the loaded image on one GPU; None if no image was loaded to the host.
    read_s: seconds from the disk to the host. If the blob was packed while another process wrote
        it: CPU seconds of the packing.
    download_s: seconds of the blob's download; None if the blob was on the disk already.
    """

    ref: AdapterRef
    residency: Residency
    error: AdapterError | None
    frees: int
    elements: int | None
    read_s: float
    download_s: float | None


@dataclass(frozen=True, slots=True)
class _SourceFailure:
    """Failure of a download whose source (the adapter store) hung, and the monotonic time of the
    failure.
    """

    error: Exception
    at_s: float


@dataclass(slots=True)
class _LoadTask:
    """A load that has not ended.

    tier: tier to load the adapter to, DISK or HOST.
    urgent: whether the load precedes loads that are not urgent.
    passing: whether the load is for a temporary pin, so that no image is written to the disk.
    asked_s: time.monotonic() of the first call of `load`.
    started: whether a thread has begun the load.
    reading_since_s: time.perf_counter() at which reading from the disk began.
    without_disk: whether the adapter's file is downloaded to memory instead of the disk.
    downloads: number of downloads begun for this load.
    download_s: seconds of the last download; None if there was none.
    fault: cause to report if the load fails for any reason but a disk error.
    """

    ref: AdapterRef
    tier: Residency
    urgent: bool
    passing: bool
    asked_s: float
    started: bool = False
    without_disk: bool = False
    downloads: int = 0
    download_s: float | None = None
    reading_since_s: float = 0.0
    fault: LoadFault = LoadFault.ADAPTER


class Loader:
    """Loader of adapters from the store to the disk, and from the disk to host memory.

    Concurrent calls for one digest share a load.

    gpu_elements: size of the GPU's arena, which limits the size of images.
    on_result: called on the loading threads when `results` has a new result, or when host memory
        may have become free.
    world: number of tensor parallel ranks that share the model.
    base: rows of the base model, on which DoRA's gains and biases depend; None in processes without
        the model, which load no such adapters.
    """

    def __init__(
        self,
        shape: BaseShape,
        limits: AdapterLimits,
        disk: DiskCache,
        host: HostArena,
        gpu_elements: int,
        on_result: Callable[[], None],
        world: int,
        base: BaseRows | None = None,
    ) -> None:
        self._base = base
        self._shape, self._limits, self._world = shape, limits, world
        self._disk, self._host = disk, host
        self._max_elements = min(gpu_elements, host.elements // world)
        self._on_result = on_result
        self.incoming_blobs = IncomingBlobs(
            shape, limits, host, self._max_elements, world, on_result, base
        )
        self._lock = threading.RLock()  # guards _tasks and _results
        self._tasks: dict[str, _LoadTask] = {}
        self._results: deque[LoadResult] = deque()
        self._source_failure: _SourceFailure | None = None  # None after a success
        self._downloaded_s = -math.inf  # time of the last successful download
        self._closed = False
        self._downloaders = Workers(_DOWNLOADERS, "download")
        self._packers = Workers(_PACKERS, "pack")
        self._verifiers = ThreadPoolExecutor(_PACKERS, "lorikeet-verify")
        self._images = ImageWriter(disk, host, on_result)
        self._streamer = Workers(1, "stream")  # one, since a blob in memory may have any size

    def load(
        self, ref: AdapterRef, tier: Residency, *, urgent: bool, passing: bool = False
    ) -> None:
        """Load an adapter to DISK or HOST.

        If the adapter is being loaded already, its load continues to HOST if either call asked for
        HOST, and becomes urgent if this call is urgent.

        urgent: whether to load it before adapters that are not urgent.
        passing: whether the load is for a temporary pin. If all calls for a load say so, its image
            is not written to the disk.
        """
        with self._lock:
            task = self._tasks.get(ref.digest)
            if task is None:
                task = _LoadTask(ref, tier, urgent, passing, asked_s=time.monotonic())
                self._tasks[ref.digest] = task
            elif task.urgent >= urgent and task.tier >= tier and task.passing <= passing:
                return
            task.tier, task.urgent = max(task.tier, tier), task.urgent or urgent
            task.passing = task.passing and passing
            if task.started:
                return
        if self._disk.holds(ref.digest):
            self._submit(self._packers, task, partial(self._begin, task, self._from_disk))
        else:
            self._submit(self._downloaders, task, partial(self._begin, task, self._download))

    def results(self) -> list[LoadResult]:
        """Return the results of all loads that have ended since the last call."""
        return [self._results.popleft() for _ in range(len(self._results))]

    def close(self) -> None:
        """Begin no more loads; loads in progress still end, completed or failed."""
        self._closed = True
        workers = self._downloaders, self._packers, self._images, self._streamer
        for each in (*workers, self.incoming_blobs):
            each.close()
        self._verifiers.shutdown(wait=False, cancel_futures=True)

    def _submit(self, workers: Workers, task: _LoadTask, work: Callable[[], None]) -> None:
        workers.submit(work, urgent=task.urgent, tenant=task.ref.tenant)

    def _begin(self, task: _LoadTask, work: Callable[[_LoadTask], None]) -> None:
        with self._lock:
            if task.started:
                return
            task.started = True
        self._attempt(task, work)

    def _attempt(self, task: _LoadTask, work: Callable[[_LoadTask], None]) -> None:
        try:
            work(task)
        except AdapterError as error:
            kept = isinstance(error, AdapterTooLarge | AdapterMissing)
            kind = type(error) if kept else AdapterLoadFailed
            error.fields.setdefault("retry_after_s", _REPAIR_S)
            self._finish(task, error=_error_about(task.ref, error, kind))
        except Exception as error:  # its text stays in the log: it may name folders
            if self._closed:  # closing made it fail, and no request waits for it
                return
            if is_disk_error(error) and self._retries_without_disk(task, error):
                return
            log.exception("adapter_load_failed", extra={"adapter": str(task.ref)})
            failure = AdapterLoadFailed(
                f"its weights could not be brought to the engine ({type(error).__name__}): try "
                f"again in {_SOURCE_RETRY_S:g} s, or ask your admin to look into the log",
                retry_after_s=_SOURCE_RETRY_S,
                fault=LoadFault.DISK if is_disk_error(error) else task.fault,
            )
            self._finish(task, error=_error_about(task.ref, failure, AdapterLoadFailed))

    def _retries_without_disk(self, task: _LoadTask, error: Exception) -> bool:
        """Continue a failed load by downloading to memory instead of the disk.

        Returns False if that is impossible: if this load has done so already, if it is a load to
        the disk, or if the system has no files in memory.

        error: failure of the load, for the log.
        """
        with self._lock:
            if task.without_disk or task.tier is Residency.DISK or not hasattr(os, "memfd_create"):
                return False
            task.without_disk = True
        log.warning("disk_left_out", extra={"adapter": str(task.ref), "error": str(error)})
        self._submit(self._streamer, task, partial(self._attempt, task, self._stream))
        return True

    def _stream(self, task: _LoadTask) -> None:
        with memory_file() as blob:
            self._fetch(task, partial(self._disk.fetch_to, task.ref, blob))
            task.reading_since_s = time.perf_counter()
            self._pack(task, blob)

    def _download(self, task: _LoadTask) -> None:
        task.downloads += 1
        self._fetch(task, partial(self._disk.fetch, task.ref))
        if not self._stays_on_disk(task):
            self._submit(self._packers, task, partial(self._attempt, task, self._from_disk))

    def _fetch(self, task: _LoadTask, fetch: Callable[[], None]) -> None:
        if (failure := self._source_failure) and task.asked_s < failure.at_s:
            task.fault = LoadFault.STORE
            raise failure.error  # this task was queued behind the hanging download
        began_s = time.monotonic()
        try:
            fetch()
        except Exception as error:
            failed_s = time.monotonic()
            hung = failed_s - began_s >= _SOURCE_HANGS_S and self._downloaded_s < began_s
            if hung and not is_disk_error(error):
                task.fault = LoadFault.STORE
                self._source_failure = _SourceFailure(error, failed_s)
            raise
        self._source_failure = None
        self._downloaded_s = time.monotonic()
        task.download_s = self._downloaded_s - began_s

    def _from_disk(self, task: _LoadTask) -> None:
        if self._stays_on_disk(task):
            return
        task.reading_since_s = time.perf_counter()
        try:
            if not self._take_incoming(task) and not self._read_image(task):
                self._pack_blob(task)
        except FileNotFoundError as error:  # removed by others, or damaged without a blob
            if task.downloads < _DOWNLOADS:
                self._submit(self._downloaders, task, partial(self._attempt, task, self._download))
            elif not self._retries_without_disk(task, error):
                raise

    def _stays_on_disk(self, task: _LoadTask) -> bool:
        """End a load to the disk; return False for a load to the host, which goes on."""
        with self._lock:
            if stays := task.tier is Residency.DISK:
                self._finish(task, Residency.DISK)
            return stays

    def _take_incoming(self, task: _LoadTask) -> bool:
        """End the load with the image that was packed while another process wrote the file.

        Returns False if there is no such image.
        """
        image = self.incoming_blobs.take(task.ref.digest, self._disk.blob)
        if image is not None:
            elements, packed_s = image.layout.elements, image.packed_s
            self._finish(task, Residency.HOST, elements=elements, read_s=packed_s)
            self._keep_image(task, image.layout)
        return image is not None

    def _read_image(self, task: _LoadTask) -> bool:
        """Load an adapter's image file to the host; return False if the file is missing or damaged.

        A damaged file is removed. If the host's memory does not suffice, this method ends the load
        and returns True.
        """
        ref = task.ref
        try:
            image = ImageFile.of(self._disk.image(ref.digest), self._shape, self._world)
            self._fill(task, image.layout, image.read)
        except FileNotFoundError:
            return False
        except (AdapterRejected, OSError) as error:
            log.warning("image_damaged", extra={"adapter": str(ref), "error": str(error)})
            self._disk.remove_image(ref.digest)
            return False
        return True

    def _pack_blob(self, task: _LoadTask) -> None:
        """Read an adapter's file from the disk and pack it into the host's memory."""
        blob = self._disk.blob(task.ref.digest)
        if task.download_s is not None:
            self._pack(task, blob)
            return
        number = blob.stat().st_ino

        def verify() -> None:
            self._disk.verify(task.ref.digest)
            if blob.stat().st_ino != number:
                raise FileNotFoundError(f"{blob.name} was replaced while it was packed")

        try:
            self._pack(task, blob, verify)
        except AdapterError:
            verify()  # damage can look like any other fault of the blob
            raise

    def _pack(self, task: _LoadTask, blob: Path, verify: Callable[[], None] | None = None) -> None:
        """Pack an adapter's blob (safetensors file) into host memory.

        verify: raises if the blob is damaged; runs at the same time as the packing.
        """
        spec = read_spec(blob, self._shape, self._limits)
        layout = PackedLayout.of(spec, self._shape, self._world)

        def write(out: torch.Tensor) -> LayerSums:
            verifying = self._verifiers.submit(verify) if verify else None
            try:
                return pack(blob, spec, layout, out, self._base)
            finally:
                if verifying is not None:
                    verifying.result()

        if self._fill(task, layout, write):
            self._keep_image(task, layout)

    def _keep_image(self, task: _LoadTask, layout: PackedLayout) -> None:
        # gains and biases fit one base model only, and a file in the cache may be read for another
        if not (task.passing or task.ref.transient) and layout.vectors is None:
            self._images.write(task.ref, urgent=task.urgent)

    def _fill(
        self, task: _LoadTask, layout: PackedLayout, write: Callable[[torch.Tensor], LayerSums]
    ) -> bool:
        """Write an adapter's packed image into newly reserved memory on the host, and end the load.

        If too little memory is free, ends the load with the adapter on the disk and returns False,
        or raises AdapterLoadFailed if the blob is not on the disk.

        write: writes the image into the reserved memory and returns its layers' checksums.
        """
        layout.check_size(self._max_elements)
        digest, frees = task.ref.digest, self._host.frees
        out = self._host.reserve(digest, layout, for_request=task.urgent)
        if out is None:
            self.incoming_blobs.drop_untaken()
            if task.without_disk:  # each further try would download the blob again
                problem = "the disk cannot take it, and the host has no room for it yet: try again"
                raise AdapterLoadFailed(
                    problem, retry_after_s=_SOURCE_RETRY_S, fault=LoadFault.DISK
                )
            self._finish(task, Residency.DISK, frees=frees)
            return False
        try:
            sums = write(out)
        except BaseException:
            self._host.abandon(digest)
            raise
        self._host.commit(digest, sums)
        read_s = time.perf_counter() - task.reading_since_s
        self._finish(task, Residency.HOST, elements=layout.elements, read_s=read_s)
        return True

    def _finish(
        self,
        task: _LoadTask,
        residency: Residency = Residency.REMOTE,
        error: AdapterError | None = None,
        frees: int = 0,
        elements: int | None = None,
        read_s: float = 0.0,
    ) -> None:
        result = LoadResult(task.ref, residency, error, frees, elements, read_s, task.download_s)
        with self._lock:
            del self._tasks[task.ref.digest]
            self._results.append(result)
        self._on_result()


def _error_about(ref: AdapterRef, error: AdapterError, kind: type[AdapterError]) -> AdapterError:
    """Return a copy of an error, of class `kind`, that names the adapter."""
    return kind(f"{ref}: {error.message}", **{**error.fields, "adapter": str(ref)})
