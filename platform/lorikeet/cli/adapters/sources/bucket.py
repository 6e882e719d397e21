"""Adapters in S3 buckets, below the prefixes that LORIKEET_IMPORT_FROM allows."""

from itertools import islice
from pathlib import Path

from lorikeet.adapter_files import adapter_files
from lorikeet.catalog.store.object_store import open_store
from lorikeet.errors import InvalidInput
from lorikeet.settings import Settings

SCHEME = "s3://"
_MOST_OBJECTS = 1_000  # listed at most; a training run may have left many more


def download(source: str, folder: Path) -> None:
    """Copy an adapter's objects into a folder.

    source: s3://bucket/prefix of the adapter.

    Raises InvalidInput if LORIKEET_IMPORT_FROM does not allow the source, or the source holds no
    adapter, and StoreError.
    """
    source = source.rstrip("/")
    allowed = Settings.from_env().import_from
    inside = any(f"{source}/".startswith(f"{prefix}/") for prefix in allowed)
    if not inside or ".." in source.split("/"):
        those = f"only from {', '.join(allowed)}" if allowed else "from no bucket yet"
        raise InvalidInput(
            f"{source}: adapters are taken {those}: set LORIKEET_IMPORT_FROM to the s3:// "
            "prefixes that may be read with your credentials",
            param="source",
        )
    store = open_store(source)
    sizes = {found.key: found.size_bytes for found in islice(store.scan(""), _MOST_OBJECTS)}
    for name in adapter_files(source, sizes, store.get):
        store.download(name, folder / name)
