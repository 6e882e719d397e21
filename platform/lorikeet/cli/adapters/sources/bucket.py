"""An adapter under a prefix of an S3 bucket, where the operator allows it."""

from pathlib import Path

from lorikeet.catalog.store.object_store import open_store
from lorikeet.cli.adapters.sources.files import ADAPTER_FILES, check_files
from lorikeet.errors import InvalidInput, ObjectNotFound
from lorikeet.settings import Settings

SCHEME = "s3://"


def download(source: str, folder: Path) -> None:
    """Copy the adapter's two objects into a folder. Raises InvalidInput, StoreError."""
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
    sizes = {}
    for name in ADAPTER_FILES:
        try:
            sizes[name] = store.size(name)
        except ObjectNotFound:
            continue
    check_files(source, sizes)
    for name in ADAPTER_FILES:
        store.download(name, folder / name)
