"""Object store in an S3 bucket.

boto3 finds endpoint, region and credentials: AWS_ENDPOINT_URL_S3, AWS_PROFILE, AWS_ACCESS_KEY_ID,
a role and so on.

Written for AWS, and tested on MiniStack and on Ceph's radosgw 16.2 as well. The servers differ:

- Signatures: MiniStack does not check them.
- Checksums of uploads: radosgw ignores them. Readers of a blob check its digest.
- Writers killed during a PUT: MiniStack stores what arrived, unless Content-MD5 refuses it.
- Concurrent conditional PUTs: AWS may answer 409 (retry) to one; MiniStack and radosgw answer 412.
- If-Match on PUT: radosgw expects the ETag without its quotes. Not used here.
- If-Match on DELETE and on CompleteMultipartUpload: radosgw ignores it. Not used here.
- Conditional PUT into a bucket with versioning enabled: radosgw accepts it and ignores the
  condition (conditional_writes.py checks that); once versioning is suspended, radosgw honours it.
- If-None-Match on CompleteMultipartUpload: radosgw ignores it. Not used here.
- Errors: radosgw sends a code and no message.

The store relies only on features that all three share: If-None-Match: * on PUT, ranges, listings in
byte order, and read-after-write consistency.
"""

import base64
import hashlib
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypedDict

import boto3
from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    EndpointConnectionError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
)
from botocore.exceptions import ConnectionError as HTTPConnectionError
from botocore.response import StreamingBody

from lorikeet.catalog.store import parallel_download
from lorikeet.catalog.store.object_store import (
    StoredObject,
    UnfinishedUpload,
    check_key,
    check_prefix,
)
from lorikeet.catalog.store.timed_session import TimedSession
from lorikeet.errors import ObjectExists, ObjectNotFound, StoreError, StoreRefused

_ATTEMPTS = 8
_MIB = 2**20
_PIECE_BYTES = 2**18  # read from a body at once: larger costs page faults, smaller costs calls
_TRANSFER = TransferConfig(
    multipart_threshold=32 * _MIB,
    multipart_chunksize=16 * _MIB,
    max_concurrency=parallel_download.CONNECTIONS,
    preferred_transfer_client="classic",  # the default depends on the instance type
)
_STALL_TIMEOUT_S = 5.0
"""Seconds without a byte after which a request is tried again on another connection.

timed_session.py gives up connections that send a byte now and then.
"""
_RETRY_WINDOW_S = 6.0
"""Seconds without success after which no request is retried. A call to a store that does not answer
thus fails within 11 s.
"""
_CONFIG = Config(
    signature_version="s3v4",  # boto3 presigns with SigV2 by default, which signs no length
    retries={"mode": "standard", "max_attempts": 5},
    connect_timeout=_STALL_TIMEOUT_S,
    read_timeout=_STALL_TIMEOUT_S,
    max_pool_connections=64,
    # Over https boto3 otherwise sends uploads in chunks with a checksum behind them, which servers
    # such as Ceph 16 refuse (MissingContentLength). Digests of the catalog check contents anyway.
    request_checksum_calculation="when_required",
    response_checksum_validation="when_required",
)
_LONG_TIMEOUT = Config(read_timeout=12)
"""Configuration for copies, joins and uploads, which S3 answers only when they are complete.

The timeout exceeds _RETRY_WINDOW_S seconds, so these calls are tried once.
"""
_URL_LIFETIME_S = 3600
_LARGEST_COPY_BYTES = 5 * 2**30  # limit of one CopyObject

_ABSENT = frozenset({"404", "NoSuchKey", "NoSuchUpload"})
_EXISTS = frozenset({"412", "PreconditionFailed"})
_CONFLICT = frozenset({"409", "ConditionalRequestConflict"})
_FORBIDDEN = frozenset({"403", "AccessDenied"})
_REFUSED = frozenset(
    {
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
    }
)


class _Address(TypedDict):
    """Bucket and key of an object, as arguments of S3 calls."""

    Bucket: str
    Key: str


