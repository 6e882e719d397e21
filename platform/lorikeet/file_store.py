"""Store of tenants' files: the input and the output of batches, in the catalog's store.

files/TENANT/ID                  description of a file
file_contents/TENANT/ID-EXPIRY   its bytes; EXPIRY: hexadecimal Unix seconds

Contents are written first, so a described file is complete. Ids begin with the time in
milliseconds, so they sort by age.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lorikeet.catalog.records import TenantRecord
from lorikeet.catalog.store.object_store import ObjectStore, StoredObject, in_parallel
from lorikeet.errors import InsufficientQuota, InvalidInput, NotFound, ObjectExists, ObjectNotFound
from lorikeet.retry_after import REPAIR_S

PREFIX, CONTENTS = "files/", "file_contents/"
LIFETIME_S = 30 * 86_400
"""Seconds for which a file is kept unless its upload says otherwise, and the longest lifetime."""
SHORTEST_S = 3600
"""Shortest lifetime of a file, seconds."""
MAX_FILES = 10_000
"""Limit on the files of one tenant, so that all of them can be listed in about a second."""
PAGE = 100
"""Limit on the files or batches in one page of a list, as each is read from the store."""
_ORPHAN_S = 86_400.0
_ID = re.compile("(file-|batch_)[0-9a-f]{24}(-output|-errors)?")

Purpose = Literal["batch", "batch_output"]
Order = Literal["asc", "desc"]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Description of a file.

    bytes: size of the file.
    created_at: Unix seconds.
    expires_at: Unix seconds.
    """

    id: str
    bytes: int
    created_at: int
    filename: str
    expires_at: int

    @property
    def purpose(self) -> Purpose:
        """Purpose of the file in OpenAI's terms."""
        return purpose_of(self.id)

    def json(self) -> dict[str, Any]:
        """Return the file as OpenAI's file object."""
        fixed = {"object": "file", "purpose": self.purpose, "status": "processed"}
        return asdict(self) | fixed


class FilesSize(NamedTuple):
    """Bytes of a tenant's files together, and their number."""

    bytes: int
    files: int


class FileStore:
    """Store that saves, lists and deletes tenants' files. Thread-safe.

    quota_bytes: limit on the bytes of one tenant's files together, if the tenant has none of its
        own. Batches' output counts, but is never refused.
    clock: function that returns the time in Unix seconds.
    """

    def __init__(self, store: ObjectStore, quota_bytes: int, clock: Callable[[], float]) -> None:
        self.store, self.clock = store, clock
        self._quota_bytes = quota_bytes

    def quota(self, tenant: TenantRecord) -> FilesSize:
        """Return the limits on a tenant's files."""
        most_bytes, most_files = tenant.files_bytes, tenant.max_files
        return FilesSize(
            self._quota_bytes if most_bytes is None else most_bytes,
            MAX_FILES if most_files is None else min(most_files, MAX_FILES),
        )

    def used(self, tenant: str) -> FilesSize:
        """Return the size of a tenant's files. Raises StoreError."""
        contents = self._contents_of(tenant)
        return FilesSize(sum(one.size_bytes for one in contents), len(contents))

    def check_quota(self, tenant: TenantRecord, more_bytes: int = 0, more_files: int = 0) -> None:
        """Raise InsufficientQuota if a tenant's files are beyond its quota.

        more_bytes, more_files: bytes and files to count in addition to the tenant's own.
        """
        used, most = self.used(tenant.name), self.quota(tenant)
        if used.bytes + more_bytes > most.bytes or used.files + more_files > most.files:
            raise InsufficientQuota(
                f"this tenant has {used.bytes} bytes in {used.files} files, and the limit is "
                f"{most.bytes} bytes in {most.files} files: delete some files, or have your admin "
                "raise the limit",
                retry_after_s=REPAIR_S,
            )

    def upload(
        self, tenant: TenantRecord, path: Path, filename: str, lifetime_s: int
    ) -> StoredFile:
        """Save the bytes at `path` as a file and return its description.

        Raises StoreError if the store fails; InsufficientQuota, and saves nothing, if the tenant's
        files, with those that are saved at the same time, are beyond its limits.
        """
        made = self.add(tenant.name, path, filename, lifetime_s)
        try:
            self.check_quota(tenant)
        except BaseException:
            self.delete(tenant.name, made.id)
            raise
        return made

    def add(
        self, tenant: str, path: Path, filename: str, lifetime_s: int, file_id: str | None = None
    ) -> StoredFile:
        """Save the bytes at `path` as a file, even beyond the quota, and return its description.

        file_id: id of the file; None: a new id. An existing file of this id is returned unchanged.

        Raises StoreError if the store fails.
        """
        now, size = self.clock(), path.stat().st_size
        made = StoredFile(
            file_id or f"file-{sortable_id(now)}", size, int(now), filename, int(now) + lifetime_s
        )
        if file_id is not None and (found := self._find(tenant, file_id)) is not None:
            return found
        self.store.put_file(_contents(tenant, made), path)
        try:
            self.store.put_if_absent(_key(tenant, made.id), json.dumps(asdict(made)).encode())
        except ObjectExists:
            found = self._find(tenant, made.id)
            assert found is not None, "nobody deletes a file while it is saved"
            if found.expires_at != made.expires_at:
                self.store.delete(_contents(tenant, made))
            return found
        return made

    def get(self, tenant: str, file_id: str) -> StoredFile:
        """Return a tenant's file.

        Raises StoreError, and NotFound without distinguishing an unknown id, another tenant's file
        and a deleted or expired one.
        """
        found = self._find(tenant, file_id)
        if found is None or found.expires_at <= self.clock():
            raise _not_found()
        return found

    def download(self, tenant: str, file_id: str, path: Path) -> StoredFile:
        """Write a tenant's file to `path` and return its description. Raises NotFound,
        StoreError.
        """
        found = self.get(tenant, file_id)
        try:
            self.store.download(_contents(tenant, found), path)
        except ObjectNotFound:
            raise _not_found() from None
        return found

    def delete(self, tenant: str, file_id: str) -> None:
        """Delete a tenant's file. Raises NotFound, StoreError."""
        found = self.get(tenant, file_id)
        self.store.delete(_key(tenant, file_id))
        self.store.delete(_contents(tenant, found))

    def page(
        self, tenant: str, limit: int, after: str | None, order: Order, purpose: str | None
    ) -> tuple[list[StoredFile], bool]:
        """Return a tenant's files, at most `limit` and at most PAGE, and whether more follow.

        after: id of the last file of the previous page; None: the first page.
        order: asc: oldest first.
        purpose: the only purpose to list; None: all.

        Raises InvalidInput if `after` is no file's id; StoreError.
        """
        ids = {_file_id(one.key) for one in self._contents_of(tenant)}
        of_purpose = (one for one in ids if purpose in (None, purpose_of(one)))
        shown, more = page_of(of_purpose, min(limit, PAGE), after, order)
        found = in_parallel(lambda one: self._find(tenant, one), shown)
        return [one for one in found if one is not None], more

    def _contents_of(self, tenant: str) -> list[StoredObject]:
        """Return the objects that hold the bytes of a tenant's files, without expired files."""
        contents = self.store.scan(f"{CONTENTS}{tenant}/")
        return [one for one in contents if _expiry(one.key) > self.clock()]

    def _find(self, tenant: str, file_id: str) -> StoredFile | None:
        if not _ID.fullmatch(file_id):
            return None
        try:
            return StoredFile(**json.loads(self.store.get(_key(tenant, file_id))))
        except ObjectNotFound:
            return None


