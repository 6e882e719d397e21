"""The disk cache: verified blobs in a folder that several processes may share.

A blob's file is named by its digest and appears there whole, by one rename. Pins are shared locks
on the file, so a process never removes what another has pinned.
"""

import contextlib
import fcntl
import logging
import os
import re
import threading
import time
import uuid
from pathlib import Path
from typing import Protocol

from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.adapter_format import blob_digest
from lorikeet_engine.errors import AdapterLoadFailed

log = logging.getLogger(__name__)

_DIGEST = re.compile(r"[0-9a-f]{64}")
_PART = ".part"
_ABANDONED_S = 3600.0


class AdapterSource(Protocol):
    """Where blobs come from when no tier has them."""

    def fetch(self, ref: AdapterRef, path: Path) -> None:
        """Write the blob to path. Called on loader threads; may raise anything."""


class DiskCache:
    """Blobs by digest, the least recently used removed beyond the budget. Thread-safe.

    The budget can be exceeded by the blob just fetched and by pinned ones.
    """

    def __init__(self, folder: Path, budget_bytes: int, source: AdapterSource) -> None:
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._source = source
        self._pins: dict[str, int] = {}  # digest → descriptor that holds the lock
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._remove_abandoned()

    def holds(self, digest: str) -> bool:
        """Whether the blob is there, whole and verified."""
        return _DIGEST.fullmatch(digest) is not None and (self._folder / digest).exists()

    def get(self, ref: AdapterRef) -> Path:
        """The blob's file, fetched and verified if it was not there.

        The file can vanish any time after; whoever finds it gone asks again. Raises
        AdapterLoadFailed for content that is not the digest's, and what the source raises.
        """
        if not _DIGEST.fullmatch(ref.digest):
            raise AdapterLoadFailed(f"{ref}: {ref.digest!r} is no digest", adapter=str(ref))
        path = self._folder / ref.digest
        try:
            os.utime(path)
        except FileNotFoundError:
            self._fetch(ref, path)
            self._evict(keep=path)
        return path

    def pin(self, digest: str) -> bool:
        """Keep the blob from now on; False while it is not there."""
        with self._lock:
            if digest not in self._pins and self.holds(digest):
                descriptor = _lock(self._folder / digest, fcntl.LOCK_SH)
                if descriptor is not None:
                    self._pins[digest] = descriptor
            return digest in self._pins

    def unpin(self, digest: str) -> None:
        """Let the blob be removed again."""
        with self._lock:
            if digest in self._pins:
                os.close(self._pins.pop(digest))

    def close(self) -> None:
        """Give up all pins; the files stay."""
        for digest in list(self._pins):
            self.unpin(digest)

    def _fetch(self, ref: AdapterRef, path: Path) -> None:
        part = self._folder / f"{ref.digest}.{uuid.uuid4().hex}{_PART}"
        try:
            self._source.fetch(ref, part)
            digest = blob_digest(part)
            if digest != ref.digest:
                raise AdapterLoadFailed(
                    f"{ref}: what was fetched has digest {digest}, not {ref.digest}: the stored "
                    "blob is damaged; register the adapter again",
                    adapter=str(ref),
                )
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def _evict(self, keep: Path) -> None:
        blobs = []
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                if _DIGEST.fullmatch(path.name):
                    blobs.append((stat.st_mtime_ns, stat.st_size, path))
        excess = sum(size for _, size, _ in blobs) - self._budget_bytes
        for _, size, path in sorted(blobs):
            if excess <= 0:
                return
            if path == keep:
                continue
            descriptor = _lock(path, fcntl.LOCK_EX)
            if descriptor is not None:
                path.unlink(missing_ok=True)
                os.close(descriptor)
                excess -= size
                log.info("blob_removed", extra={"digest": path.name, "size_bytes": size})

    def _remove_abandoned(self) -> None:
        for part in self._folder.glob(f"*{_PART}"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - part.stat().st_mtime > _ABANDONED_S:
                    part.unlink()


def _lock(path: Path, kind: int) -> int | None:
    """A descriptor that holds the lock, or None: taken by somebody, or the file is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:  # too many open files: a pin can wait, the engine must not stop
        log.warning("blob_not_locked", extra={"digest": path.name, "error": str(error)})
        return None
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)
    return None
