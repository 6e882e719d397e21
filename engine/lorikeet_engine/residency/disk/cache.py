"""The disk cache: verified blobs and packed images in a folder that several processes may share.

A blob is an adapter's safetensors file, and an image the adapter packed for the GPU. A blob's file
is named by its digest; an image's, by the digest and a fingerprint of the model that it was packed
for. Both appear complete, by one rename. A pin is a shared lock on a file, so no process removes a
file that another process has pinned.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.adapter_format import blob_digest
from lorikeet_engine.errors import AdapterLoadFailed
from lorikeet_engine.residency.changes import OnChange, ignore_change
from lorikeet_engine.residency.disk.index import FILE, DiskIndex
from lorikeet_engine.telemetry.status import TierStatus

log = logging.getLogger(__name__)

_DIGEST = re.compile(r"[0-9a-f]{64}")
_PART = ".part"
_LOCK = ".lock"
_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})
_ABANDONED_S = 3600.0
_TRIM_GRACE_S = 10.0
"""Seconds for which a file just added or used is not trimmed, so that its writer can pin it."""


class AdapterSource(Protocol):
    """Interface to the store from which missing adapters' files are downloaded."""

    def fetch(self, ref: AdapterRef, path: Path) -> str | None:
        """Download an adapter's blob (safetensors file) to `path`, replacing the file there.

        Returns the blob's SHA-256, 64 hex digits, if it was computed during the download. Called on
        loading threads. May raise any exception; AdapterMissing if the store answers that it has no
        such blob.
        """


