"""Time, requests and memory that readers and writers of a catalog of a million adapters need.

python -m loadtest.bench_catalog [--adapters 1000000] [--tenants 10000] [--at s3://bucket/prefix]

Without --at it starts MiniStack. The catalog is a snapshot, written by the product's own code, and
a tail of TAIL entries. Each operation is timed in a process of its own, after imports and after the
client was made. Prints for each operation the median and worst time, requests, peak memory and
goal.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lorikeet.catalog.apply import apply_entries
from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.log import Log
from lorikeet.catalog.partition_format import encode_tenant
from lorikeet.catalog.reader import SNAPSHOT_EVERY
from lorikeet.catalog.records import (
    AdapterRecord,
    BlobFacts,
    Limits,
    TenantRecord,
    TenantState,
    VersionRecord,
)
from lorikeet.catalog.snapshots import Snapshots
from lorikeet.catalog.state import PARTITIONS, CatalogState, Partition, partition_of
from lorikeet.catalog.store.object_store import open_store
from tests.ministack import ministack

TAIL = SNAPSHOT_EVERY // 2
REPEATS = 5
OWNER, NAME = "tenant-00007", "adapter-0003"
BASE_MODEL = "meta-llama/Llama-3.1-8B-Instruct"

Measured = dict[str, Any]


def build(url: str, tenants: int, adapters: int) -> None:
    """Write a catalog at `url`, with N adapters spread evenly over tenants."""
    store = open_store(url)
    catalog = AdapterCatalog.init(store)
    spread: list[dict[str, TenantState | bytes]] = [{} for _ in range(PARTITIONS)]
    for number in range(tenants):
        tenant = make_tenant(f"tenant-{number:05d}", adapters // tenants)
        spread[partition_of(tenant.record.name)][tenant.record.name] = encode_tenant(tenant)
    partitions = (*map(Partition, spread), Partition())
    Snapshots(store).write(CatalogState(catalog.reader.state.seq, time.time(), partitions))
    writer = AdapterCatalog(store)
    for number in range(TAIL):
        writer.promote(f"tenant-{number % tenants:05d}", NAME, 1, f"alias-{number}", actor="bench")


def make_tenant(tenant: str, adapters: int) -> TenantState:
    """Make a tenant with N adapters of one version each."""
    records = [make_adapter(tenant, f"adapter-{number:04d}") for number in range(adapters)]
    record = TenantRecord(tenant, time.time(), Limits(max_concurrent=32))
    return TenantState(record, {each.name: each for each in records})


def make_adapter(tenant: str, name: str) -> AdapterRecord:
    """Make an adapter with one version, aliased prod."""
    digest = hashlib.sha256(f"{tenant}/{name}".encode()).hexdigest()
    version = VersionRecord(digest, 83_951_616, 16, BASE_MODEL, 83_951_616, 1, time.time())
    return AdapterRecord(tenant, name, False, (version,), {"prod": 1}, {"prod": ()})


def open_name(catalog: AdapterCatalog) -> None:
    """Resolve one adapter name to its digest, from an empty reader."""
    catalog.reader.refresh()
    catalog.reader.ask(lambda state: state.resolve(f"{OWNER}/{NAME}", OWNER))


def open_tenant(catalog: AdapterCatalog) -> None:
    """Read all adapters that one tenant may use, from an empty reader."""
    catalog.reader.refresh()
    assert catalog.reader.ask(lambda state: state.visible_to(OWNER))


def read_all(catalog: AdapterCatalog) -> None:
    """Read every record of every adapter, from an empty reader."""
    catalog.reader.refresh()
    catalog.reader.ask(lambda state: sum(1 for _ in state.adapters()))


def register(catalog: AdapterCatalog) -> None:
    """Register a new version of an adapter, with the upload of its small blob."""
    data = uuid.uuid4().bytes
    with tempfile.TemporaryDirectory() as folder:
        blob = Path(folder) / "blob"
        blob.write_bytes(data)
        facts = BlobFacts(hashlib.sha256(data).hexdigest(), len(data), 16, BASE_MODEL, len(data))
        catalog.register(OWNER, NAME, blob, facts, actor="bench")


def snapshot(catalog: AdapterCatalog) -> None:
    """Write a snapshot after the tail, from an empty reader."""
    catalog.reader.snapshot()


MEASURED: dict[str, tuple[Callable[[AdapterCatalog], None], str]] = {
    "a name, cold": (open_name, "≤ 50 ms"),
    "a tenant's view, cold": (open_tenant, "≤ 0.5 s"),
    "everything, cold": (read_all, "≤ 30 s, ≤ 1 GB"),
    "register, cold": (register, ""),
    "register, while following": (register, "≤ 10 requests"),
    "a snapshot after the tail": (snapshot, ""),
}


def measure(url: str, what: str) -> Measured:
    """Measure seconds, requests and peak memory of one operation in this process.

    what: name of the operation in MEASURED.
    """
    store: Any = open_store(url)
    catalog = AdapterCatalog(store)
    if "following" in what:
        open_name(catalog)
    requests = 0

    def count(**_: object) -> None:
        nonlocal requests
        requests += 1

    store._client.meta.events.register("before-send.s3", count)
    begun = time.perf_counter()
    MEASURED[what][0](catalog)
    seconds = time.perf_counter() - begun
    return {
        "seconds": seconds,
        "requests": requests,
        "peak_bytes": _peak_bytes(),
        "fold_s": _fold_seconds(catalog) if what == "everything, cold" else None,
    }


def _fold_seconds(catalog: AdapterCatalog) -> float:
    """Return the median time to apply one more entry to a state that is read completely."""
    catalog.promote(OWNER, NAME, 1, "measured", actor="bench")
    state = catalog.reader.state
    entry = Log(catalog.store).read(state.seq - 1)[-1]
    times = []
    for _ in range(100):
        begun = time.perf_counter()
        apply_entries(state, [replace(entry, seq=state.seq + 1)])
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def _peak_bytes() -> int:
    """Return this process's peak memory; getrusage would include the parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _measured(url: str, what: str) -> Measured:
    command = [sys.executable, "-m", "loadtest.bench_catalog", "--at", url, "--measure", what]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    answer: Measured = json.loads(done.stdout)
    return answer


