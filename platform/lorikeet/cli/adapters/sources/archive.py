"""Adapters in tar, tar.gz or zip files, which are not trusted.

All members are checked before any is written. Only the adapter's own files are written, under their
names without folders.
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

from lorikeet.adapter_files import KNOWN_FILES, MAX_SOURCE_BYTES, adapter_files
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
    """A member of an archive.

    size: bytes.
    is_plain: whether it is a regular file, and no link, device or sparse file.
    open: opens the content for reading.
    """

    name: str
    size: int
    is_folder: bool
    is_plain: bool
    open: Callable[[], AbstractContextManager[IO[bytes]]]


def unpack(archive: str, folder: Path) -> None:
    """Copy the adapter's files into a folder.

    Raises InvalidInput if the archive cannot be read, is unsafe to unpack or too large, or does
    not hold one complete adapter.
    """
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
            # In the archive's order, so that a gzip stream is rewound only once.
            for name in filter(wanted.__contains__, members):
                (folder / name).parent.mkdir(exist_ok=True)
                with (folder / name).open("wb") as out:
                    copy(name, out)
    except _DAMAGED as error:
        raise InvalidInput(
            f"{archive} is no folder, and no tar, tar.gz or zip file that can be read: {error}"
        ) from error


def _opened(archive: Path, stack: ExitStack) -> Iterator[Member]:
    """Open an archive, and yield its members. `stack` closes the archive."""
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
        # These decompress in bounded memory.
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise zipfile.BadZipFile(f"{info.filename!r} is packed by another method than deflate")
        mode = info.external_attr >> 16
        plain = not mode or not stat.S_IFMT(mode) or stat.S_ISREG(mode)
        yield Member(
            info.filename.replace("\\", "/"),  # as PowerShell 5 writes them
            info.file_size,
            info.is_dir(),
            plain,
            lambda info=info: archive.open(info),  # type: ignore[misc]  # reads file_size at most
        )


class _BoundedReads:
    """A file that refuses large reads.

    tarfile reads a header, and zipfile a list of members, of whatever length the archive claims.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = _MAX_READ_BYTES) -> bytes:
        if not 0 <= size <= _MAX_READ_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._file.read(size)


def _beside_the_config(archive: str, members: Iterator[Member]) -> dict[str, Member]:
    """Check all members, and return the files in the adapter's folder by name.

    If one adapter's folder contains folders of further adapters, as a trainer's output contains
    checkpoints, the outermost counts.

    Raises InvalidInput for several adapters, an unsafe or repeated member, or too many bytes.
    """
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
    found = [path for path, files in beside.items() if not files.keys().isdisjoint(KNOWN_FILES)]
    outer = [path for path in found if all(path in (p, *p.parents) for p in found)]
    if found and not outer:
        names = " and ".join(map(str, sorted(found)[:2]))
        raise InvalidInput(f"{archive} holds several adapters, in {names}: make an archive of each")
    return beside[outer[0]] if outer else {}


def _refused(archive: str, member: Member, fault: str) -> InvalidInput:
    return InvalidInput(f"{archive}: {member.name!r} {fault}")
