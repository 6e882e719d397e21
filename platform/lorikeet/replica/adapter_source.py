"""The source that engines fetch adapters from: the catalog's blobs, by digest."""

from pathlib import Path

from lorikeet.catalog.catalog import blob_key
from lorikeet.catalog.store.object_store import ObjectStore
from lorikeet_engine.adapter import AdapterRef


class CatalogAdapterSource:
    """The engine's AdapterSource over an object store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def fetch(self, ref: AdapterRef, path: Path) -> str:
        """Download an adapter's blob to `path`; return the bytes' SHA-256. Raises StoreError."""
        return self._store.download(blob_key(ref.digest), path)
