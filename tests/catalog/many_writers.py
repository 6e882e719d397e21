"""Many writers, each in its own process: python many_writers.py URL FOLDER WRITERS SECONDS KILLS.

They register versions, move aliases by compare-and-swap and make snapshots, at random, until
SECONDS have passed and KILLS writers were killed and replaced. Each writer writes its acknowledged
changes as lines to FOLDER/<its name>, and is the actor of its entries. They are forks of one
process, so that sixteen of them start in a moment.
"""

import hashlib
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import BlobFacts
from lorikeet.catalog.store.object_store import ObjectStore, open_store
from lorikeet.catalog.store.s3 import S3Store
from lorikeet.errors import Conflict

TENANTS = ("acme", "globex")
NAMES = ("support", "sales", "legal")
_STOP = "stop"


def main(url: str, folder: Path, writers: int, seconds: float, kills: int) -> None:
    store = open_store(url)
    prepare(store)
    names = (f"w{number}" for number in count())
    running = {_start(store, folder, next(names)) for _ in range(writers)}
    chance = random.Random(11)
    until = time.monotonic() + seconds
    for number in range(kills):
        left = max(0.0, until - time.monotonic())
        time.sleep(chance.uniform(0, 2 * left / (kills - number)))
        victim = chance.choice(sorted(running))
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        running.remove(victim)
        running.add(_start(store, folder, next(names)))
    time.sleep(max(0.0, until - time.monotonic()))
    (folder / _STOP).touch()
    statuses = [os.waitpid(writer, 0)[1] for writer in running]
    sys.exit(any(statuses))


def prepare(store: ObjectStore) -> None:
    """Register two versions of each adapter; also initializes the client before the forks."""
    AdapterCatalog.init(store)
    catalog = AdapterCatalog(store)
    for tenant in TENANTS:
        catalog.create_tenant(tenant, actor="ann")
        for name in NAMES:
            for number in range(2):
                data = f"{tenant} {name} {number}".encode()
                facts = BlobFacts(hashlib.sha256(data).hexdigest(), len(data), 8, "demo", 10)
                with tempfile.NamedTemporaryFile() as blob:
                    blob.write(data)
                    blob.flush()
                    catalog.register(tenant, name, Path(blob.name), facts, actor="ann")
    if isinstance(store, S3Store):  # no two processes on one connection
        for client in (store._client, store._long_timeout_client):
            client._endpoint.http_session.close()  # type: ignore[attr-defined]


def _start(store: ObjectStore, folder: Path, name: str) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        for line in work(AdapterCatalog(store), folder, name):
            with (folder / name).open("a") as said:
                said.write(line + "\n")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)  # the parent's clean-up is not ours


def work(catalog: AdapterCatalog, folder: Path, name: str) -> Iterator[str]:
    """Write to the catalog and yield a line for each acknowledged change."""
    chance = random.Random(name)
    blob = folder / f"{name}.blob"
    for number in count():
        if (folder / _STOP).exists():
            return
        tenant, adapter = chance.choice(TENANTS), chance.choice(NAMES)
        act = chance.choices(["register", "move", "snapshot"], [4, 8, 2])[0]
        if act == "snapshot":
            yield f"snapshot {catalog.reader.snapshot()}"
        elif act == "register":
            data = f"{name} {number}".encode()
            blob.write_bytes(data)
            facts = BlobFacts(hashlib.sha256(data).hexdigest(), len(data), 8, "demo", 10)
            try:
                version = catalog.register(tenant, adapter, blob, facts, actor=name)
            except Conflict:  # sixty others came first
                yield "conflict"
            else:
                yield f"registered {tenant}/{adapter} {version.version} {facts.digest}"
        else:
            catalog.reader.refresh()
            record = catalog.reader.ask(lambda state, t=tenant, a=adapter: state.adapter(t, a))  # type: ignore[misc]
            now, version = record.aliases["prod"], chance.randint(1, len(record.versions))
            if version == now:
                continue
            try:
                catalog.promote(tenant, adapter, version, expect=now, actor=name)
            except Conflict:
                yield "conflict"
            else:
                yield f"moved {tenant}/{adapter} {now} {version}"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
