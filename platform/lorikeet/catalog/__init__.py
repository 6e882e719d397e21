"""Adapters, their versions and aliases, tenants, keys and pins, kept in an object store."""

from lorikeet.catalog.catalog import AdapterCatalog, blob_key
from lorikeet.catalog.keys import secret_sha256
from lorikeet.catalog.records import (
    AdapterRecord,
    BlobFacts,
    KeyRecord,
    PinRecord,
    Scope,
    TenantRecord,
    VersionRecord,
)
from lorikeet.catalog.state import CatalogState
from lorikeet.catalog.store.object_store import ObjectStore, open_store

__all__ = [
    "AdapterCatalog",
    "AdapterRecord",
    "BlobFacts",
    "CatalogState",
    "KeyRecord",
    "ObjectStore",
    "PinRecord",
    "Scope",
    "TenantRecord",
    "VersionRecord",
    "blob_key",
    "open_store",
    "secret_sha256",
]
