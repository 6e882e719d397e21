"""Snapshots of the catalog's state after one entry, which spare readers the whole log.

A snapshot is a manifest that names 257 partitions by the SHA-256 of their bytes. The controller
makes one every 256 entries; readers read a partition when a question needs it. Partitions are
written first and the manifest last, each if absent: a snapshot is complete or does not exist, and
any process may make one at any time. No object is ever replaced, so old snapshots stay readable.
"""

import hashlib
import json
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from lorikeet.catalog.partition_format import (
    PARTITION_SCHEMA,
    READ_SCHEMAS,
    compact,
    encode_tenant,
    key_of,
    key_row,
    pin_of,
    pin_row,
)
from lorikeet.catalog.state import PARTITIONS, CatalogState, Partition, UnreadPartition
from lorikeet.catalog.store.gc_protection import protect
from lorikeet.catalog.store.object_store import ObjectStore, in_parallel
from lorikeet.errors import ObjectExists, ObjectNotFound, StoreError, StoreRefused

SCHEMA = 1
"""Format version; increased whenever an older reader could misread new manifests."""

MANIFESTS = "snapshots/"
PARTITIONS_PREFIX = "snapshot-partitions/"
_LAST = 10**12 - 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """Description of a snapshot: the catalog's state after log entry `seq`.

    time: time of the entry, Unix seconds.
    partitions: SHA-256 of the bytes of each partition (part of the state), by its number.
    """

    seq: int
    time: float
    partitions: tuple[str, ...]

    def state(self) -> CatalogState:
        """Return the state of the snapshot; its partitions are read later, when they are needed."""
        return CatalogState(self.seq, self.time, tuple(map(UnreadPartition, self.partitions)))


