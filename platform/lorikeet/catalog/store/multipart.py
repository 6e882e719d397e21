"""Objects that arrive in parts: the protocol of both stores."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


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
