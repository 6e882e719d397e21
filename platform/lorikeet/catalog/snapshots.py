"""Snapshots: what the log says up to one entry, so that nobody need read it from its start.

A snapshot is a manifest that names its partitions by the SHA-256 of their bytes. Partitions are
written first and the manifest last, if absent, so there is no half of a snapshot, anybody may make
one at any time, and a partition that did not change is not written again. Nothing is ever
replaced: old snapshots stay readable.
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
"""Raised whenever an older reader could misread what is written."""

MANIFESTS = "snapshots/"
PARTITIONS_PREFIX = "snapshot-partitions/"
_LAST = 10**12 - 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """A snapshot of entry `seq`, written at `time`. partitions: the SHA-256 of each, in order."""

    seq: int
    time: float
    partitions: tuple[str, ...]

    def state(self) -> CatalogState:
        """The state then, with no partition read."""
        return CatalogState(self.seq, self.time, tuple(map(UnreadPartition, self.partitions)))


class Snapshots:
    """The snapshots in one store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def newest(self, up_to: int | None = None) -> Manifest | None:
        """The newest snapshot, of no entry after `up_to`, if there is one: a LIST and a GET."""
        after = "" if up_to is None else _key(up_to + 1)
        key = self._store.first(MANIFESTS, after)
        return None if key is None else _manifest(self._store.get(key), key)

    def read(self, digests: Collection[str]) -> Mapping[str, Partition]:
        """Read partitions in parallel. Raises ObjectNotFound, and StoreError for damaged ones."""
        return dict(zip(digests, in_parallel(self._read, digests), strict=True))

    def write(self, state: CatalogState) -> Manifest:
        """Keep a state whose partitions without pending entries may be unread. Again is fine."""
        partitions = tuple(in_parallel(self._write, state.partitions))
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
            assert not partition.pending, "a partition with news is read before a snapshot"
            return partition.digest
        if partition.digest is not None:
            return partition.digest
        data = partition_to_bytes(partition)
        digest = hashlib.sha256(data).hexdigest()
        key, packed = _partition_key(digest), zlib.compress(data)
        try:
            self._store.put_if_absent(key, packed)
        except ObjectExists:  # perhaps of long ago, and about to be collected
            protect(self._store, key, lambda: self._put(key, packed))
        return digest

    def _put(self, key: str, data: bytes) -> None:
        with suppress(ObjectExists):  # the same, by somebody who made this snapshot too
            self._store.put_if_absent(key, data)


_REMEDY = "restore it, or delete the newest object under snapshots/ so that an older one is used"


def partition_to_bytes(partition: Partition) -> bytes:
    """The partition's canonical bytes."""
    return b"\n".join(_lines(partition))


def partition_from_bytes(data: bytes, digest: str) -> Partition:
    """Read a partition back; `digest` is the SHA-256 of `data`, which somebody has checked.

    Raises StoreError for what another release wrote.
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
    """The entry whose snapshot a key under MANIFESTS names."""
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
    """Counted down, so that the newest comes first in a LIST; the number itself is for people."""
    return f"{MANIFESTS}{_LAST - seq:012d}-{seq:012d}.json"


def _partition_key(digest: str) -> str:
    return f"{PARTITIONS_PREFIX}{digest[:2]}/{digest}"
