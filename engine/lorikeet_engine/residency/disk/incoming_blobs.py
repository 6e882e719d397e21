"""Packing of blobs that another process of this machine is still writing.

A blob is an adapter's safetensors file. It can be trusted only once it is complete, verified, and
in the disk cache under its digest. Until then no load uses the image packed from the blob. The
image is dropped if the blob's file vanishes, if other images need the memory, or after LONGEST_S
seconds.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from lorikeet_engine.adapter_format import AdapterLimits, BaseShape, read_spec
from lorikeet_engine.adapter_format.header import MAX_HEADER_BYTES
from lorikeet_engine.errors import AdapterError
from lorikeet_engine.residency.base_rows import BaseRows
from lorikeet_engine.residency.blob_packing import pack
from lorikeet_engine.residency.disk.cache import memory_file
from lorikeet_engine.residency.host_arena import HostArena
from lorikeet_engine.residency.packed_image import PackedLayout

log = logging.getLogger(__name__)

LONGEST_S = 10.0
"""Seconds within which a blob must arrive and be verified.

The packing of a slower blob is given up; the blob is packed once it is complete.
"""
MAX_CONCURRENT = 2
_POLL_S = 0.005
_CLOSING_S = 2.0


class ArrivedImage(NamedTuple):
    """A packed image on the host, held there until its receiver releases it.

    packed_s: processor time of the packing, in seconds.
    """

    layout: PackedLayout
    packed_s: float


class _DroppedError(Exception):
    """Raised to end the packing of an adapter's file that is still being written."""


class _IncomingBlob:
    """A blob (adapter's file) that is packed for the GPU while another process writes it.

    due_s: monotonic time after which the packing is given up.
    file_id: device and inode of the file, once it is open.
    wanted: set once the file is known to be the verified blob.
    ended: set once packing has ended, with or without an image.
    dropped: whether packing must stop, or not begin.
    image: the packed image, if packing has succeeded.
    """

    def __init__(self, file: Path, size_bytes: int) -> None:
        self.file, self.size_bytes = file, size_bytes
        self.due_s = time.monotonic() + LONGEST_S
        self.file_id: tuple[int, int] | None = None
        self.wanted, self.ended = threading.Event(), threading.Event()
        self.dropped = False
        self.image: ArrivedImage | None = None

    def wait_for(self, descriptor: int, end: int) -> None:
        """Wait until the blob (adapter's file) has `end` bytes.

        Raises _DroppedError if the blob is dropped, its file is removed, or `due_s` is past.

        descriptor: descriptor of the file.
        """
        while True:
            status = os.fstat(descriptor)
            if self.dropped or not status.st_nlink or time.monotonic() > self.due_s:
                raise _DroppedError
            if status.st_size >= end:
                return
            time.sleep(_POLL_S)


class IncomingBlobs:
    """Packs blobs (adapters' files) into the host arena while other processes still write them, at
    most MAX_CONCURRENT at once. Thread-safe.
    """

    def __init__(
        self,
        shape: BaseShape,
        limits: AdapterLimits,
        host: HostArena,
        max_elements: int,
        world: int,
        on_end: Callable[[], None],
        base: BaseRows | None = None,
    ) -> None:
        """Start without incoming blobs.

        host: memory for the packed images.
        limits: limits on adapters, checked before a blob is packed.
        max_elements: limit on the size of an image on one GPU.
        world: number of tensor parallel ranks that share the model.
        on_end: called on a packing thread when the packing of a blob has ended, which may free
            memory for other images.
        base: rows of the base model, on which DoRA's gains and biases depend.
        """
        self._base = base
        self._shape, self._limits, self._world = shape, limits, world
        self._host, self._max_elements = host, max_elements
        self._on_end = on_end
        self._lock = threading.Lock()
        self._incoming: dict[str, _IncomingBlob] = {}  # by digest
        self._closed = False

    def begin(self, digest: str, file: Path, size_bytes: int) -> None:
        """Begin to pack a blob (adapter's file), which another process is writing, on a thread of
        its own.

        Does nothing if MAX_CONCURRENT blobs are being packed already. Packing ends without an image
        if the host has no memory for it.

        digest: SHA-256 of the complete blob.
        size_bytes: size of the complete blob.
        """
        with self._lock:
            full = self._closed or len(self._incoming) >= MAX_CONCURRENT
            if full or digest in self._incoming:
                return
            blob = self._incoming[digest] = _IncomingBlob(file, size_bytes)
        threading.Thread(
            target=self._follow, args=(digest, blob), name="lorikeet-incoming", daemon=True
        ).start()

    def take(self, digest: str, find: Callable[[str], Path]) -> ArrivedImage | None:
        """Return an adapter's packed image if it was made while its blob (file) was being written,
        else None.

        Waits until the packing of the blob has ended. An image packed from any other file than the
        verified one is dropped.

        find: returns the path of the verified file with this digest. Its errors are raised.
        """
        with self._lock:
            blob = self._incoming.get(digest)
        if blob is None:
            return None
        status = find(digest).stat()
        if (status.st_dev, status.st_ino) == blob.file_id:
            blob.wanted.set()
        else:  # a different file, which only claimed the digest
            blob.dropped = True
        blob.ended.wait()
        return blob.image

    def drop_untaken(self) -> None:
        """Drop all packed images that no load has taken, since another image needs their memory."""
        with self._lock:
            for blob in self._incoming.values():
                blob.dropped = True

    def close(self) -> None:
        """Stop packing, drop all packed images that no load has taken, and accept no more files."""
        self._closed = True
        self.drop_untaken()
        for blob in list(self._incoming.values()):
            blob.ended.wait(_CLOSING_S)

    def _follow(self, digest: str, blob: _IncomingBlob) -> None:
        try:
            with blob.file.open("rb", buffering=0) as file:
                self._pack(digest, blob, file.fileno())
        except (_DroppedError, AdapterError, OSError) as error:  # the later load reports the fault
            log.info("incoming_blob_left", extra={"digest": digest, "error": repr(error)})
        except Exception:
            log.exception("incoming_blob_failed")
        finally:
            with self._lock:
                del self._incoming[digest]
            blob.ended.set()
            self._on_end()

    def _pack(self, digest: str, blob: _IncomingBlob, descriptor: int) -> None:
        status, began_s = os.fstat(descriptor), time.thread_time()
        blob.file_id = status.st_dev, status.st_ino
        arrived = partial(blob.wait_for, descriptor)
        arrived(8)
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        header = min(8 + length, 8 + MAX_HEADER_BYTES, blob.size_bytes)
        arrived(header)
        with memory_file() as head:  # as long as the blob, since read_spec checks the file's length
            head.write_bytes(os.pread(descriptor, header, 0))
            os.truncate(head, blob.size_bytes)
            spec = read_spec(head, self._shape, self._limits)
        layout = PackedLayout.of(spec, self._shape, self._world)
        layout.check_size(self._max_elements)
        out = self._host.reserve(digest, layout, for_request=False)
        if out is None:
            return
        try:
            file = Path(f"/proc/self/fd/{descriptor}")
            sums = pack(file, spec, layout, out, self._base, arrived=arrived)
            packed_s = time.thread_time() - began_s
            while not blob.wanted.wait(_POLL_S):
                arrived(blob.size_bytes)
        except BaseException:
            self._host.abandon(digest)
            raise
        self._host.commit(digest, sums)
        blob.image = ArrivedImage(layout, packed_s)
