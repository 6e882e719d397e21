"""What S3's servers answer, where they differ, and what an administrator should do about it.

Written for AWS, and tested on MiniStack and on Ceph's radosgw 16.2 as well. They differ in this:

- Signatures: MiniStack checks none.
- Checksums of what is put: radosgw ignores them. Digests are checked by those who read.
- Two conditional PUTs meet: AWS may answer 409 to one, to try again; the others only 412.
- If-Match on PUT: radosgw wants the ETag without its quotes. Not used here.
- If-Match on DELETE and on CompleteMultipartUpload: radosgw ignores it. Not used here.
- Conditional PUT into a versioned bucket: radosgw refuses it.
- Errors: radosgw sends a code and no message.

So the store builds on what all three keep: If-None-Match: * on PUT, ranges, listings in byte
order, and reads that see every write before them.
"""

from botocore.exceptions import ClientError

from lorikeet.errors import ObjectExists, ObjectNotFound, StoreError, StoreRefused

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


def is_conflict(error: ClientError) -> bool:
    """Two conditional writes met, and neither need have won: try again."""
    return _code(error) in _CONFLICT


def explain(error: ClientError, url: str, bucket: str, key: str) -> StoreError:
    """What an answer about this key, in the store at `url`, means here."""
    code = _code(error)
    if code in _ABSENT:
        return ObjectNotFound(f"no object {key} in {url}")
    if code in _EXISTS:
        return ObjectExists(f"there already is {key} in {url}")
    if code == "NoSuchBucket":
        return StoreRefused(
            f"bucket {bucket!r} does not exist: create it, or correct LORIKEET_CATALOG"
        )
    if code in _REFUSED:
        return StoreRefused(f"{url}: the credentials are refused ({code}): renew them")
    if code in _FORBIDDEN:
        return StoreRefused(
            f"{url}: {error.operation_name} is not allowed: the role needs "
            "s3:ListBucket on the bucket and s3:GetObject, s3:PutObject, s3:DeleteObject under "
            "the prefix"
        )
    return StoreError(f"{url}: {error.operation_name} {key}: {error}")


def _code(error: ClientError) -> str:
    return error.response.get("Error", {}).get("Code", "")