class S3Store:
    """ObjectStore under a prefix of a bucket that supports If-None-Match on PUT."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self._bucket = bucket
        self._prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""
        with self._errors(""):
            session = boto3.session.Session()
            self._client = session.client("s3", config=_CONFIG)
            self._long_timeout_client = session.client("s3", config=_CONFIG.merge(_LONG_TIMEOUT))
        # Not of the other client: S3 sends spaces for as long as a copy or join takes.
        own = self._client._endpoint  # type: ignore[attr-defined]
        self._http = own.http_session = TimedSession(own.http_session)
        for client in (self._client, self._long_timeout_client):
            client.meta.events.register("before-call.s3", _record_start)
            client.meta.events.register_first("needs-retry.s3", _stop_late_retry)

    @property
    def url(self) -> str:
        """URL s3://bucket/prefix."""
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    @property
    def parts(self) -> "S3Parts":
        """Multipart uploads into this store."""
        return S3Parts(self)

    def get(self, key: str) -> bytes:
        """Return the whole object. Raises ObjectNotFound."""
        with self._errors(key):
            return self._client.get_object(**self._address(key))["Body"].read()

    def size(self, key: str) -> int:
        """Return the object's size in bytes. Raises ObjectNotFound."""
        with self._errors(key):
            return self._client.head_object(**self._address(key))["ContentLength"]

    def modified(self, key: str) -> float:
        """Return the Unix time of the last write or touch. Raises ObjectNotFound."""
        with self._errors(key):
            return self._client.head_object(**self._address(key))["LastModified"].timestamp()

    def touch(self, key: str) -> None:
        """Set the modification time by copying the object onto itself in one request, which S3
        allows up to 5 GiB.
        """
        with self._errors(key):
            address = self._address(key)
            self._long_timeout_client.copy_object(
                **address,
                CopySource={"Bucket": address["Bucket"], "Key": address["Key"]},
                MetadataDirective="REPLACE",
            )

    def put_file(self, key: str, path: Path) -> None:
        """Write or replace an object with a file's bytes."""
        with self._errors(key):
            self._long_timeout_client.upload_file(str(path), **self._address(key), Config=_TRANSFER)

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Create an object. Raises ObjectExists if there is one at the key."""
        md5 = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
        with self._errors(key):
            for attempt in range(_ATTEMPTS):
                try:
                    self._client.put_object(
                        **self._address(key), Body=data, IfNoneMatch="*", ContentMD5=md5
                    )
                    return
                except ClientError as error:
                    if not _is_conflict(error) or attempt == _ATTEMPTS - 1:
                        raise
                    time.sleep(_backoff_s(attempt))

    def download(self, key: str, path: Path) -> str:
        """Copy an object to a file; return its SHA-256 in hex. Raises ObjectNotFound."""
        with self._errors(key):
            size = self.size(key)
            # Signed once for all ranges: boto3 signs a request in the time in which 1 MB arrives.
            address = self._address(key)
            url = self._client.generate_presigned_url("get_object", Params={**address})
            return parallel_download.download(size, path, partial(self._read, key, url))

    def list(self, prefix: str, start_after: str = "") -> Iterator[str]:
        """Yield the keys that begin with `prefix` and sort after `start_after`, in byte order."""
        return (found.key for found in self._list(prefix, start_after))

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        """Yield the objects whose keys begin with `prefix`, in byte order."""
        return self._list(prefix, "")

    def first(self, prefix: str, start_after: str = "") -> str | None:
        """Return the first key that `list` would yield; None if there is none."""
        with self._errors(prefix):
            page = self._client.list_objects_v2(
                Bucket=self._bucket,
                Prefix=self._prefix + check_prefix(prefix),
                StartAfter=self._prefix + start_after,
                MaxKeys=1,
            )
        found = page.get("Contents", ())
        return found[0]["Key"].removeprefix(self._prefix) if found else None

    def delete(self, key: str) -> None:
        """Delete an object, if it exists."""
        with self._errors(key):
            self._client.delete_object(**self._address(key))

    def _list(self, prefix: str, start_after: str) -> Iterator[StoredObject]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket,
            Prefix=self._prefix + check_prefix(prefix),
            StartAfter=self._prefix + start_after,
        )
        with self._errors(prefix):
            for page in pages:
                for found in page.get("Contents", ()):
                    key = found["Key"].removeprefix(self._prefix)
                    yield StoredObject(key, found["Size"], found["LastModified"].timestamp())

    def _read(self, key: str, url: str, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes [start, end) of an object; resume where a connection broke or stalled.

        url: presigned URL of the object.
        """
        attempt, received_s = 0, time.monotonic()
        while start < end:
            body, broken = self._range(key, url, f"bytes={start}-{end - 1}"), None
            try:
                while piece := body.read(_PIECE_BYTES):
                    yield piece
                    start += len(piece)
                    attempt, received_s = 0, time.monotonic()
            except (HTTPClientError, IncompleteReadError) as error:
                broken = error
            if start < end:
                waited_s = time.monotonic() - received_s
                if attempt == _ATTEMPTS - 1 or waited_s > _RETRY_WINDOW_S:
                    raise StoreError(
                        f"{self.url}: {key}: no data received for {waited_s:.1f} s"
                    ) from broken
                time.sleep(_backoff_s(attempt))
                attempt += 1

    def _range(self, key: str, url: str, wanted: str) -> StreamingBody:
        """Request a range of an object by its presigned URL; if that fails, by boto3, whose error
        says why.

        wanted: value of the Range header.
        """
        request = AWSRequest("GET", url, headers={"Range": wanted}, stream_output=True)
        with suppress(HTTPClientError, HTTPConnectionError):
            got = self._http.send(request.prepare())
            if got.status_code == HTTPStatus.PARTIAL_CONTENT:
                return StreamingBody(got.raw, got.headers["Content-Length"])
            got.raw.read()  # so that the connection can be used again
        return self._client.get_object(**self._address(key), Range=wanted)["Body"]

    def _address(self, key: str) -> _Address:
        return {"Bucket": self._bucket, "Key": self._prefix + check_key(key)}

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            raise _explain(error, self.url, self._bucket, key) from error
        except Boto3Error as error:  # wraps errors of upload_file
            cause = error.__cause__ or error.__context__
            if isinstance(cause, ClientError):
                raise _explain(cause, self.url, self._bucket, key) from error
            raise StoreError(f"{self.url}: {key}: {error}") from error
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise StoreRefused(
                f"{self.url}: no AWS credentials: set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or give this machine a role"
            ) from error
        except EndpointConnectionError as error:
            raise StoreError(
                f"{self.url}: {error}: check the network, AWS_ENDPOINT_URL_S3 and AWS_REGION"
            ) from error
        except (BotoCoreError, ValueError, OSError) as error:
            raise StoreError(f"{self.url}: {key}: {error}") from error


