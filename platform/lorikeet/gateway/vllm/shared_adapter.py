"""Adapter in its tenant's folder of a file system that trainers and gateways share."""

import errno
import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path, PurePosixPath

from lorikeet.adapter_files import adapter_files
from lorikeet.errors import InvalidAdapter, InvalidInput, StoreError, Unavailable
from lorikeet.retry_after import STORE_AWAY_S
from lorikeet_engine.adapter_format import write_blob
from lorikeet_engine.errors import AdapterRejected

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a pipe that has replaced a file would wait for a writer.
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_FILES = 1_000
_PIECE_BYTES = 2**20
_UNREADABLE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.ENAMETOOLONG}


class SharedAdapter:
    """Files of an adapter in its tenant's folder, which stays open. The methods block.

    Each folder is opened within the one above it, and no link is followed. So no path leaves the
    tenant's folder, even if another process replaces a part of it by a link meanwhile.

    size_bytes: size of the adapter's files.
    close: function that closes the folder. Garbage collection of the object closes it, too.
    """

    def __init__(self, allowed: Path, path: str) -> None:
        """Open an adapter's folder, and choose its files: config, weights, and those of chat
        template and tokenizer.

        allowed: folder of the adapter's tenant.
        path: absolute path of the adapter's folder.

        Raises InvalidInput unless `path` is a folder within `allowed` with an adapter, Unavailable
        if the file system fails.
        """
        self._path = ascii(path)
        names = self._names(allowed, PurePosixPath(path))
        with self._errors():
            self._folder = _open(allowed, names)
            self.close = weakref.finalize(self, os.close, self._folder)
            self._sizes = self._all_sizes()
        chosen = adapter_files(self._path, self._sizes, self._read)
        self._sizes = {name: self._sizes[name] for name in chosen}
        self.size_bytes = sum(self._sizes.values())

    def write_blob(self, scratch: Path, blob: Path) -> str:
        """Write the adapter's blob; return its SHA-256, 64 hex digits.

        scratch: new folder, for copies of the files.

        Raises InvalidAdapter if the adapter cannot be served, InvalidInput if a file changes
        meanwhile, StoreError if the gateway's disk fails.
        """
        try:
            scratch.mkdir()
            for name in self._sizes:
                (scratch / name).parent.mkdir(exist_ok=True)
                with (scratch / name).open("wb") as copy:
                    copy.writelines(self._pieces(name))
            return write_blob(scratch, blob)
        except AdapterRejected as error:
            raise InvalidAdapter(error.message, param=error.fields.get("field")) from error
        except OSError as error:
            raise StoreError(
                f"the gateway could not keep the adapter ({error.strerror}): free space in its "
                "LORIKEET_CACHE_DIR, then send it again"
            ) from error

    def _names(self, allowed: Path, path: PurePosixPath) -> tuple[str, ...]:
        """Return the names of the folders from `allowed` down to `path`."""
        inside = path.is_relative_to(allowed) and ".." not in path.parts
        if not inside or "\0" in str(path):
            raise self._refusal(f"want the absolute path of a folder below {allowed}, without '..'")
        return path.relative_to(allowed).parts

    def _all_sizes(self) -> dict[str, int]:
        """Return the size in bytes of each regular file in the folder, by name."""
        with os.scandir(self._folder) as entries:
            return {
                each.name: each.stat(follow_symlinks=False).st_size
                for each in islice(entries, _MOST_FILES)
                if each.is_file(follow_symlinks=False)
            }

    def _read(self, name: str) -> bytes:
        return b"".join(self._pieces(name))

    def _pieces(self, name: str) -> Iterator[bytes]:
        with self._errors(), os.fdopen(os.open(name, _FILE, dir_fd=self._folder), "rb") as file:
            now, left = os.fstat(file.fileno()), self._sizes[name]
            if not stat.S_ISREG(now.st_mode) or now.st_size != left:
                raise self._refusal(f"{name} changes: load the adapter once it is written")
            if now.st_nlink > 1:  # the other name may be in another tenant's folder
                raise self._refusal(f"{name} has a second hard link: copy it")
            while left and (piece := file.read(min(left, _PIECE_BYTES))):
                left -= len(piece)
                yield piece

    def _refusal(self, message: str) -> InvalidInput:
        return InvalidInput(f"lora_path={self._path}: {message}", param="lora_path")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise InvalidInput for a path that cannot be read, Unavailable if the file system
        fails.
        """
        try:
            yield
        except OSError as error:
            if error.errno in _UNREADABLE:
                raise self._refusal(
                    f"{error.strerror}: want a folder that the gateways can read, and files and "
                    "folders that are no links"
                ) from error
            raise Unavailable(
                f"lora_path={self._path}: {error.strerror}: send it again",
                retry_after_s=STORE_AWAY_S,
            ) from error


def _open(folder: Path, names: tuple[str, ...]) -> int:
    """Return the descriptor of a folder below `folder`, following no link on the way there."""
    at = os.open(folder, _FOLDER)
    for name in names:
        above = at
        try:
            at = os.open(name, _FOLDER, dir_fd=above)
        finally:
            os.close(above)
    return at
