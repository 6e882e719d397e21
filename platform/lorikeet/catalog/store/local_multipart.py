"""Parts of uploads in a folder: each is an object of its own."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lorikeet.catalog.store.multipart import UnfinishedUpload
from lorikeet.errors import StoreError

if TYPE_CHECKING:
    from lorikeet.catalog.store.local import LocalStore


class LocalParts:
    """A PartStore without addresses: parts come through the gateway.

    Parts are put one after the other only when they are downloaded; copying is left to put_file.
    """

    def __init__(self, store: "LocalStore") -> None:
        self._store = store

    def begin(self, _key: str) -> str:
        """See PartStore."""
        return ""

    def url(self, _key: str, _token: str, _number: int, _size: int) -> str | None:
        """See PartStore."""
        return None

    def put(self, key: str, _token: str, number: int, path: Path) -> None:
        """See PartStore."""
        self._store.put_file(f"{key}/{number:05d}", path)

    def sizes(self, key: str, _token: str) -> dict[int, int]:
        """See PartStore."""
        return {
            int(part.rpartition("/")[2]): self._store.size(part)
            for part in self._store.list(f"{key}/")
        }

    def join(self, _key: str, _token: str) -> None:
        """See PartStore."""

    def download(self, key: str, _token: str, path: Path) -> str:
        """See PartStore."""
        digest = hashlib.sha256()
        try:
            with path.open("wb") as file:
                for part in self._store.list(f"{key}/"):
                    data = self._store.get(part)
                    digest.update(data)
                    file.write(data)
        except OSError as error:
            raise StoreError(f"{path.parent}: {error.strerror}: free some space there") from error
        return digest.hexdigest()

    def copy(self, _key: str, _target: str) -> None:
        """See PartStore."""

    def delete(self, key: str, _token: str) -> None:
        """See PartStore."""
        for part in self._store.list(f"{key}/"):
            self._store.delete(part)

    def unfinished(self, _prefix: str) -> Iterator[UnfinishedUpload]:
        """See PartStore. Every part is an object here."""
        return iter(())