class S3Parts:
    """PartStore on a bucket's multipart uploads; the token is S3's upload id."""

    def __init__(self, store: S3Store) -> None:
        self._store = store
        self._client, self._long_timeout_client = store._client, store._long_timeout_client
        self._address, self._errors = store._address, store._errors

    def begin(self, key: str) -> str:
        """Begin a multipart upload and return its token, S3's upload id."""
        with self._errors(key):
            return self._client.create_multipart_upload(**self._address(key))["UploadId"]

    def url(self, key: str, token: str, number: int, size: int) -> str:
        """Presign an UploadPart. The signature covers the length, so S3 refuses another length."""
        with self._errors(key):
            return self._client.generate_presigned_url(
                "upload_part",
                Params={
                    **self._address(key),
                    "UploadId": token,
                    "PartNumber": number,
                    "ContentLength": size,
                },
                ExpiresIn=_URL_LIFETIME_S,
            )

    def put(self, key: str, token: str, number: int, path: Path) -> None:
        """Write or replace one part with a file's bytes."""
        with self._errors(key), path.open("rb") as file:
            self._long_timeout_client.upload_part(
                **self._address(key), UploadId=token, PartNumber=number, Body=file
            )

    def sizes(self, key: str, token: str) -> dict[int, int]:
        """Return the size in bytes of each part received, by part number."""
        return {number: size for number, (size, _) in self._parts(key, token).items()}

    def join(self, key: str, token: str) -> None:
        """Join the parts received, in order, into one object, and accept no more parts."""
        with suppress(ObjectNotFound), self._errors(key):  # not found: already joined
            parts = self._parts(key, token)
            self._long_timeout_client.complete_multipart_upload(
                **self._address(key),
                UploadId=token,
                MultipartUpload={
                    "Parts": [
                        {"PartNumber": number, "ETag": etag}
                        for number, (_, etag) in sorted(parts.items())
                    ]
                },
            )

    def download(self, key: str, _token: str, path: Path) -> str:
        """Write the joined parts to a file and return the SHA-256 of the bytes, in hex."""
        return self._store.download(key, path)

    def copy(self, key: str, target: str) -> None:
        """Copy the joined parts in one request, which S3 allows up to 5 GiB; a larger object is
        left to `put_file`.
        """
        if self._store.size(key) > _LARGEST_COPY_BYTES:
            return
        with self._errors(key):
            address = self._address(key)
            self._long_timeout_client.copy_object(
                **self._address(target),
                CopySource={"Bucket": address["Bucket"], "Key": address["Key"]},
            )

    def delete(self, key: str, token: str) -> None:
        """Delete the parts, joined or not."""
        with suppress(ObjectNotFound), self._errors(key):
            self._client.abort_multipart_upload(**self._address(key), UploadId=token)
        self._store.delete(key)

    def unfinished(self, prefix: str) -> Iterator[UnfinishedUpload]:
        """Yield the uploads to keys under `prefix` that are neither joined nor deleted."""
        address = self._address("x")
        root = address["Key"].removesuffix("x")
        pages = self._client.get_paginator("list_multipart_uploads").paginate(
            Bucket=address["Bucket"], Prefix=root + prefix
        )
        with self._errors(prefix):
            for page in pages:
                for found in page.get("Uploads", ()):
                    key = found["Key"].removeprefix(root)
                    yield UnfinishedUpload(key, found["UploadId"], found["Initiated"].timestamp())

    def _parts(self, key: str, token: str) -> dict[int, tuple[int, str]]:
        """Return the size in bytes and the ETag of each part of an upload, by part number."""
        with self._errors(key):
            answer = self._client.list_parts(**self._address(key), UploadId=token)
        return {
            part["PartNumber"]: (part["Size"], part["ETag"]) for part in answer.get("Parts", ())
        }