class Snapshots:
    """Snapshots of the catalog's state, in one store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def newest(self, up_to: int | None = None) -> Manifest | None:
        """Return the newest snapshot, or None if there is none: one LIST and one GET.

        up_to: number of the last entry that the snapshot may contain; None: no limit.
        """
        after = "" if up_to is None else _key(up_to + 1)
        key = self._store.first(MANIFESTS, after)
        return None if key is None else _manifest(self._store.get(key), key)

    def read(self, digests: Collection[str]) -> Mapping[str, Partition]:
        """Return partitions by the digest of their bytes, read in parallel.

        digests: SHA-256 of the bytes of each partition to read.

        Raises ObjectNotFound if a partition is missing, StoreError if one is damaged.
        """
        return dict(zip(digests, in_parallel(self._read, digests), strict=True))

    def write(self, state: CatalogState) -> Manifest:
        """Write a snapshot of a state and return its manifest. Idempotent.

        state: may have partitions that were never read from the store (UnreadPartition); the
            manifest names their stored objects.
        """
        # Partitions that never held anything are one object, written once.
        distinct = {id(partition): partition for partition in state.partitions}
        written = dict(zip(distinct, in_parallel(self._write, distinct.values()), strict=True))
        partitions = tuple(written[id(partition)] for partition in state.partitions)
        manifest = Manifest(state.seq, state.time, partitions)
        body = {"schema": SCHEMA, "seq": state.seq, "time": state.time, "partitions": partitions}
        self._put(_key(state.seq), json.dumps(body).encode())
        return manifest

    def _read(self, digest: str) -> Partition:
        key = _partition_key(digest)
        try:
            data = zlib.decompress(self._store.get(key))
        except ObjectNotFound as error:
            raise ObjectNotFound(f"{self._store.url}: {key} is missing: {_REMEDY}") from error
        except zlib.error as error:
            raise StoreError(f"{self._store.url}: {key} is damaged ({error}): {_REMEDY}") from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise StoreError(f"{self._store.url}: {key} is damaged: {_REMEDY}")
        return partition_from_bytes(data, digest)

    def _write(self, partition: Partition | UnreadPartition) -> str:
        if isinstance(partition, UnreadPartition):
            assert not partition.pending, "read partitions with pending entries first"
            return partition.digest
        if partition.digest is not None:
            return partition.digest
        data = partition_to_bytes(partition)
        digest = hashlib.sha256(data).hexdigest()
        key, packed = _partition_key(digest), zlib.compress(data)
        try:
            self._store.put_if_absent(key, packed)
        except ObjectExists:  # it may be old and about to be garbage collected
            protect(self._store, key, lambda: self._put(key, packed))
        return digest

    def _put(self, key: str, data: bytes) -> None:
        with suppress(ObjectExists):  # a concurrent writer stored identical bytes
            self._store.put_if_absent(key, data)


_REMEDY = "restore it, or delete the newest object under snapshots/ so that an older one is used"


def partition_to_bytes(partition: Partition) -> bytes:
    """Serialize a partition (part of the state); equal partitions have equal bytes."""
    return b"\n".join(_lines(partition))


def partition_from_bytes(data: bytes, digest: str) -> Partition:
    """Parse a partition's bytes.

    digest: SHA-256 of `data`, which the caller has verified.

    Raises StoreError if another release wrote the bytes.
    """
    first, *tenants = data.split(b"\n")
    head = json.loads(first)
    if head["schema"] not in READ_SCHEMAS:
        raise StoreError(
            f"partition {digest} has schema {head['schema']} and this process reads "
            f"{PARTITION_SCHEMA}: another release writes this catalog, upgrade this one"
        )
    lines = (line.partition(b" ") for line in tenants)
    pins = map(pin_of, head["pins"])
    return Partition(
        tenants={name.decode(): data for name, _, data in lines},
        keys={key_id: key_of(key_id, row) for key_id, row in head["keys"].items()},
        key_ids=head["key_ids"],
        shared=frozenset((tenant, name) for tenant, name in head["shared"]),
        pins={pin.key: pin for pin in pins},
        admin_keys=frozenset(head["admin_keys"]),
        digest=digest,
    )


def _lines(partition: Partition) -> Iterator[bytes]:
    yield compact(
        {
            "schema": PARTITION_SCHEMA,
            "keys": {key_id: key_row(partition.keys[key_id]) for key_id in sorted(partition.keys)},
            "key_ids": dict(sorted(partition.key_ids.items())),
            "shared": sorted(partition.shared),
            "pins": [pin_row(partition.pins[at]) for at in sorted(partition.pins)],
            "admin_keys": sorted(partition.admin_keys),
        }
    )
    for name in sorted(partition.tenants):
        held = partition.tenants[name]
        yield b"%s %s" % (
            name.encode(),
            held if isinstance(held, bytes) else encode_tenant(held),
        )


def manifest_seq(key: str) -> int:
    """Return the number of the entry in a manifest's key."""
    return int(key.removesuffix(".json").rpartition("-")[2])


def _manifest(data: bytes, key: str) -> Manifest:
    try:
        body = json.loads(data)
        schema = body["schema"]
        if schema > SCHEMA:
            raise StoreRefused(
                f"{key} has schema {schema} and this process reads up to {SCHEMA}: "
                "a newer release writes this catalog, upgrade this one"
            )
        manifest = Manifest(body["seq"], body["time"], tuple(body["partitions"]))
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(f"{key} is damaged ({error!r}): {_REMEDY}") from error
    if len(manifest.partitions) != PARTITIONS + 1:
        raise StoreError(f"{key} names {len(manifest.partitions)} partitions: {_REMEDY}")
    return manifest


def _key(seq: int) -> str:
    """Return a manifest's key: counted down, so that a LIST begins with the newest snapshot.

    The entry's number follows, for readers of the listing.
    """
    return f"{MANIFESTS}{_LAST - seq:012d}-{seq:012d}.json"


def _partition_key(digest: str) -> str:
    return f"{PARTITIONS_PREFIX}{digest[:2]}/{digest}"
