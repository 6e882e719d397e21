"""Protocols of the catalog's object storage, and the choice of their implementation by URL."""

import re
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from lorikeet.errors import InvalidSetting, StoreError

A = TypeVar("A")
R = TypeVar("R")

_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")

_KEY_RULE = (
    "want letters, digits, '.', '_', '-' and single slashes, and no part that starts with a dot"
)


@dataclass(frozen=True, slots=True)
class StoredObject:
    """Entry of a store's listing.

    modified: time of the last write or touch, Unix seconds by the store's clock.
    """

    key: str
    size_bytes: int
    modified: float


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """Multipart upload whose parts are neither joined nor deleted. begun: Unix seconds."""

    key: str
    token: str
    begun: float


class PartStore(Protocol):
    """Multipart uploads of one store; parts are numbered from 1.

    token: the upload id, which `begin` returned for the key.
    Every method raises StoreError. After `join` the upload may have become an object at its key;
    from then on `url`, `put` and `sizes` may fail.
    """

    def begin(self, key: str, /) -> str:
        """Begin a multipart upload and return its token."""
        ...

    def url(self, key: str, token: str, number: int, size: int, /) -> str | None:
        """Return a URL that accepts a PUT of exactly `size` bytes as one part of an upload, for one
        hour.

        The URL needs no credentials. None: clients cannot reach this store; use `put` instead.
        """
        ...

    def put(self, key: str, token: str, number: int, path: Path, /) -> None:
        """Write or replace one part with a file's bytes.

        May raise ObjectNotFound if the store no longer has the upload.
        """
        ...

    def sizes(self, key: str, token: str, /) -> dict[int, int]:
        """Return the size in bytes of each part received, by part number.

        May raise ObjectNotFound if the store no longer has the upload.
        """
        ...

    def join(self, key: str, token: str, /) -> None:
        """Join the parts received, in order, and accept no more parts. Idempotent."""
        ...

    def download(self, key: str, token: str, path: Path, /) -> str:
        """Write the joined parts to a file and return the SHA-256 of its bytes, 64 hex digits.

        May raise ObjectNotFound if the parts were not joined.
        """
        ...

    def copy(self, key: str, target: str, /) -> None:
        """Copy the joined parts to the object `target` if the store can do so without a download.

        Otherwise do nothing: the caller writes `target` with `put_file`. May raise
        ObjectNotFound if the parts were not joined.
        """
        ...

    def delete(self, key: str, token: str, /) -> None:
        """Delete the parts, joined or not. Idempotent."""
        ...

    def unfinished(self, prefix: str, /) -> Iterator[UnfinishedUpload]:
        """Yield the unfinished uploads (neither joined nor deleted) to keys under `prefix`.

        Uploads whose parts are objects of their own are left out, since listings of objects show
        them.
        """
        ...


class ObjectStore(Protocol):
    """Objects under keys such as log/000000000001.json; writes are atomic.

    A key must not be the folder of another key (a and a/b). Every method may be called from many
    threads and processes at once. If the store fails it raises StoreError, whose message says what
    to do. Reads are consistent: a read sees every write that ended before the read began.
    """

    @property
    def url(self) -> str:
        """URL of the store, as `open_store` takes it, for messages."""
        ...

    @property
    def parts(self) -> PartStore:
        """Multipart uploads into this store."""
        ...

    def get(self, key: str) -> bytes:
        """Return the whole object. Raises ObjectNotFound."""
        ...

    def size(self, key: str) -> int:
        """Return the object's size in bytes. Raises ObjectNotFound."""
        ...

    def modified(self, key: str) -> float:
        """Return the time of the last write or touch, in Unix seconds by the store's clock.

        S3 gives whole seconds. Raises ObjectNotFound.
        """
        ...

    def touch(self, key: str) -> None:
        """Set the object's modification time to now. Raises ObjectNotFound."""
        ...

    def put_file(self, key: str, path: Path) -> None:
        """Write or replace an object with a file's bytes; a large file in parallel parts."""
        ...

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Create an object: of concurrent writers, exactly one succeeds. Raises ObjectExists.

        If the network loses an answer, even the writer that succeeded may get ObjectExists; a
        caller that needs certainty reads the object back.
        """
        ...

    def download(self, key: str, path: Path) -> str:
        """Copy an object to a file, a large one in parallel ranges. Raises ObjectNotFound.

        Return the SHA-256 of the object's bytes, 64 hex digits, computed during the download.
        """
        ...

    def list(self, prefix: str, start_after: str = "") -> Iterator[str]:
        """Yield the keys that begin with `prefix` and sort after `start_after`, in byte order."""
        ...

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        """Yield the objects whose keys begin with `prefix`, in byte order."""
        ...

    def first(self, prefix: str, start_after: str = "") -> str | None:
        """Return the first key that `list` would yield, or None; cheaper than a whole listing."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object. Idempotent."""
        ...


def open_store(url: str) -> ObjectStore:
    """Open the store at s3://bucket/prefix or in a folder.

    Raises InvalidSetting for another kind of URL, StoreError if S3's client cannot be set up.
    """
    scheme, marker, rest = url.partition("://")
    if not marker:
        from lorikeet.catalog.store.local import LocalStore

        return LocalStore(Path(url))
    bucket, _, prefix = rest.partition("/")
    if scheme != "s3" or not bucket:
        raise InvalidSetting(f"{url!r} is not a catalog's URL: want a folder or s3://bucket/prefix")
    from lorikeet.catalog.store.s3 import S3Store  # boto3 takes long to import

    return S3Store(bucket, prefix)


def in_parallel(call: Callable[[A], R], arguments: Collection[A], at_once: int = 16) -> list[R]:
    """Call a function with each argument, on threads, and return the results in order.

    at_once: maximum number of threads. A single argument takes no thread.
    """
    if len(arguments) <= 1:
        return list(map(call, arguments))
    with ThreadPoolExecutor(min(at_once, len(arguments))) as threads:
        return list(threads.map(call, arguments))


def check_key(key: str) -> str:
    """Return the key unchanged; raise StoreError for a key that could leave the store's folder."""
    if not _KEY.fullmatch(key):
        raise StoreError(f"{key!r} cannot be a key: {_KEY_RULE}")
    return key


def check_prefix(prefix: str) -> str:
    """Return the prefix unchanged; raise StoreError if no valid key can begin with it."""
    if not _KEY.fullmatch(prefix + "0"):
        raise StoreError(f"{prefix!r} cannot begin a key: {_KEY_RULE}")
    return prefix
