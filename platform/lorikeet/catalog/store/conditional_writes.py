"""Check that a store honours conditional writes, on which every commit of the catalog rests.

Some stores accept `If-None-Match: *` and ignore it, as Ceph's radosgw 16.2 does in buckets with
versioning enabled. Without the condition, concurrent writers overwrite each other's commits, and no
error tells them. docs/operations.md lists stores.
"""

import uuid
from contextlib import suppress

from lorikeet.catalog.store.object_store import ObjectStore
from lorikeet.errors import ObjectExists, StoreError, StoreRefused

REMEDY = (
    "suspend versioning of the bucket on Ceph, take out a proxy that drops the header, or use a "
    "store that honours If-None-Match: * on PUT (docs/operations.md, Stores), or a folder for one "
    "machine"
)
_PREFIX = "uploads/conditional-write-"  # gateways may delete here, and `lorikeet gc` cleans up


def check_conditional_writes(store: ObjectStore) -> None:
    """Write a new key twice on condition that it is absent, and delete the object.

    Raises StoreRefused if the store takes the second write, StoreError if the store fails.
    """
    key = f"{_PREFIX}{uuid.uuid4().hex}"
    try:
        with suppress(ObjectExists):  # written by an attempt whose answer was lost
            store.put_if_absent(key, b"first")
        store.put_if_absent(key, b"second")
    except ObjectExists:
        return
    finally:
        with suppress(StoreError):  # `lorikeet gc` deletes the object
            store.delete(key)
    raise StoreRefused(
        f"{store.url} ignores If-None-Match, so that concurrent writers would overwrite each "
        f"other's changes: {REMEDY}"
    )
