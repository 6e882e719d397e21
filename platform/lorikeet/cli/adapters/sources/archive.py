"""An adapter in a tar or tar.gz file, which somebody else may have made.

Every member is looked at before any is written; only the adapter's two files are, under names of
our own.
"""

import gzip
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, cast

from lorikeet.cli.adapters.sources.files import ADAPTER_FILES, MAX_SOURCE_BYTES, check_files
from lorikeet.errors import InvalidInput
from lorikeet_engine.adapter_format import CONFIG_FILE

_MAX_MEMBERS = 1_000
_MAX_READ_BYTES = 1 << 20
_GZIP = b"\x1f\x8b"
_DAMAGED = (tarfile.TarError, OSError, EOFError, zlib.error, ValueError, OverflowError)


def unpack(archive: str, folder: Path) -> None:
    """Copy the adapter's two files into a folder. Raises InvalidInput, naming the member."""
    if archive.endswith(".safetensors"):
        raise InvalidInput(f"{archive}: give the folder that it is in, with its {CONFIG_FILE}")
    try:
        with _opened(archive) as tar:
            members = _members(archive, tar)
            check_files(archive, {name: member.size for name, member in members.items()})
            for name in ADAPTER_FILES:
                found = tar.extractfile(members[name])
                assert found is not None  # a regular file
                with found, (folder / name).open("wb") as out:
                    shutil.copyfileobj(found, out, _MAX_READ_BYTES)
    except _DAMAGED as error:
        raise InvalidInput(
            f"{archive} is no folder, and no tar or tar.gz file that can be read: {error}"
        ) from error


@contextmanager
def _opened(archive: str) -> Iterator[tarfile.TarFile]:
    with Path(archive).open("rb") as file:
        packed = file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        stream: IO[bytes] = gzip.GzipFile(fileobj=file) if packed else file  # type: ignore[assignment]
        with tarfile.open(fileobj=cast("IO[bytes]", _BoundedReads(stream)), mode="r:") as tar:
            yield tar


class _BoundedReads:
    """A file that is read a little at a time: tarfile reads a header as long as it claims to be."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MAX_READ_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._file.read(size)


def _members(archive: str, tar: tarfile.TarFile) -> dict[str, tarfile.TarInfo]:
    """The files beside adapter_config.json, by name; all others are checked all the same."""
    beside: dict[PurePosixPath, dict[str, tarfile.TarInfo]] = {}
    total = 0
    for count, member in enumerate(tar, 1):
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts:
            raise _refused(archive, member, "leads out of the folder that it is unpacked to")
        if not (member.isreg() or member.isdir()) or member.issparse() or member.size < 0:
            raise _refused(archive, member, "is neither a plain file nor a folder, such as a link")
        total += member.size
        if total > MAX_SOURCE_BYTES or count > _MAX_MEMBERS:
            raise InvalidInput(
                f"{archive} holds more than {MAX_SOURCE_BYTES} bytes or {_MAX_MEMBERS} members"
            )
        if member.isreg():
            files = beside.setdefault(path.parent, {})
            if path.name in files:
                raise _refused(archive, member, "is there twice")
            files[path.name] = member
    found = [files for files in beside.values() if not files.keys().isdisjoint(ADAPTER_FILES)]
    if len(found) > 1:
        raise InvalidInput(f"{archive} holds several adapters: make a tar file of each")
    return found[0] if found else {}


def _refused(archive: str, member: tarfile.TarInfo, fault: str) -> InvalidInput:
    return InvalidInput(f"{archive}: {member.name!r} {fault}")