@contextmanager
def empty_bucket() -> Iterator[str]:
    """Yield the URL of an empty bucket on a MiniStack server of its own."""
    import boto3

    with ministack() as address:
        os.environ |= {
            "AWS_ENDPOINT_URL_S3": address,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        boto3.session.Session().client("s3").create_bucket(Bucket="bench")
        yield "s3://bench/catalog"


def run(url: str, tenants: int, adapters: int) -> None:
    """Build the catalog, measure every operation and print the table."""
    begun = time.perf_counter()
    build(url, tenants, adapters)
    seconds = time.perf_counter() - begun
    print(f"{adapters:,} adapters of {tenants:,} tenants, {TAIL} entries after the snapshot;")
    print(f"built in {seconds:.0f} s at {url}\n")
    print(f"{'':28}{'median':>10}{'worst':>10}{'requests':>10}{'memory':>10}   goal")
    for what, (_, goal) in MEASURED.items():
        repeats = 1 if what in ("everything, cold", "a snapshot after the tail") else REPEATS
        runs = [_measured(url, what) for _ in range(repeats)]
        seconds = statistics.median(run["seconds"] for run in runs)
        worst = max(run["seconds"] for run in runs)
        requests = max(run["requests"] for run in runs)
        memory = max(run["peak_bytes"] for run in runs)
        print(
            f"{what:28}{seconds * 1e3:>7.0f} ms{worst * 1e3:>7.0f} ms{requests:>10}"
            f"{memory / 2**20:>6.0f} MiB   {goal}"
        )
        if runs[0]["fold_s"] is not None:
            print(f"{'one entry more, folded':28}{runs[0]['fold_s'] * 1e3:>7.2f} ms")


def main() -> None:
    """Run the benchmark of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapters", type=int, default=1_000_000)
    parser.add_argument("--tenants", type=int, default=10_000)
    parser.add_argument("--at", help="empty prefix for the catalog, s3://bucket/prefix")
    parser.add_argument("--measure", choices=MEASURED, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given.at, given.measure)))
    elif given.at:
        run(given.at, given.tenants, given.adapters)
    else:
        with empty_bucket() as url:
            run(url, given.tenants, given.adapters)


if __name__ == "__main__":
    main()
