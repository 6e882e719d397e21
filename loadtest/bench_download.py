"""Download speed of a replica, compared with as many parallel ranged curls, from radosgw.

python -m loadtest.bench_download

Both download the same 335 MB object from the same local server, in turns. curl: a presigned URL,
one process per range, no checksum. Lorikeet: as a replica downloads, with the SHA-256 verified.
Files are deleted, and nothing is synced to disk. Hashing takes a quarter of a second of one CPU, so
other load on this machine costs Lorikeet more than curl.

Prints both rates and their ratio; exits with 1 below 80% of curl's rate.
"""

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import boto3

from lorikeet.catalog.catalog import blob_key
from lorikeet.catalog.store.object_store import open_store
from lorikeet.catalog.store.parallel_download import CONNECTIONS
from lorikeet.replica.engine_process import CatalogAdapterSource
from lorikeet_engine.adapter import AdapterRef
from tests.ceph import radosgw

SIZE_BYTES = 335_000_000
ROUNDS = 9
LEAST = 0.8


def main() -> int:
    """Print the rates of curl and of Lorikeet, and their ratio; return the exit status."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with radosgw("bench", "bench") as address, tempfile.TemporaryDirectory() as name:
        os.environ |= {
            "AWS_ENDPOINT_URL_S3": address,
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        folder = Path(name)
        digest = _upload(folder / "blob")
        (folder / "blob").unlink()
        ours = _replica(folder, digest)
        theirs = _curls(folder, digest)
        seconds = [(_timed(theirs), _timed(ours)) for _ in range(ROUNDS + 1)][1:]
    curl_s, ours_s = (statistics.median(column) for column in zip(*seconds, strict=True))
    ratio = curl_s / ours_s
    print(
        f"{SIZE_BYTES / 1e6:.0f} MB from radosgw, median of {ROUNDS} rounds, {os.cpu_count()} CPUs"
    )
    print(f"{CONNECTIONS} ranged curls      {SIZE_BYTES / curl_s / 1e6:6.0f} MB/s")
    print(f"a replica, verified  {SIZE_BYTES / ours_s / 1e6:6.0f} MB/s, {ratio:.0%} of curl's rate")
    return 0 if ratio >= LEAST else 1


def _upload(blob: Path) -> str:
    data = os.urandom(SIZE_BYTES)
    blob.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    boto3.session.Session().client("s3").create_bucket(Bucket="bench")
    open_store("s3://bench").put_file(blob_key(digest), blob)
    return digest


def _replica(folder: Path, digest: str) -> Callable[[], None]:
    source = CatalogAdapterSource(open_store("s3://bench"))
    ref = AdapterRef("bench", "adapter", 1, digest)

    def run() -> None:
        assert source.fetch(ref, folder / "fetched") == digest
        (folder / "fetched").unlink()

    return run


def _curls(folder: Path, digest: str) -> Callable[[], None]:
    address = (
        boto3.session.Session()
        .client("s3")
        .generate_presigned_url("get_object", {"Bucket": "bench", "Key": blob_key(digest)})
    )
    step = -(-SIZE_BYTES // CONNECTIONS)
    curl = ["curl", "--silent", "--fail", address, "--range"]

    def run() -> None:
        running = [
            subprocess.Popen([*curl, f"{at}-{at + step - 1}", "-o", str(folder / f"{at}.range")])
            for at in range(0, SIZE_BYTES, step)
        ]
        assert [process.wait() for process in running] == [0] * CONNECTIONS
        got = [path.stat().st_size for path in folder.glob("*.range")]
        assert sum(got) == SIZE_BYTES
        for path in folder.glob("*.range"):
            path.unlink()

    return run


def _timed(run: Callable[[], None]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


if __name__ == "__main__":
    sys.exit(main())
