"""The disk cache: verified blobs and packed images in a folder that several processes may share.

A blob's file is named by its digest; an image's, by the digest and a fingerprint of the model that
it was packed for. Both appear complete, by one rename. A pin is a shared lock on a file, so no
process removes a file that another process has pinned.
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
"""Seconds in which a new file is not trimmed, so that its writer can pin it."""


class AdapterSource(Protocol):
    """Source of blobs that no tier has."""

    def fetch(self, ref: AdapterRef, path: Path) -> str | None:
        """Write the blob to path, replacing the file there.

        Returns the SHA-256 of the written bytes, 64 hex digits, if it was computed on the way;
        after None, the file is read once more. Called on loading threads; may raise anything.
        """


class DiskCache:
    """Blobs and images by digest; beyond the budget the least recently used go. Thread-safe.

    The file just added and pinned files can exceed the budget. Images with other fingerprints, for
    use by other processes, count and age like the rest.
    """

    def __init__(
        self,
        folder: Path,
        budget_bytes: int,
        source: AdapterSource,
        fingerprint: str,
        on_change: OnChange = ignore_change,
    ) -> None:
        """fingerprint: 16 hex digits, equal for all processes that can share images.

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
        """Whether the blob or its image is there, complete and verified. Asks no file system.

        Changes by other processes are visible after `changed`.
        """
        return any(map(self._index.holds, self._names(digest)))

    def changed(self) -> set[str] | None:
        """List the folder and return the digests that `holds` now; None if the folder is unchanged.

        Sees changes by other processes, too. One thread at a time.
        """
        return self._index.changed()

    def trim(self) -> None:
        """Remove files beyond the budget, which other processes have added.

        Files added or used in the last seconds stay. Decides by the last `changed`.
        """
        if self._index.bytes > self.budget_bytes:
            with self._exclusive():
                self._evict(used_before_ns=time.time_ns() - int(1e9 * _TRIM_GRACE_S))

    def status(self) -> TierStatus:
        """Return contents as of the last `changed`, capacity, and evictions by this process."""
        index, budget = self._index, self.budget_bytes
        counted = self._evictions, self._checksum_failures
        return TierStatus(index.adapters, index.bytes, budget, budget, *counted)

    def fetch(self, ref: AdapterRef) -> None:
        """Fetch and verify the blob, unless the blob or its image is there already.

        If several threads or processes need the same blob at once, one fetches it and the others
        wait. A blob that another process has packed and removed again is not fetched.

        Raises AdapterLoadFailed if the content does not match the digest, and the source's errors.
        """
        if not _DIGEST.fullmatch(ref.digest):
            raise AdapterLoadFailed(f"{ref}: {ref.digest!r} is no digest", adapter=str(ref))
        if self._uses(ref.digest):
            return
        with self._fetch_lock(ref.digest):
            if not self._uses(ref.digest):
                self._fetch(ref)

    def fetch_to(self, ref: AdapterRef, path: Path) -> None:
        """Fetch the blob into a file and verify it. Raises as `fetch` does."""
        digest = self._source.fetch(ref, path) or blob_digest(path)
        if digest != ref.digest:
            raise AdapterLoadFailed(
                f"{ref}: the fetched blob has digest {digest}, not {ref.digest}: the stored "
                "blob is damaged; remove it from the store and register the adapter again",
                adapter=str(ref),
            )

    def blob(self, digest: str) -> Path:
        """Return the blob's file and mark it as used. It can vanish at any time after.

        Raises FileNotFoundError.
        """
        return self._index.use(digest)

    def verify(self, digest: str) -> None:
        """Read all of a blob and compare its digest, as `fetch` does after a download.

        Removes a damaged blob. Raises FileNotFoundError.
        """
        if blob_digest(self._folder / digest) != digest:
            log.warning("blob_damaged", extra={"file": digest})
            self._remove_damaged(digest)
            raise FileNotFoundError(f"{digest} was damaged")

    def image(self, digest: str) -> Path:
        """Return the image's file and mark it as used. It can vanish at any time after.

        Raises FileNotFoundError.
        """
        return self._index.use(self.image_name(digest))

    def image_name(self, digest: str) -> str:
        """Return the file name of this adapter's image."""
        return f"{digest}.{self._fingerprint}"

    def has_image(self, digest: str) -> bool:
        """Whether the image is there."""
        return (self._folder / self.image_name(digest)).exists()

    @contextlib.contextmanager
    def adding_image(self, digest: str) -> Iterator[Path]:
        """Yield a path to write the image to; add the image if the block ends without an exception.

        From then on the blob is the first to be removed, unless it is used again.
        """
        name = self.image_name(digest)
        with self._adding(name, self._folder / f"{name}.{uuid.uuid4().hex}{_PART}") as part:
            yield part
            with contextlib.suppress(FileNotFoundError):
                os.utime(self._folder / digest, (0, 0))

    def remove_image(self, digest: str) -> None:
        """Remove an image that was found damaged, even a pinned one."""
        self._remove_damaged(self.image_name(digest))

    def pin(self, digest: str) -> bool:
        """Keep the blob or its image, from the next apply_pins on; return whether one is kept now.

        Asks no file system.
        """
        return self._pins.add(digest)

    def unpin(self, digest: str) -> None:
        """Allow removal of an adapter's files again, from the next apply_pins on."""
        self._pins.remove(digest)

    def apply_pins(self) -> None:
        """Lock the files of pinned adapters, as far as there are any. One thread at a time."""
        self._pins.apply()

    def close(self) -> None:
        """Give up all pins; the files stay."""
        self._pins.close()

    def _uses(self, digest: str) -> bool:
        """Whether the disk has the image or the blob; mark the file as used."""
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
        """Return the names of usable files, best first; none for an invalid digest."""
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
        """Let one thread of all processes at a time fetch this digest."""
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
        """Let no other process or thread add or evict files."""
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
    """Whether this machine's disk caused the error: another machine may be able to load it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            return True
        error = error.__cause__
    return False


@contextlib.contextmanager
def memory_file() -> Iterator[Path]:
    """Make an empty file in memory, which takes the place of one on a disk; free it at the end.

    Linux only. Raises OSError.
    """
    descriptor = os.memfd_create("adapter")
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


class _HeldFile(NamedTuple):
    """A file that stays locked while the descriptor is open."""

    name: str
    descriptor: int


class _PinnedFiles:
    """Pinned adapters, and the locks on their files.

    `add` and `remove` ask no file system, never block, and may be called from any thread; `apply`
    and `close` do the work, on one thread.
    """

    def __init__(
        self, folder: Path, names: Callable[[str], tuple[str, ...]], index: DiskIndex
    ) -> None:
        """names: returns the file names that an adapter may have, best first."""
        self._folder, self._names, self._index = folder, names, index
        self._wanted: set[str] = set()
        self._held: dict[str, _HeldFile] = {}

    def add(self, digest: str) -> bool:
        """Lock a file of this adapter in the next `apply`; return whether one is locked now."""
        self._wanted.add(digest)
        held = self._held.get(digest)
        return held is not None and self._index.holds(held.name)

    def remove(self, digest: str) -> None:
        """Unlock an adapter's file in the next `apply`."""
        self._wanted.discard(digest)

    def apply(self) -> None:
        """Lock the files of pinned adapters, as far as there are any, and unlock all others."""
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
        """Unlock all; the files stay."""
        self._wanted.clear()
        self.apply()


def _lock_file(path: Path, kind: int) -> int | None:
    """Return a descriptor that holds the lock; None if the lock is taken or the file is gone."""
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