def sortable_id(now: float) -> str:
    """Return 24 hexadecimal digits: the time in milliseconds, then random ones.

    now: Unix seconds.
    """
    return f"{int(now * 1000):012x}{secrets.token_hex(6)}"


def purpose_of(file_id: str) -> Purpose:
    """Return a file's purpose in OpenAI's terms: batch_output if the id ends in -output or -errors,
    else batch.
    """
    return "batch_output" if file_id.endswith(("-output", "-errors")) else "batch"


def page_of(
    ids: Iterable[str], limit: int, after: str | None, order: Order
) -> tuple[list[str], bool]:
    """Return a page of ids and whether more follow.

    after: last id of the previous page, which may have been deleted since; None: the first page.
    order: asc: oldest first.

    Raises InvalidInput if `after` is no id.
    """
    newest_first = order == "desc"
    if after is not None:
        if not _ID.fullmatch(after):
            raise InvalidInput("after: want the id of one of these objects", param="after")
        last = after
        ids = (one for one in ids if (one < last if newest_first else one > last))
    rest = sorted(ids, reverse=newest_first)
    return rest[:limit], len(rest) > limit


def clean_up(store: ObjectStore, now: float, *, dry_run: bool) -> Iterator[StoredObject]:
    """Delete expired files, and contents over a day old that belong to no file.

    Contents are a file's bytes, an object beside its description. Yields each contents' object.

    now: Unix seconds.
    dry_run: yield without deleting.

    Raises StoreError if the store fails.
    """
    described = set(store.list(PREFIX))
    for one in store.scan(CONTENTS):
        key = _key(one.key.split("/")[1], _file_id(one.key))
        if _expiry(one.key) <= now or (key not in described and one.modified + _ORPHAN_S <= now):
            if not dry_run:
                store.delete(key)
                store.delete(one.key)
            yield one


def _key(tenant: str, file_id: str) -> str:
    return f"{PREFIX}{tenant}/{file_id}"


def _contents(tenant: str, file: StoredFile) -> str:
    return f"{CONTENTS}{tenant}/{file.id}-{file.expires_at:x}"


def _file_id(key: str) -> str:
    """Return the id of the file whose contents the store holds under a key."""
    return key.rpartition("/")[2].rpartition("-")[0]


def _expiry(key: str) -> int:
    """Return the time, in Unix seconds, at which the contents that the store holds under a key
    expire.
    """
    return int(key.rpartition("-")[2], 16)


def _not_found() -> NotFound:
    return NotFound(
        "no such file is stored: it may have been deleted or have expired", param="file_id"
    )
