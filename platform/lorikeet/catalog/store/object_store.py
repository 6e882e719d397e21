"""Where the catalog's bytes lie: the one protocol of both stores."""

import re
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from lorikeet.errors import InvalidSetting, StoreError

Q = TypeVar("Q")
A = TypeVar("A")

_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")

_KEY_RULE = (
    "want letters, digits, '.', '_', '-' and single slashes, and no part that starts with a dot"
)


@dataclass(frozen=True, slots=True)
class StoredObject:
    """What a store lists. modified: see ObjectStore."""

    key: str
    size_bytes: int
    modified: float


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """An upload whose parts were neither joined nor deleted. begun: Unix seconds."""

    key: str
    token: str
    begun: float


class PartStore(Protocol):
    """Objects that arrive in parts, numbered from 1.

    `token` is what `begin` returned for the key. Every method raises StoreError. What is joined
    may lie at the key as an object, and then url, put and sizes know its parts no more.
    """

    def begin(self, key: str, /) -> str:
        """Make room for the parts of an object."""
        ...

    def url(self, key: str, token: str, number: int, size: int, /) -> str | None:
        """Where anybody may PUT exactly `size` bytes as this part, for an hour.

        None: this store has no address that a client could reach; use put.
        """
        ...

    def put(self, key: str, token: str, number: int, path: Path, /) -> None:
        """Write or replace one part with a file's bytes. Raises ObjectNotFound."""
        ...

    def sizes(self, key: str, token: str, /) -> dict[int, int]:
        """The bytes of each part that has arrived. Raises ObjectNotFound."""
        ...

    def join(self, key: str, token: str, /) -> None:
        """Take no more parts. Again is fine."""
        ...

    def download(self, key: str, token: str, path: Path, /) -> str:
        """Write the joined parts into a file; the SHA-256 of its bytes. Raises ObjectNotFound."""
        ...

    def copy(self, key: str, target: str, /) -> None:
        """Make the joined parts another object, where the store can do that by itself.

        Raises ObjectNotFound.
        """
        ...

    def delete(self, key: str, token: str, /) -> None:
        """Remove the parts, joined or not; none there is fine."""
        ...

    def unfinished(self, prefix: str, /) -> Iterator[UnfinishedUpload]:
        """What was begun under these keys and is in no listing of objects."""
        ...


class ObjectStore(Protocol):
    """Objects under keys such as log/000000000001.json; a write is seen whole or not at all.

    No key may be the folder of another (a and a/b).
    Every method is safe to call from many threads and processes at once, and raises StoreError
    with the remedy when the store cannot do it. A read sees every write that ended before it.
    """

    @property
    def url(self) -> str:
        """What open_store takes, for messages."""
        ...

    @property
    def parts(self) -> PartStore:
        """The store's way to take objects that arrive in parts."""
        ...

    def get(self, key: str) -> bytes:
        """The whole object. Raises ObjectNotFound."""
        ...

    def size(self, key: str) -> int:
        """The object's bytes. Raises ObjectNotFound."""
        ...

    def modified(self, key: str) -> float:
        """When it was last written or touched, Unix seconds; S3 counts whole ones.

        By the store's clock. Raises ObjectNotFound.
        """
        ...

    def touch(self, key: str) -> None:
        """Make it as if written now. Raises ObjectNotFound."""
        ...

    def put_file(self, key: str, path: Path) -> None:
        """Write or replace an object with a file's bytes; a large one in parallel parts."""
        ...

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Write an object unless there is one: of many writers at once, one succeeds.

        Raises ObjectExists. An answer lost on the way can make the winner see ObjectExists too:
        a caller that cares reads the object back.
        """
        ...

    def download(self, key: str, path: Path) -> str:
        """Copy an object into a file, in parallel ranges if large. Raises ObjectNotFound.

        The answer is the SHA-256 of its bytes, computed as they came: 64 hex digits.
        """
        ...

    def list(self, prefix: str, start_after: str = "") -> Iterator[str]:
        """The keys that begin with `prefix` and sort after `start_after`, in byte order."""
        ...

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        """The objects whose keys begin with `prefix`, in byte order."""
        ...

    def first(self, prefix: str, start_after: str = "") -> str | None:
        """The first key of such a list, if there is one, without asking for the others."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; none there is fine."""
        ...


def open_store(url: str) -> ObjectStore:
    """The store at s3://bucket/prefix, or in a folder. Raises InvalidSetting, StoreError."""
    scheme, marker, rest = url.partition("://")
    if not marker:
        from lorikeet.catalog.store.local import LocalStore

        return LocalStore(Path(url))
    bucket, _, prefix = rest.partition("/")
    if scheme != "s3" or not bucket:
        raise InvalidSetting(f"{url!r} is no catalog: want a folder or s3://bucket/prefix")
    from lorikeet.catalog.store.s3 import S3Store  # boto3 takes long to import

    return S3Store(bucket, prefix)


def in_parallel(ask: Callable[[Q], A], questions: Collection[Q], at_once: int = 16) -> list[A]:
    """Ask a store several things at a time; the answers in order. No thread for a single one."""
    if len(questions) <= 1:
        return list(map(ask, questions))
    with ThreadPoolExecutor(min(at_once, len(questions))) as threads:
        return list(threads.map(ask, questions))


def check_key(key: str) -> str:
    """Return the key as it is; one that could leave the store's folder raises StoreError."""
    if not _KEY.fullmatch(key):
        raise StoreError(f"{key!r} cannot be a key: {_KEY_RULE}")
    return key


def check_prefix(prefix: str) -> str:
    """Return what keys can begin with as it is; anything else raises StoreError."""
    if not _KEY.fullmatch(prefix + "0"):
        raise StoreError(f"{prefix!r} cannot begin a key: {_KEY_RULE}")
    return prefix
