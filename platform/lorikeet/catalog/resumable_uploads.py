"""Resumable uploads of adapters' blobs, in parts, before validation.

An upload is identified by the blob's digest, as its sender states it, and by the admin key that
sends it, so any gateway can continue it. An upload's objects are under uploads/<digest>/<key id>/:
a record, and the parts as the store keeps them. The record exists from the upload's beginning to
its end, so that garbage collection spares the blob of every digest with a record.
"""

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from lorikeet.catalog.catalog import blob_key
from lorikeet.catalog.store.object_store import ObjectStore
from lorikeet.errors import (
    Conflict,
    InvalidAdapter,
    NotFound,
    ObjectExists,
    ObjectNotFound,
    StoreError,
)

PREFIX = "uploads/"
PART_BYTES = 8 * 2**20
_MOST_PARTS = 1000  # one page of a listing; S3 itself allows 10,000
_RECORD = "upload.json"


@dataclass(frozen=True, slots=True)
class Upload:
    """One upload of an adapter's blob (its file) in parts, which can be resumed.

    digest: SHA-256 of the blob, as the sender states it.
    owner: id of the admin's key that sends it.
    size_bytes: size of the blob.
    part_bytes: size of every part but the last.
    created: Unix seconds.
    nonce: random last component of the object key `key`.
    token: the store's id of the multipart upload, which holds all parts; None if the store already
        had the blob when the upload began.
    """

    digest: str
    owner: str
    size_bytes: int
    part_bytes: int
    created: float
    nonce: str
    token: str | None

    @property
    def key(self) -> str:
        """Key of the upload's bytes in the store, which no other upload ever uses."""
        return f"{_folder(self.digest, self.owner)}{self.nonce}"

    @property
    def numbers(self) -> range:
        """Numbers of the parts, from 1."""
        return range(1, -(-self.size_bytes // self.part_bytes) + 1)

    def part_size(self, number: int) -> int:
        """Return the bytes of one part; only the last may be smaller than part_bytes."""
        return min(self.part_bytes, self.size_bytes - (number - 1) * self.part_bytes)


class ResumableUploads:
    """Uploads of adapters' files into one store, in parts. Safe in any thread of any process."""

    def __init__(self, store: ObjectStore, part_bytes: int = PART_BYTES) -> None:
        self._store = store
        self._part_bytes = part_bytes

    def begin(self, digest: str, size_bytes: int, owner: str) -> tuple[Upload, tuple[int, ...]]:
        """Resume an upload or begin a new one; return it with the numbers of its missing parts.

        digest: SHA-256 of the blob, as the sender states it.
        size_bytes: size of the blob.
        owner: id of the admin's key that sends it.

        Raises Conflict if this key began the upload with another size.
        """
        stored = self.stored(digest)
        upload = self._found(digest, owner) or self._create(digest, size_bytes, owner, stored)
        if upload.size_bytes != size_bytes:
            raise Conflict(
                f"the upload of {digest} was begun with {upload.size_bytes} bytes, and now has "
                f"{size_bytes}: register the file again"
            )
        if stored:
            return upload, ()
        try:
            return upload, self._missing(upload)
        except ObjectNotFound:  # parts deleted or blob garbage collected: start over
            self.discard(upload)
            upload = self._create(digest, size_bytes, owner, stored=False)
            return upload, self._missing(upload)

    def find(self, digest: str, owner: str) -> Upload:
        """Return the upload of the blob `digest` that the admin's key `owner` began. Raises
        NotFound.
        """
        upload = self._found(digest, owner)
        if upload is None:
            raise NotFound(f"this key has begun no upload of {digest}")
        return upload

    def url(self, upload: Upload, number: int) -> str | None:
        """Return the URL to which the sender PUTs a part; None: the sender PUTs it to the gateway.

        number: number of the part, from 1.
        """
        if upload.token is None:
            return None
        return self._store.parts.url(upload.key, upload.token, number, upload.part_size(number))

    def put(self, upload: Upload, number: int, part: Path) -> None:
        """Write one part of an upload, from a file of the part's size.

        number: number of the part, from 1.

        Raises ObjectNotFound if the parts are joined already.
        """
        if upload.token is not None:
            self._store.parts.put(upload.key, upload.token, number, part)

    def download(self, digest: str, owner: str, path: Path) -> None:
        """Write the whole blob of an upload into a file and verify its digest.

        digest: SHA-256 of the blob, as the sender states it.
        owner: id of the admin's key that sent it.

        The bytes come from the store's blobs if the blob is stored already, else from the parts.
        Raises NotFound if there is no such upload, Conflict if parts are missing, and
        InvalidAdapter if the digest differs; the upload is then discarded.
        """
        found = (
            self._store.download(blob_key(digest), path)
            if self.stored(digest)
            else self._gather(digest, owner, path)
        )
        if found != digest:
            self.end(digest, owner)
            raise InvalidAdapter(
                f"the uploaded bytes have the digest {found} and not {digest}: register the "
                "file again"
            )

    def keep(self, digest: str, owner: str, blob: Path) -> None:
        """Store the blob of an upload under its digest, unless the store has it.

        The store copies the uploaded parts if it can; else the bytes come from the file `blob`.

        digest: SHA-256 of the blob.
        owner: id of the admin's key that sent the upload.
        """
        upload = self._found(digest, owner)
        if upload is not None and upload.token is not None and not self.stored(digest):
            with suppress(ObjectNotFound):  # another registration of the upload has ended it
                self._store.parts.copy(upload.key, blob_key(digest))
        if not self.stored(digest):
            self._store.put_file(blob_key(digest), blob)

    def end(self, digest: str, owner: str) -> None:
        """Delete the record and bytes of the owner's upload of a blob, if there is one."""
        upload = self._found(digest, owner)
        if upload is not None:
            self.discard(upload)

    def discard(self, upload: Upload) -> None:
        """Delete an upload's record and bytes."""
        if upload.token is not None:
            self._store.parts.delete(upload.key, upload.token)
        self._store.delete(_record_key(upload.digest, upload.owner))

    def in_flight(self) -> Iterator[Upload]:
        """Yield every upload that was begun and not discarded."""
        for key in self._store.list(PREFIX):
            if key.endswith("/" + _RECORD):
                _, digest, owner, _ = key.split("/")
                upload = self._found(digest, owner)
                if upload is not None:
                    yield upload

    def sweep(self, before: float) -> int:
        """Discard uploads begun before `before` (Unix seconds); return their number.

        Also deletes parts written before then that belong to no recorded upload, as a crash may
        leave.
        """
        old = [upload for upload in self.in_flight() if upload.created < before]
        for upload in old:
            self.discard(upload)
        for parts in self._store.parts.unfinished(PREFIX):
            if parts.begun < before:
                self._store.parts.delete(parts.key, parts.token)
        for found in self._store.scan(PREFIX):
            if found.modified < before and not found.key.endswith("/" + _RECORD):
                self._store.delete(found.key)
        return len(old)

    def stored(self, digest: str) -> bool:
        """Whether the store has this blob."""
        try:
            self._store.size(blob_key(digest))
        except ObjectNotFound:
            return False
        return True

    def _create(self, digest: str, size_bytes: int, owner: str, stored: bool) -> Upload:
        """Begin an upload, or return the owner's upload of this blob that a concurrent request has
        begun.

        stored: whether the store has the blob already, so that no parts are needed.
        """
        least = -(-size_bytes // _MOST_PARTS)
        nonce = uuid.uuid4().hex
        folder = _folder(digest, owner)
        upload = Upload(
            digest=digest,
            owner=owner,
            size_bytes=size_bytes,
            part_bytes=max(self._part_bytes, least),
            created=time.time(),
            nonce=nonce,
            token=None if stored else self._store.parts.begin(folder + nonce),
        )
        record = {k: v for k, v in asdict(upload).items() if k not in ("digest", "owner")}
        try:
            self._store.put_if_absent(_record_key(digest, owner), json.dumps(record).encode())
        except ObjectExists:  # or the write succeeded and its answer was lost
            first = self.find(digest, owner)
            if first != upload and upload.token is not None:
                self._store.parts.delete(upload.key, upload.token)
            return first
        return upload

    def _found(self, digest: str, owner: str) -> Upload | None:
        key = _record_key(digest, owner)
        try:
            return Upload(digest=digest, owner=owner, **json.loads(self._store.get(key)))
        except ObjectNotFound:
            return None
        except (ValueError, TypeError) as error:
            raise StoreError(f"{self._store.url}: {key} is damaged: delete it") from error

    def _missing(self, upload: Upload) -> tuple[int, ...]:
        if upload.token is None:
            raise ObjectNotFound(f"no blob {upload.digest} any more")
        try:
            sizes = self._store.parts.sizes(upload.key, upload.token)
        except ObjectNotFound:
            self._store.size(upload.key)  # raises unless the parts are joined
            return ()
        return tuple(n for n in upload.numbers if sizes.get(n) != upload.part_size(n))

    def _gather(self, digest: str, owner: str, path: Path) -> str:
        try:
            return self._join(self.find(digest, owner), path)
        except (NotFound, ObjectNotFound):
            if not self.stored(digest):  # else another registration has ended the upload
                raise
            return self._store.download(blob_key(digest), path)

    def _join(self, upload: Upload, path: Path) -> str:
        missing = self._missing(upload)
        if missing:
            raise Conflict(
                f"{len(missing)} of {len(upload.numbers)} parts of {upload.digest} have not "
                "arrived: register the file again, and it goes on from there"
            )
        assert upload.token is not None
        self._store.parts.join(upload.key, upload.token)
        return self._store.parts.download(upload.key, upload.token, path)


def _folder(digest: str, owner: str) -> str:
    return f"{PREFIX}{digest}/{owner}/"


def _record_key(digest: str, owner: str) -> str:
    return _folder(digest, owner) + _RECORD