def _is_conflict(error: ClientError) -> bool:
    """Whether an error means that concurrent conditional writes collided, so that a retry may
    succeed.
    """
    return _code(error) in _CONFLICT


def _explain(error: ClientError, url: str, bucket: str, key: str) -> StoreError:
    """Translate S3's answer about a key into an error that says what to do."""
    code = _code(error)
    if code in _ABSENT:
        return ObjectNotFound(f"no object {key} in {url}")
    if code in _EXISTS:
        return ObjectExists(f"{key} already exists in {url}")
    if code == "NoSuchBucket":
        return StoreRefused(
            f"bucket {bucket!r} does not exist: create it, or correct LORIKEET_CATALOG"
        )
    if code in _REFUSED:
        return StoreRefused(f"{url}: the credentials are refused ({code}): renew them")
    if code == "NotImplemented":
        return StoreRefused(
            f"{url}: the store does not implement {error.operation_name} as it is used here: use "
            "another store (docs/operations.md, Stores)"
        )
    if code in _FORBIDDEN:
        return StoreRefused(
            f"{url}: {error.operation_name} is not allowed: the role needs "
            "s3:ListBucket on the bucket and s3:GetObject, s3:PutObject, s3:DeleteObject under "
            "the prefix"
        )
    return StoreError(f"{url}: {error.operation_name} {key}: {error}")


def _code(error: ClientError) -> str:
    return error.response.get("Error", {}).get("Code", "")


def _record_start(context: dict[str, Any], **_: object) -> None:
    context["lorikeet_began_s"] = time.monotonic()


def _stop_late_retry(request_dict: dict[str, Any], **_: object) -> Any:
    """Return False if _RETRY_WINDOW_S seconds have passed, so that botocore does not retry; else
    None.
    """
    elapsed_s = time.monotonic() - request_dict["context"]["lorikeet_began_s"]
    return False if elapsed_s > _RETRY_WINDOW_S else None


def _backoff_s(attempt: int) -> float:
    return random.uniform(0, 0.05 * 2**attempt)
