"""An adapter in a tar, tar.gz or zip file, which somebody else may have made.

Every member is looked at before any is written; only the adapter's own files are, under their last
names.
"""

import gzip
import io
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, cast

from lorikeet.cli.adapters.sources.files import KNOWN_FILES, MAX_SOURCE_BYTES, adapter_files
from lorikeet.errors import InvalidInput
from lorikeet_engine.adapter_format import CONFIG_FILE

_MAX_MEMBERS = 1_000
_MAX_READ_BYTES = 1 << 20
_GZIP = b"\x1f\x8b"
_ZIP = b"PK\3\4"
_DAMAGED = (
    *(tarfile.TarError, zipfile.BadZipFile, OSError, EOFError, zlib.error),
    *(ValueError, OverflowError, NotImplementedError, RuntimeError),  # of zipfile
)


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an archive. is_plain: a file of its own, no link, device or hole."""

    name: str
    size: int
    is_folder: bool
    is_plain: bool
    open: Callable[[], AbstractContextManager[IO[bytes]]]


def unpack(archive: str, folder: Path) -> None:
    """Copy the adapter's files into a folder. Raises InvalidInput, naming the member."""
    if archive.endswith(".safetensors"):
        raise InvalidInput(f"{archive}: give the folder that it is in, with its {CONFIG_FILE}")
    try:
        with ExitStack() as stack:
            members = _beside_the_config(archive, _opened(Path(archive), stack))

            def copy(name: str, out: IO[bytes]) -> None:
                with members[name].open() as found:
                    shutil.copyfileobj(found, out, _MAX_READ_BYTES)

            def read(name: str) -> bytes:
                copy(name, held := io.BytesIO())
                return held.getvalue()

            sizes = {name: member.size for name, member in members.items()}
            wanted = set(adapter_files(archive, sizes, read))
            for name in filter(wanted.__contains__, members):  # a gzip stream is gone back in once
                with (folder / name).open("wb") as out:
                    copy(name, out)
    except _DAMAGED as error:
        raise InvalidInput(
            f"{archive} is no folder, and no tar, tar.gz or zip file that can be read: {error}"
        ) from error


def _opened(archive: Path, stack: ExitStack) -> Iterator[Member]:
    """The members of an archive, which `stack` closes."""
    file = stack.enter_context(archive.open("rb"))
    begin = file.read(len(_ZIP))
    file.seek(0)
    packed = begin.startswith(_GZIP)
    stream: IO[bytes] = gzip.GzipFile(fileobj=file) if packed else file  # type: ignore[assignment]
    bounded = cast("IO[bytes]", _BoundedReads(stream))
    if begin == _ZIP:
        return _zipped(stack.enter_context(zipfile.ZipFile(bounded)))
    return _tarred(stack.enter_context(tarfile.open(fileobj=bounded, mode="r:")))


def _tarred(tar: tarfile.TarFile) -> Iterator[Member]:
    @contextmanager
    def opened(info: tarfile.TarInfo) -> Iterator[IO[bytes]]:
        found = tar.extractfile(info)
        assert found is not None  # a regular file
        with found:
            yield found

    for info in tar:
        plain = info.isreg() and not info.issparse() and info.size >= 0
        yield Member(
            info.name,
            info.size,
            info.isdir(),
            plain,
            lambda info=info: opened(info),  # type: ignore[misc]
        )


def _zipped(archive: zipfile.ZipFile) -> Iterator[Member]:
    for info in archive.infolist():
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # they have bounds
            raise zipfile.BadZipFile(f"{info.filename!r} is packed by another method than deflate")
        mode = info.external_attr >> 16
        plain = not mode or not stat.S_IFMT(mode) or stat.S_ISREG(mode)
        yield Member(
            info.filename.replace("\\", "/"),  # as PowerShell 5 writes them
            info.file_size,
            info.is_dir(),
            plain,
            lambda info=info: archive.open(info),  # type: ignore[misc]  # gives file_size at most
        )


class _BoundedReads:
    """A file that is read a little at a time.

    tarfile reads a header, and zipfile its list of members, as long as it claims to be.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = _MAX_READ_BYTES) -> bytes:
        if not 0 <= size <= _MAX_READ_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._file.read(size)


def _beside_the_config(archive: str, members: Iterator[Member]) -> dict[str, Member]:
    """The files beside the adapter's, by name; all others are checked all the same."""
    beside: dict[PurePosixPath, dict[str, Member]] = {}
    total = 0
    for count, member in enumerate(members, 1):
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts:
            raise _refused(archive, member, "leads out of the folder that it is unpacked to")
        if not (member.is_plain or member.is_folder):
            raise _refused(archive, member, "is neither a plain file nor a folder, such as a link")
        total += member.size
        if total > MAX_SOURCE_BYTES or count > _MAX_MEMBERS:
            raise InvalidInput(
                f"{archive} holds more than {MAX_SOURCE_BYTES} bytes or {_MAX_MEMBERS} members"
            )
        if not member.is_folder:
            files = beside.setdefault(path.parent, {})
            if path.name in files:
                raise _refused(archive, member, "is there twice")
            files[path.name] = member
    found = [files for files in beside.values() if not files.keys().isdisjoint(KNOWN_FILES)]
    if len(found) > 1:
        raise InvalidInput(f"{archive} holds several adapters: make an archive of each")
    return found[0] if found else {}


def _refused(archive: str, member: Member, fault: str) -> InvalidInput:
    return InvalidInput(f"{archive}: {member.name!r} {fault}")
