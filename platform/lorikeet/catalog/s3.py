"""Objects in an S3 bucket.

Endpoint, region and credentials are boto3's own business: AWS_ENDPOINT_URL_S3, AWS_PROFILE,
AWS_ACCESS_KEY_ID, a role and so on.
"""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    EndpointConnectionError,
    NoCredentialsError,
    PartialCredentialsError,
)

from lorikeet.catalog.s3_parts import S3Parts
from lorikeet.catalog.store import check_key, check_prefix
from lorikeet.errors import ObjectExists, ObjectNotFound, StoreError

_ATTEMPTS = 8
_MIB = 2**20
# One connection gives 85-90 MB/s: parts of 16 MiB, about 15 connections fill 10 Gb/s.
_TRANSFER = TransferConfig(
    multipart_threshold=32 * _MIB,
    multipart_chunksize=16 * _MIB,
    max_concurrency=15,
    preferred_transfer_client="classic",  # the same on every instance type
)
_CONFIG = Config(
    signature_version="s3v4",  # boto3 would presign with SigV2, which covers no length
    retries={"mode": "standard", "max_attempts": 5},
    connect_timeout=5,
    read_timeout=30,
    max_pool_connections=64,
)
_ABSENT = frozenset({"404", "NoSuchKey", "NoSuchUpload"})
_REFUSED = frozenset(
    {
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
    }
)
_FORBIDDEN = frozenset({"403", "AccessDenied"})


class S3Store:
    """An ObjectStore under a prefix of a bucket that supports If-None-Match on PUT."""

    def __init__(self, bucket: str, prefix: str = "") -> None:
        self._bucket = bucket
        self._prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""
        with self._errors(""):
            self._client = boto3.session.Session().client("s3", config=_CONFIG)

    @property
    def url(self) -> str:
        """s3://bucket/prefix."""
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    @property
    def parts(self) -> S3Parts:
        """See ObjectStore."""
        return S3Parts(self, self._client, self._bucket, self._key, self._errors)

    def get(self, key: str) -> bytes:
        """See ObjectStore."""
        with self._errors(key):
            answer = self._client.get_object(Bucket=self._bucket, Key=self._key(key))
            return answer["Body"].read()

    def size(self, key: str) -> int:
        """See ObjectStore."""
        with self._errors(key):
            answer = self._client.head_object(Bucket=self._bucket, Key=self._key(key))
            return answer["ContentLength"]

    def put_file(self, key: str, path: Path) -> None:
        """See ObjectStore."""
        with self._errors(key):
            self._client.upload_file(str(path), self._bucket, self._key(key), Config=_TRANSFER)

    def put_if_absent(self, key: str, data: bytes) -> None:
        """See ObjectStore."""
        with self._errors(key):
            for attempt in range(_ATTEMPTS):
                try:
                    self._client.put_object(
                        Bucket=self._bucket, Key=self._key(key), Body=data, IfNoneMatch="*"
                    )
                    return
                except ClientError as error:
                    # Two conditional writes met; neither need have won.
                    if _code(error) != "ConditionalRequestConflict" or attempt == _ATTEMPTS - 1:
                        raise
                    time.sleep(random.uniform(0, 0.05 * 2**attempt))

    def download(self, key: str, path: Path) -> None:
        """See ObjectStore."""
        with self._errors(key):
            self._client.download_file(self._bucket, self._key(key), str(path), Config=_TRANSFER)

    def list(self, prefix: str, start_after: str = "") -> Iterator[str]:
        """See ObjectStore."""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket,
            Prefix=self._prefix + check_prefix(prefix),
            StartAfter=self._prefix + start_after,
        )
        with self._errors(prefix):
            for page in pages:
                for found in page.get("Contents", ()):
                    yield found["Key"].removeprefix(self._prefix)

    def first(self, prefix: str, start_after: str = "") -> str | None:
        """See ObjectStore."""
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
        """See ObjectStore."""
        with self._errors(key):
            self._client.delete_object(Bucket=self._bucket, Key=self._key(key))

    def _key(self, key: str) -> str:
        return self._prefix + check_key(key)

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            raise self._told(error, key) from error
        except Boto3Error as error:  # the transfers' own wrapping
            cause = error.__cause__ or error.__context__
            if isinstance(cause, ClientError):
                raise self._told(cause, key) from error
            raise StoreError(f"{self.url}: {key}: {error}") from error
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise StoreError(
                f"{self.url}: no AWS credentials: set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or give this machine a role"
            ) from error
        except EndpointConnectionError as error:
            raise StoreError(
                f"{self.url}: {error}: check the network, AWS_ENDPOINT_URL_S3 and AWS_REGION"
            ) from error
        except (BotoCoreError, ValueError, OSError) as error:
            raise StoreError(f"{self.url}: {key}: {error}") from error

    def _told(self, error: ClientError, key: str) -> StoreError:
        code = _code(error)
        if code in _ABSENT:
            return ObjectNotFound(f"no object {key} in {self.url}")
        if code in ("PreconditionFailed", "412"):
            return ObjectExists(f"there already is {key} in {self.url}")
        if code == "NoSuchBucket":
            return StoreError(
                f"bucket {self._bucket!r} does not exist: create it, or correct LORIKEET_CATALOG"
            )
        if code in _REFUSED:
            return StoreError(f"{self.url}: the credentials are refused ({code}): renew them")
        if code in _FORBIDDEN:
            return StoreError(
                f"{self.url}: {error.operation_name} is not allowed: the role needs "
                "s3:ListBucket on the bucket and s3:GetObject, s3:PutObject under the prefix"
            )
        return StoreError(f"{self.url}: {error.operation_name} {key}: {error}")


def _code(error: ClientError) -> str:
    return error.response.get("Error", {}).get("Code", "")