class DiskCache:
    """Adapters' blobs (safetensors files) and images (packed for the GPU) in a folder, within a
    budget of bytes. Thread-safe.

    Beyond the budget, the least recently used files are removed. Pinned files and the file just
    added may exceed the budget. Images with other fingerprints (packed for another model), which
    only other processes can use, count towards the budget and are removed in the same order.
    """

    def __init__(
        self,
        folder: Path,
        budget_bytes: int,
        source: AdapterSource,
        fingerprint: str,
        on_change: OnChange = ignore_change,
    ) -> None:
        """Open the cache in a folder, which is created if it is missing.

        budget_bytes: limit on the size of all files together.
        source: store from which adapters' files (blobs) that are not in the folder are downloaded.
        fingerprint: 16 hex digits, equal for all processes that can share packed images.
        on_change: called with the digest of a file that this process adds or removes.
        """
        self._folder = folder
        self.budget_bytes = budget_bytes
        self._source = source
        self._fingerprint = fingerprint
        self._on_change = on_change
        self._evictions = self._checksum_failures = 0
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._remove_abandoned()
        self._index = DiskIndex(folder, self._usable)
        self._pins = _PinnedFiles(folder, self._names, self._index)

    def holds(self, digest: str) -> bool:
        """Whether the folder has an adapter's safetensors file or packed image, verified.

        Does not call the file system. Changes by other processes are seen at the next call of
        `changed`.
        """
        return any(map(self._index.holds, self._names(digest)))

    def changed(self) -> set[str] | None:
        """List the folder; return the digests of all adapters that this process can load from it.

        Returns None if no process has changed the folder since the last call. Only one thread may
        call this at a time.
        """
        return self._index.changed()

    def trim(self) -> None:
        """Evict files until the folder is within its budget, in case other processes exceeded it.

        Files added or used in the last _TRIM_GRACE_S seconds stay. Does nothing if the folder was
        within its budget at the last call of `changed`.
        """
        if self._index.bytes > self.budget_bytes:
            with self._exclusive():
                self._evict(used_before_ns=time.time_ns() - int(1e9 * _TRIM_GRACE_S))

    def status(self) -> TierStatus:
        """Return the disk tier's status.

        Adapters and bytes are those that the last call of `changed` found in the folder. Evictions
        and failed checksums are this process's alone.
        """
        index, budget = self._index, self.budget_bytes
        counted = self._evictions, self._checksum_failures
        return TierStatus(index.adapters, index.bytes, budget, budget, *counted)

    def fetch(self, ref: AdapterRef) -> None:
        """Fetch and verify an adapter's blob (safetensors file), unless the folder has the blob or
        its packed image already.

        If several threads or processes need the same blob at once, one of them fetches it while the
        others wait.

        Raises AdapterLoadFailed if the content does not match the digest; errors of the source pass
        through.
        """
        if not _DIGEST.fullmatch(ref.digest):
            raise AdapterLoadFailed(f"{ref}: {ref.digest!r} is no digest", adapter=str(ref))
        if self._uses(ref.digest):
            return
        with self._fetch_lock(ref.digest):
            if not self._uses(ref.digest):
                self._fetch(ref)

    def fetch_to(self, ref: AdapterRef, path: Path) -> None:
        """Fetch an adapter's blob (safetensors file) into `path`, and verify it.

        Raises AdapterLoadFailed if the content does not match the digest; errors of the source pass
        through.
        """
        digest = self._source.fetch(ref, path) or blob_digest(path)
        if digest != ref.digest:
            raise AdapterLoadFailed(
                f"{ref}: the fetched blob has digest {digest}, not {ref.digest}: the stored "
                "blob is damaged; remove it from the store and register the adapter again",
                adapter=str(ref),
            )

    def blob(self, digest: str) -> Path:
        """Return the path of an adapter's blob (safetensors file), and mark it as used.

        The file can be removed at any time afterwards. Raises FileNotFoundError if the folder has
        no such file.
        """
        return self._index.use(digest)

    def verify(self, digest: str) -> None:
        """Read all of an adapter's blob (safetensors file) in the folder and compare its SHA-256
        with its digest.

        A damaged blob is removed. Raises FileNotFoundError if there is no such blob or if it was
        damaged.
        """
        if blob_digest(self._folder / digest) != digest:
            log.warning("blob_damaged", extra={"file": digest})
            self._remove_damaged(digest)
            raise FileNotFoundError(f"{digest} was damaged")

    def image(self, digest: str) -> Path:
        """Return the path of the file with an adapter's packed image, and mark it as used.

        The file can be removed at any time afterwards. Raises FileNotFoundError if the folder has
        no such file.
        """
        return self._index.use(self.image_name(digest))

    def image_name(self, digest: str) -> str:
        """Return the file name of an adapter's packed image."""
        return f"{digest}.{self._fingerprint}"

    def has_image(self, digest: str) -> bool:
        """Whether the folder has an adapter's packed image."""
        return (self._folder / self.image_name(digest)).exists()

    @contextlib.contextmanager
    def adding_image(self, digest: str) -> Iterator[Path]:
        """Yield a path to write an adapter's packed image to.

        If the block ends without an exception, the image is added. From then on the adapter's blob
        is the first file to be evicted, unless it is used again.
        """
        name = self.image_name(digest)
        with self._adding(name, self._folder / f"{name}.{uuid.uuid4().hex}{_PART}") as part:
            yield part
            with contextlib.suppress(FileNotFoundError):
                os.utime(self._folder / digest, (0, 0))

    def remove_image(self, digest: str) -> None:
        """Remove an adapter's packed image that was found damaged, even if it is pinned."""
        self._remove_damaged(self.image_name(digest))

    def pin(self, digest: str) -> bool:
        """Protect an adapter's files, blob or packed image, from eviction, from the next call of
        `apply_pins` on.

        Returns whether one of the files is protected already, by an earlier `apply_pins`. Does not
        call the file system.
        """
        return self._pins.add(digest)

    def unpin(self, digest: str) -> None:
        """Allow the eviction of an adapter's files (blob, packed image), from the next call of
        `apply_pins` on.
        """
        self._pins.remove(digest)

    def apply_pins(self) -> None:
        """Lock the files of newly pinned adapters; unlock the files of adapters no longer pinned.

        Files that are not in the folder yet are locked by a later call. Only one thread may call
        this at a time.
        """
        self._pins.apply()

    def close(self) -> None:
        """Give up all pins. The files stay."""
        self._pins.close()

    def _uses(self, digest: str) -> bool:
        """Mark an adapter's packed image or safetensors file as used; return whether it exists."""
        for find in (self.image, self.blob):
            with contextlib.suppress(FileNotFoundError):
                find(digest)
                return True
        return False

    def _fetch(self, ref: AdapterRef) -> None:
        # Under the lock of the digest, so a file left behind by a crash can be overwritten.
        with self._adding(ref.digest, self._folder / f"{ref.digest}{_PART}") as part:
            self.fetch_to(ref, part)

    def _remove_damaged(self, name: str) -> None:
        self._checksum_failures += 1
        (self._folder / name).unlink(missing_ok=True)
        self._index.remove(name)
        self._on_change(name[:64])

    def _names(self, digest: str) -> tuple[str, ...]:
        """Return the names of an adapter's files, to be tried in this order: image, blob.

        Returns () for an invalid digest.
        """
        return (self.image_name(digest), digest) if _DIGEST.fullmatch(digest) else ()

    def _usable(self, name: str) -> bool:
        return len(name) == 64 or name.endswith(self._fingerprint)

    @contextlib.contextmanager
    def _adding(self, name: str, part: Path) -> Iterator[Path]:
        path = self._folder / name
        try:
            yield part
            with part.open("rb") as file:
                os.fsync(file.fileno())
            with self._exclusive():
                if not path.exists():  # never replace a file that may have been pinned meanwhile
                    part.replace(path)
                self._index.add(path)
                self._on_change(name[:64])
                self._evict(keep=path)
        finally:
            part.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _fetch_lock(self, digest: str) -> Iterator[None]:
        """Run the block while no other thread of any process fetches the adapter's file."""
        path = self._folder / f"{digest}{_LOCK}"
        while True:
            descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                break
            os.close(descriptor)  # the previous owner removed the file
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Run the block while no other thread of any process adds or evicts files."""
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _evict(self, keep: Path | None = None, used_before_ns: float = float("inf")) -> None:
        files = []
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                if FILE.fullmatch(path.name):
                    files.append((stat.st_mtime_ns, stat.st_size, path))
        excess = sum(size for _, size, _ in files) - self.budget_bytes
        for used_ns, size, path in sorted(files):
            if excess <= 0:
                return
            if path == keep or used_ns >= used_before_ns:
                continue
            descriptor = _lock_file(path, fcntl.LOCK_EX)
            if descriptor is not None:
                path.unlink(missing_ok=True)
                os.close(descriptor)
                self._index.remove(path.name)
                self._on_change(path.name[:64])
                self._evictions += self._usable(path.name) and not self.holds(path.name[:64])
                excess -= size
                log.info("disk_file_removed", extra={"file": path.name, "size_bytes": size})

    def _remove_abandoned(self) -> None:
        for part in self._folder.glob(f"*{_PART}"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - part.stat().st_mtime > _ABANDONED_S:
                    part.unlink()
        for lock in self._folder.glob(f"*{_LOCK}"):
            descriptor = _lock_file(lock, fcntl.LOCK_EX)
            if descriptor is not None:
                lock.unlink()
                os.close(descriptor)


def is_disk_error(error: BaseException | None) -> bool:
    """Whether this machine's disk caused an error.

    Another machine may then succeed with the same load.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            return True
        error = error.__cause__
    return False


