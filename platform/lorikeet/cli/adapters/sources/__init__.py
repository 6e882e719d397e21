"""Sources of adapters to register: folders, archives, S3 buckets, the Hugging Face Hub.

All of them are read on the admin's machine.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lorikeet.cli.adapters.sources.archive import unpack
from lorikeet.cli.adapters.sources.bucket import SCHEME, download
from lorikeet.cli.adapters.sources.hub import PREFIX, fetch
from lorikeet.errors import InvalidInput


def check_source(source: str, revision: str | None = None) -> None:
    """Raise InvalidInput unless a source is of a known kind, and exists if it is a local path.

    revision: revision of a Hub repository; InvalidInput if another kind of source has one.
    """
    if revision is not None and not source.startswith(PREFIX):
        raise InvalidInput(f"a revision is for {PREFIX}organisation/name only", param="revision")
    if source.startswith((PREFIX, SCHEME)) or Path(source).exists():
        return
    if "://" in source:
        raise InvalidInput(
            f"{source!r}: addresses of this kind are not fetched; download it and give the folder "
            f"or archive, or give {SCHEME}bucket/prefix or {PREFIX}organisation/name",
            param="source",
        )
    is_repository = source.count("/") == 1 and not source.startswith(("/", ".", "~"))
    hub = f"; a repository of the Hugging Face Hub is {PREFIX}{source}" if is_repository else ""
    raise InvalidInput(f"there is no folder or file {source!r}{hub}", param="source")


@contextmanager
def open_source(source: str, revision: str | None = None, *, quiet: bool = False) -> Iterator[Path]:
    """Open an adapter as a folder; delete temporary copies on exit.

    Raises LorikeetError if the source cannot be read or has no adapter.

    source: a folder, a tar or zip file, s3://bucket/prefix, or hf:organisation/name.
    revision: branch, tag or commit of an hf: source.
    quiet: show no progress.
    """
    check_source(source, revision)
    if source.startswith(PREFIX):
        yield fetch(source.removeprefix(PREFIX), revision, quiet=quiet)
    elif Path(source).is_dir():
        yield Path(source)
    else:
        with tempfile.TemporaryDirectory(prefix="lorikeet-") as scratch:
            (download if source.startswith(SCHEME) else unpack)(source, Path(scratch))
            yield Path(scratch)
