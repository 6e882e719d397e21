"""Garbage collection of objects in the store that nothing needs any more.

Kept are the blobs of usable versions, and of versions retired within the grace period, which can
still be restored; the blobs that uploads in flight will name; the newest snapshots; and every
object younger than the grace period. No locks are taken: store/gc_protection.py spares objects that
a writer is about to name. A killed collection leaves garbage for the next one; any number of
collections may run at once.
"""

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Set
from itertools import islice

from lorikeet.catalog.changes import AdapterRetired, VersionRetired
from lorikeet.catalog.history import HistoryQuery
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.resumable_uploads import ResumableUploads, Upload
from lorikeet.catalog.snapshots import (
    MANIFESTS,
    PARTITIONS_PREFIX,
    Snapshots,
    manifest_seq,
)
from lorikeet.catalog.state import CatalogState
from lorikeet.catalog.store.gc_protection import (
    DELETE_WITHIN_S,
    MARK_LASTS_S,
    MARKS,
    marked_for_deletion,
)
from lorikeet.catalog.store.object_store import StoredObject, in_parallel
from lorikeet.errors import InvalidInput, ObjectNotFound

BLOBS = "blobs/"
LEAST_GRACE_S = 86400.0
"""Shortest grace period, in seconds: twice the longest time between a writer's protection of an
object and the write that names it.
"""

_NEWEST_KEPT = 4  # snapshots; readers keep using one while a few newer ones appear
_OLD_KEPT_EVERY = 2**14  # entries between the older snapshots that are kept, for history
_PAGE = 1000
_BATCH = 64

Adapters = Set[tuple[str, str]]


class GarbageCollector:
    """Garbage collector of a catalog's store.

    Deletes abandoned uploads, then blobs (adapters' files) that no version needs, then old
    snapshots.
    """

    def __init__(
        self,
        catalog: CatalogReader,
        grace_s: float,
        *,
        dry_run: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Prepare one collection. Raises InvalidInput if the grace period is too short.

        catalog: reader of the catalog, whose store is collected.
        grace_s: seconds that an object is kept after it was written or its version retired.
        dry_run: delete nothing.
        clock: function that returns the time in Unix seconds.
        """
        if grace_s < LEAST_GRACE_S:
            raise InvalidInput(f"a grace period of {grace_s:g} s: want a day or more")
        self._catalog = catalog
        self._store = catalog.store
        self._uploads = ResumableUploads(catalog.store)
        self._before = clock() - grace_s
        self._dry_run = dry_run
        self._run = uuid.uuid4().hex

    def collect(self) -> Iterator[StoredObject]:
        """Delete garbage and yield each deleted object; in a dry run only yield it.

        Raises StoreError if the store fails.
        """
        self._catalog.refresh()
        self._remove_dead_marks()
        uploads = list(self._uploads.in_flight())
        if not self._dry_run:
            self._uploads.sweep(self._before)
        yield from (_stored(upload) for upload in uploads if upload.created < self._before)
        in_flight = {upload.digest for upload in uploads if upload.created >= self._before}
        yield from self._sweep(self._blobs(in_flight))
        yield from self._snapshots()

    def _blobs(self, in_flight: Set[str]) -> Iterator[StoredObject]:
        retired = self._lately_retired()
        needed = self._catalog.ask(lambda state: _needed(state, retired))
        blobs = ((_name(found), found) for found in self._old(BLOBS))
        return (found for name, found in blobs if name not in needed and name not in in_flight)

    def _lately_retired(self) -> Adapters:
        """Return the tenants and names of adapters with a version that was retired within the grace
        period.
        """
        adapters: set[tuple[str, str]] = set()
        before: int | None = None
        while True:
            found = self._catalog.history.find(HistoryQuery(since=self._before), _PAGE, before)
            adapters |= {
                (change.tenant, change.name)
                for entry in found.entries
                for change in entry.changes
                if isinstance(change, AdapterRetired | VersionRetired)
            }
            before = found.before
            if before is None:
                return adapters

    def _snapshots(self) -> Iterator[StoredObject]:
        """Delete old snapshots, then the partitions (parts of the state) that only they name; yield
        each deleted object.
        """
        manifests = list(self._store.scan(MANIFESTS))
        kept = _kept(manifests, self._before)
        yield from self._sweep(found for found in manifests if found not in kept)
        snapshots = Snapshots(self._store)
        named: set[str] = set()
        for found in kept:
            manifest = snapshots.newest(up_to=manifest_seq(found.key))
            named.update(manifest.partitions if manifest else ())
        partitions = self._old(PARTITIONS_PREFIX)
        yield from self._sweep(found for found in partitions if _name(found) not in named)

    def _old(self, prefix: str) -> Iterator[StoredObject]:
        return (found for found in self._store.scan(prefix) if found.modified < self._before)

    def _sweep(self, garbage: Iterable[StoredObject]) -> Iterator[StoredObject]:
        """Delete garbage objects unless they were written again meanwhile; yield each deleted
        object.
        """
        left = iter(garbage)
        while batch := list(islice(left, _BATCH)):
            yield from batch if self._dry_run else self._delete(batch)

    def _delete(self, batch: list[StoredObject]) -> list[StoredObject]:
        deadline = time.monotonic() + DELETE_WITHIN_S
        keys = [found.key for found in batch]
        with marked_for_deletion(self._store, keys, self._run):
            deleted = in_parallel(lambda key: self._delete_one(key, deadline), keys)
        return [found for found, gone in zip(batch, deleted, strict=True) if gone]

    def _delete_one(self, key: str, deadline: float) -> bool:
        try:
            if self._store.modified(key) >= self._before or time.monotonic() > deadline:
                return False
        except ObjectNotFound:
            return False
        self._store.delete(key)
        return True

    def _remove_dead_marks(self) -> None:
        dead = time.time() - MARK_LASTS_S
        for mark in self._store.scan(MARKS):
            if mark.modified < dead and not self._dry_run:
                self._store.delete(mark.key)


def _needed(state: CatalogState, lately_retired: Adapters) -> Set[str]:
    """Return the digests of the blobs of all versions that can be used or restored.

    lately_retired: adapters with a version that was retired within the grace period.
    """
    return {
        version.digest
        for record in state.adapters()
        for version in record.versions
        if not version.retired or (record.tenant, record.name) in lately_retired
    }


def _kept(manifests: list[StoredObject], before: float) -> Set[StoredObject]:
    """Return the snapshots to keep: the newest few, young ones, and for history one older snapshot
    for each range of _OLD_KEPT_EVERY log entries.

    manifests: the snapshots' manifest objects, newest first.
    before: Unix seconds; snapshots made later are young.
    """
    of_range = {manifest_seq(found.key) // _OLD_KEPT_EVERY: found for found in reversed(manifests)}
    young = (found for found in manifests if found.modified >= before)
    return {*manifests[:_NEWEST_KEPT], *young, *of_range.values()}


def _stored(upload: Upload) -> StoredObject:
    """Return an upload in the form in which the store lists its objects.

    Its size is the size of the whole blob, or 0 if the blob was stored before the upload began.
    """
    arrives = 0 if upload.token is None else upload.size_bytes
    return StoredObject(upload.key, arrives, upload.created)


def _name(found: StoredObject) -> str:
    return found.key.rpartition("/")[2]