@contextlib.contextmanager
def memory_file() -> Iterator[Path]:
    """Yield the path of an empty file in memory, to use instead of a file on a disk.

    The memory is freed when the block ends. Linux only. Raises OSError if the file cannot be
    created.
    """
    descriptor = os.memfd_create("adapter")
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


class _HeldFile(NamedTuple):
    """A file that stays locked while its descriptor is open."""

    name: str
    descriptor: int


class _PinnedFiles:
    """Pinned adapters of a disk cache, and the locks that keep their files from being removed.

    `add` and `remove` never call the file system, never block, and may be called from any thread.
    `apply` and `close` call the file system, and must be called from one thread only.
    """

    def __init__(
        self, folder: Path, names: Callable[[str], tuple[str, ...]], index: DiskIndex
    ) -> None:
        """Start without pinned adapters.

        names: returns the names of the files from which an adapter can be loaded, best one first.
        index: the files in the folder.
        """
        self._folder, self._names, self._index = folder, names, index
        self._wanted: set[str] = set()
        self._held: dict[str, _HeldFile] = {}

    def add(self, digest: str) -> bool:
        """Pin an adapter: the next `apply` locks one of its files.

        Returns whether one of its files is locked already.
        """
        self._wanted.add(digest)
        held = self._held.get(digest)
        return held is not None and self._index.holds(held.name)

    def remove(self, digest: str) -> None:
        """Unpin an adapter: the next `apply` unlocks its file."""
        self._wanted.discard(digest)

    def apply(self) -> None:
        """Lock one file of each pinned adapter that the folder has, and unlock all other files."""
        wanted = set(self._wanted)
        for digest, held in list(self._held.items()):
            # a file without a link is an image that was found damaged and removed
            if digest not in wanted or not os.fstat(held.descriptor).st_nlink:
                os.close(self._held.pop(digest).descriptor)
        for digest in wanted - self._held.keys():
            for path in (self._folder / name for name in self._names(digest)):
                descriptor = _lock_file(path, fcntl.LOCK_SH)
                if descriptor is not None:
                    self._held[digest] = _HeldFile(path.name, descriptor)
                    self._index.add(path)
                    break

    def close(self) -> None:
        """Unlock all files. They stay in the folder."""
        self._wanted.clear()
        self.apply()


def _lock_file(path: Path, kind: int) -> int | None:
    """Lock a file without waiting; return the descriptor that holds the lock.

    Returns None if another lock prevents this one, if the file is gone, or on an error, which is
    logged.

    kind: fcntl.LOCK_SH or fcntl.LOCK_EX.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:  # such as too many open files: a pin can wait
        log.warning("disk_file_not_locked", extra={"file": path.name, "error": str(error)})
        return None
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            return descriptor
    except BlockingIOError:
        pass
    except OSError as error:
        log.warning("disk_file_not_locked", extra={"file": path.name, "error": str(error)})
    os.close(descriptor)
    return None
