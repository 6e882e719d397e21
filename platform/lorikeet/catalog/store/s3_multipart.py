"""Parts of uploads in S3: multipart uploads whose parts anybody with the address can PUT."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from lorikeet.catalog.store.multipart import UnfinishedUpload
from lorikeet.errors import ObjectNotFound

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

    from lorikeet.catalog.store.s3 import S3Store

_URL_LASTS_S = 3600
_LARGEST_COPY_BYTES = 5 * 2**30  # of one CopyObject


class ObjectAddress(TypedDict):
    """Where an object lies, as S3's calls take it."""

    Bucket: str
    Key: str


class S3Parts:
    """A PartStore over a bucket's multipart uploads; the token is S3's upload id."""

    def __init__(
        self,
        store: "S3Store",
        client: "S3Client",
        patient: "S3Client",
        address: Callable[[str], ObjectAddress],
        errors: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """patient: a client for what S3 answers late. address: where a key's object lies.

        errors: raises S3's errors as StoreError.
        """
        self._store = store
        self._client, self._patient = client, patient
        self._address = address
        self._errors = errors

    def begin(self, key: str) -> str:
        """See PartStore."""
        with self._errors(key):
            return self._client.create_multipart_upload(**self._address(key))["UploadId"]

    def url(self, key: str, token: str, number: int, size: int) -> str:
        """See PartStore. S3 refuses a body of another length: it is part of the signature."""
        with self._errors(key):
            return self._client.generate_presigned_url(
                "upload_part",
                Params={
                    **self._address(key),
                    "UploadId": token,
                    "PartNumber": number,
                    "ContentLength": size,
                },
                ExpiresIn=_URL_LASTS_S,
            )

    def put(self, key: str, token: str, number: int, path: Path) -> None:
        """See PartStore."""
        with self._errors(key), path.open("rb") as file:
            self._patient.upload_part(
                **self._address(key), UploadId=token, PartNumber=number, Body=file
            )

    def sizes(self, key: str, token: str) -> dict[int, int]:
        """See PartStore."""
        return {number: size for number, (size, _) in self._parts(key, token).items()}

    def join(self, key: str, token: str) -> None:
        """See PartStore."""
        with suppress(ObjectNotFound), self._errors(key):  # not found: it is joined already
            parts = self._parts(key, token)
            self._patient.complete_multipart_upload(
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
        """See PartStore."""
        return self._store.download(key, path)

    def copy(self, key: str, target: str) -> None:
        """See PartStore. Larger objects than one request can copy are left to put_file."""
        if self._store.size(key) > _LARGEST_COPY_BYTES:
            return
        with self._errors(key):
            address = self._address(key)
            self._patient.copy_object(
                **self._address(target),
                CopySource={"Bucket": address["Bucket"], "Key": address["Key"]},
            )

    def delete(self, key: str, token: str) -> None:
        """See PartStore."""
        with suppress(ObjectNotFound), self._errors(key):
            self._client.abort_multipart_upload(**self._address(key), UploadId=token)
        self._store.delete(key)

    def unfinished(self, prefix: str) -> Iterator[UnfinishedUpload]:
        """See PartStore."""
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
        """Bytes and ETag by number. One page: an upload has at most a thousand parts."""
        with self._errors(key):
            answer = self._client.list_parts(**self._address(key), UploadId=token)
        return {
            part["PartNumber"]: (part["Size"], part["ETag"]) for part in answer.get("Parts", ())
        }
