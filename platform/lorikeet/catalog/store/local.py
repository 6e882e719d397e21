"""Object store in a folder, for any number of processes of one machine."""

import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from lorikeet.catalog.store.object_store import (
    StoredObject,
    UnfinishedUpload,
    check_key,
    check_prefix,
)
from lorikeet.errors import ObjectExists, ObjectNotFound, StoreError

_UNFINISHED = ".unfinished"  # folder of incomplete files; no key starts with a dot


class LocalStore:
    """ObjectStore in a folder, which the first write creates.

    A key's folders are created by a write and removed by the deletion of their last object. Each
    object is written to a temporary file, synced, then renamed or linked into place; a crash leaves
    at most a temporary file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()

    @property
    def url(self) -> str:
        """Absolute path of the folder."""
        return str(self._folder)

    @property
    def parts(self) -> "LocalParts":
        """Multipart uploads into this store."""
        return LocalParts(self)

    def get(self, key: str) -> bytes:
        """Return the whole object. Raises ObjectNotFound."""
        with self._errors(key):
            return self._path(key).read_bytes()

    def size(self, key: str) -> int:
        """Return the object's size in bytes. Raises ObjectNotFound."""
        with self._errors(key):
            return self._path(key).stat().st_size

    def modified(self, key: str) -> float:
        """Return the Unix time of the last write or touch. Raises ObjectNotFound."""
        with self._errors(key):
            return self._path(key).stat().st_mtime

    def touch(self, key: str) -> None:
        """Set the object's modification time to now. Raises ObjectNotFound."""
        with self._errors(key), self._path(key).open("rb") as file:
            os.utime(file.fileno())

    def put_file(self, key: str, path: Path) -> None:
        """Write or replace an object with a file's bytes."""
        with self._errors(key), self._temporary_file(path) as unfinished:
            self._place(key, unfinished, unfinished.replace)

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Create an object. Raises ObjectExists if there is one at the key."""
        with self._errors(key), self._temporary_file(data) as unfinished:
            try:  # unlike a rename, a link never replaces
                self._place(key, unfinished, partial(os.link, unfinished))
            except FileExistsError as error:
                raise ObjectExists(f"{key} already exists in {self.url}") from error

    def download(self, key: str, path: Path) -> str:
        """Copy an object to a file; return its SHA-256 in hex. Raises ObjectNotFound."""
        digest = hashlib.sha256()
        with self._errors(key), self._path(key).open("rb") as source, path.open("wb") as target:
            while piece := source.read(2**20):
                digest.update(piece)
                target.write(piece)
        return digest.hexdigest()

    def list(self, prefix: str, start_after: str = "") -> Iterator[str]:
        """Yield the keys that begin with `prefix` and sort after `start_after`, in byte order."""
        top = self._folder / check_prefix(prefix).rpartition("/")[0]
        with self._errors(prefix):
            yield from sorted(
                key
                for folder, _, names in os.walk(top)
                for key in self._keys(folder, names)
                if key.startswith(prefix) and key > start_after
            )

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        """Yield the objects whose keys begin with `prefix`, in byte order."""
        for key in self.list(prefix):
            with suppress(ObjectNotFound):  # deleted since it was listed
                yield StoredObject(key, self.size(key), self.modified(key))

    def first(self, prefix: str, start_after: str = "") -> str | None:
        """Return the first key that `list` would yield; None if there is none."""
        return next(self.list(prefix, start_after), None)

    def delete(self, key: str) -> None:
        """Delete an object, if it exists."""
        with self._errors(key):
            path = self._path(key)
            path.unlink(missing_ok=True)
            with suppress(OSError):  # a folder that is not empty, or that another process removed
                for folder in path.relative_to(self._folder).parents[:-1]:
                    (self._folder / folder).rmdir()

    def _keys(self, folder: str, names: Sequence[str]) -> Sequence[str]:
        at = Path(folder).relative_to(self._folder).as_posix()
        if at == _UNFINISHED:
            return []
        return names if at == "." else [f"{at}/{name}" for name in names]

    def _path(self, key: str) -> Path:
        return self._folder / check_key(key)

    def _place(self, key: str, unfinished: Path, place: Callable[[Path], object]) -> None:
        """Bring a temporary file to an object's path, and sync the path's folder.

        place: renames or links the temporary file to a path.
        """
        path = self._path(key)
        while True:
            try:
                _make_folder(path.parent)
                place(path)
                break
            except FileNotFoundError:  # another process removed the folder while it was empty
                if not unfinished.exists():
                    raise
        with suppress(FileNotFoundError):  # the object was deleted again
            _sync(path.parent)

    @contextmanager
    def _temporary_file(self, source: bytes | Path) -> Iterator[Path]:
        """Write and sync a temporary file; delete it at the end unless the caller renamed it."""
        folder = self._folder / _UNFINISHED
        _make_folder(folder)
        path = folder / uuid.uuid4().hex
        try:
            with path.open("wb") as file:
                if isinstance(source, Path):
                    with source.open("rb") as given:
                        shutil.copyfileobj(given, file, 2**20)
                else:
                    file.write(source)
                file.flush()
                os.fsync(file.fileno())
            yield path
        finally:
            path.unlink(missing_ok=True)

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, FileNotFoundError) and str(error.filename) == str(
                self._folder / key
            ):
                raise ObjectNotFound(f"no object {key} in {self.url}") from error
            raise StoreError(
                f"{self.url}: {key}: {error}: check the folder's owner, mode and space"
            ) from error


class LocalParts:
    """PartStore in which every part is an object of its own, and no part has a URL.

    `download` concatenates them; `join` and `copy` do nothing.
    """

    def __init__(self, store: LocalStore) -> None:
        self._store = store

    def begin(self, _key: str) -> str:
        """Return "": the parts of a key are found by the key alone."""
        return ""

    def url(self, _key: str, _token: str, _number: int, _size: int) -> str | None:
        """Return None: parts have no URL; `put` writes them."""
        return None

    def put(self, key: str, _token: str, number: int, path: Path) -> None:
        """Write or replace one part, an object of its own, with a file's bytes."""
        self._store.put_file(f"{key}/{number:05d}", path)

    def sizes(self, key: str, _token: str) -> dict[int, int]:
        """Return the size in bytes of each part received, by part number."""
        return {
            int(part.rpartition("/")[2]): self._store.size(part)
            for part in self._store.list(f"{key}/")
        }

    def join(self, _key: str, _token: str) -> None:
        """Do nothing: the parts stay objects of their own."""

    def download(self, key: str, _token: str, path: Path) -> str:
        """Write the parts to a file, in order; return the SHA-256 of the bytes, in hex."""
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
        """Do nothing: the caller writes the target with `put_file`."""

    def delete(self, key: str, _token: str) -> None:
        """Delete the objects of all parts."""
        for part in self._store.list(f"{key}/"):
            self._store.delete(part)

    def unfinished(self, _prefix: str) -> Iterator[UnfinishedUpload]:
        """Yield nothing: parts are objects, so listings of objects show them."""
        return iter(())


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent)
        with suppress(FileExistsError):  # of another process, which may remove it at once
            folder.mkdir()
        _sync(folder.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
