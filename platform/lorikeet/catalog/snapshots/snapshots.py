"""Snapshots: what the log says up to one entry, so that nobody need read it from its start.

A snapshot is a manifest that names its parts by the SHA-256 of their bytes. Parts are written
first and the manifest last, if absent, so there is no half of a snapshot, anybody may make one at
any time, and a part that did not change is not written again. Nothing is ever replaced: old
snapshots stay readable.
"""

import hashlib
import json
import zlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from lorikeet.catalog.snapshots.partitions import (
    PARTS,
    Partition,
    Unread,
    part_from_bytes,
    part_to_bytes,
)
from lorikeet.catalog.state import CatalogState
from lorikeet.catalog.store.claims import claim
from lorikeet.catalog.store.object_store import ObjectStore, in_parallel
from lorikeet.errors import ObjectExists, ObjectNotFound, StoreError

SCHEMA = 1
"""Raised whenever an older reader could misread what is written."""

MANIFESTS = "snapshots/"
PARTS_PREFIX = "snapshot-parts/"
_LAST = 10**12 - 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """A snapshot of entry `seq`, written at `time`: the SHA-256 of each part, in their order."""

    seq: int
    time: float
    parts: tuple[str, ...]

    def state(self) -> CatalogState:
        """The state then, with no part read."""
        return CatalogState(self.seq, self.time, tuple(map(Unread, self.parts)))


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
        """These parts, in parallel. Raises ObjectNotFound, and StoreError for damaged ones."""
        return dict(zip(digests, in_parallel(self._read, digests), strict=True))

    def write(self, state: CatalogState) -> Manifest:
        """Keep a state whose parts without pending entries may be unread. Again is fine."""
        parts = tuple(in_parallel(self._write, state.parts))
        manifest = Manifest(state.seq, state.time, parts)
        body = {"schema": SCHEMA, "seq": state.seq, "time": state.time, "parts": parts}
        self._put(_key(state.seq), json.dumps(body).encode())
        return manifest

    def _read(self, digest: str) -> Partition:
        key = _part_key(digest)
        try:
            data = zlib.decompress(self._store.get(key))
        except ObjectNotFound as error:
            raise ObjectNotFound(f"{self._store.url}: {key} is missing: {_REMEDY}") from error
        except zlib.error as error:
            raise StoreError(f"{self._store.url}: {key} is damaged ({error}): {_REMEDY}") from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise StoreError(f"{self._store.url}: {key} is damaged: {_REMEDY}")
        return part_from_bytes(data, digest)

    def _write(self, part: Partition | Unread) -> str:
        if isinstance(part, Unread):
            assert not part.pending, "a part with news is read before a snapshot"
            return part.digest
        if part.digest is not None:
            return part.digest
        data = part_to_bytes(part)
        digest = hashlib.sha256(data).hexdigest()
        key, packed = _part_key(digest), zlib.compress(data)
        try:
            self._store.put_if_absent(key, packed)
        except ObjectExists:  # perhaps of long ago, and about to be collected
            claim(self._store, key, lambda: self._put(key, packed))
        return digest

    def _put(self, key: str, data: bytes) -> None:
        with suppress(ObjectExists):  # the same, by somebody who made this snapshot too
            self._store.put_if_absent(key, data)


_REMEDY = "restore it, or delete the newest object under snapshots/ so that an older one is used"


def manifest_seq(key: str) -> int:
    """The entry whose snapshot a key under MANIFESTS names."""
    return int(key.removesuffix(".json").rpartition("-")[2])


def _manifest(data: bytes, key: str) -> Manifest:
    try:
        body = json.loads(data)
        schema = body["schema"]
        if schema > SCHEMA:
            raise StoreError(
                f"{key} has schema {schema} and this process reads up to {SCHEMA}: "
                "a newer release writes this catalog, upgrade this one"
            )
        manifest = Manifest(body["seq"], body["time"], tuple(body["parts"]))
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(f"{key} is damaged ({error!r}): {_REMEDY}") from error
    if len(manifest.parts) != PARTS + 1:
        raise StoreError(f"{key} names {len(manifest.parts)} parts: {_REMEDY}")
    return manifest


def _key(seq: int) -> str:
    """Counted down, so that the newest comes first in a LIST; the number itself is for people."""
    return f"{MANIFESTS}{_LAST - seq:012d}-{seq:012d}.json"


def _part_key(digest: str) -> str:
    return f"{PARTS_PREFIX}{digest[:2]}/{digest}"
