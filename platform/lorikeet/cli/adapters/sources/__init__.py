"""Where an adapter can be registered from. All of it is read on the admin's machine."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lorikeet.cli.adapters.sources.archive import unpack
from lorikeet.cli.adapters.sources.bucket import SCHEME, download
from lorikeet.cli.adapters.sources.hub import PREFIX, fetch
from lorikeet.errors import InvalidInput


def check_source(source: str, revision: str | None = None) -> str:
    """Return the source as it is if it can be one, and there is one. Raises InvalidInput."""
    if revision is not None and not source.startswith(PREFIX):
        raise InvalidInput(f"a revision is for {PREFIX}organisation/name only", param="revision")
    if source.startswith((PREFIX, SCHEME)) or Path(source).exists():
        return source
    if "://" in source:
        raise InvalidInput(
            f"{source!r}: nothing is fetched from there; download it and give the folder or the "
            f"archive, or give {SCHEME}bucket/prefix or {PREFIX}organisation/name",
            param="source",
        )
    is_repository = source.count("/") == 1 and not source.startswith(("/", ".", "~"))
    hub = f"; a repository of the Hugging Face Hub is {PREFIX}{source}" if is_repository else ""
    raise InvalidInput(f"there is no folder or file {source!r}{hub}", param="source")


@contextmanager
def open_source(source: str, revision: str | None = None, *, quiet: bool = False) -> Iterator[Path]:
    """An adapter's folder; what was copied for it is removed afterwards.

    source: a folder, a tar or zip file, s3://bucket/prefix, or hf:organisation/name, of which
    revision names a branch, tag or commit. quiet: show no progress. Raises LorikeetError.
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
