"""Sixteen writers at once, and writers killed at any point: no change is lost or doubled.

In a folder, and on MiniStack or whatever server the fixture s3_bucket is told to use.
"""

import subprocess
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lorikeet.catalog.apply import apply_entries
from lorikeet.catalog.catalog import blob_key
from lorikeet.catalog.changes import AliasMoved, Entry, VersionRegistered
from lorikeet.catalog.log import Log
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.snapshots import partition_to_bytes
from lorikeet.catalog.state import PARTITIONS, CatalogState, Partition
from lorikeet.catalog.store.object_store import open_store

MANY_WRITERS = Path(__file__).with_name("many_writers.py")


@dataclass
class Done:
    """Versions by adapter and number, and moves of prod (adapter, from, to) in order."""

    versions: dict[tuple[str, int], str] = field(default_factory=dict)
    moves: list[tuple[str, int, int]] = field(default_factory=list)
    snapshots: int = 0
    conflicts: int = 0


@pytest.fixture(params=["folder", "bucket"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param == "folder":
        return str(tmp_path_factory.mktemp("catalog") / "store")
    return f"{request.getfixturevalue('s3_bucket')}/{uuid.uuid4().hex}"


@pytest.mark.parametrize(
    "seconds", [2, pytest.param(60, marks=[pytest.mark.soak, pytest.mark.timeout(300)])]
)
def test_sixteen_writers_lose_nothing(url: str, tmp_path: Path, seconds: float) -> None:
    said, seen = run(url, tmp_path, writers=16, seconds=seconds, kills=0)

    written = check(url, said)
    for name, done in said.items():  # nobody was killed, so all that was done was said
        assert (done.versions, done.moves) == (written[name].versions, written[name].moves)
    assert len(said) >= 12  # most came through, if only two processors turn for sixteen of them
    assert sum(len(each.versions) for each in said.values()) > 0
    assert sum(len(each.moves) for each in said.values()) > 0
    assert seen == sorted(seen)


@pytest.mark.parametrize(
    ("seconds", "kills"),
    [(2, 25), pytest.param(60, 50, marks=[pytest.mark.soak, pytest.mark.timeout(300)])],
)
def test_writers_killed_at_random_points_lose_nothing(
    url: str, tmp_path: Path, seconds: float, kills: int
) -> None:
    said, seen = run(url, tmp_path, writers=5, seconds=seconds, kills=kills)

    check(url, said)
    assert len(said) >= 5  # some lived long enough to be told something
    assert seen == sorted(seen)


def run(
    url: str, folder: Path, writers: int, seconds: float, kills: int
) -> tuple[dict[str, Done], list[int]]:
    """Run the writers; return their acknowledged changes, and the entries that a reader saw."""
    crowd = subprocess.Popen(
        [
            sys.executable,
            str(MANY_WRITERS),
            url,
            str(folder),
            str(writers),
            str(seconds),
            str(kills),
        ]
    )
    seen: list[int] = []
    over = threading.Event()

    def follow() -> None:
        reader = CatalogReader(open_store(url))
        while not (folder / "w0").exists() and not over.is_set():
            time.sleep(0.05)  # there is no catalog yet
        while not over.is_set():
            seen.append(reader.refresh().seq)
            reader.ask(lambda state: list(state.adapters("acme")))
            time.sleep(0.1)

    reading = threading.Thread(target=follow)
    reading.start()
    try:
        assert crowd.wait(timeout=seconds + 120) == 0
    finally:
        over.set()
        crowd.kill()
        reading.join()
    names = (path for path in folder.iterdir() if path.suffix == "" and path.name != "stop")
    return {path.name: told(path.read_text()) for path in names}, seen


def told(text: str) -> Done:
    done = Done()
    for line in text.split("\n")[:-1]:
        match line.split():
            case ["registered", adapter, version, digest]:
                done.versions[adapter, int(version)] = digest
            case ["moved", adapter, before, after]:
                done.moves.append((adapter, int(before), int(after)))
            case ["snapshot", _]:
                done.snapshots += 1
            case ["conflict"]:
                done.conflicts += 1
    return done


def check(url: str, said: dict[str, Done]) -> dict[str, Done]:
    """Check the acknowledged changes against the log; return the changes of each writer."""
    store = open_store(url)
    entries = Log(store).read(0)
    assert [entry.seq for entry in entries] == list(range(1, len(entries) + 1))
    assert len({entry.nonce for entry in entries}) == len(entries)
    written = by_writer(entries)
    for name, done in said.items():
        # a killed writer may have done one thing more than it could say
        assert done.versions.items() <= written[name].versions.items()
        assert done.moves == written[name].moves[: len(done.moves)]
        unsaid = len(written[name].moves) - len(done.moves)
        assert unsaid + len(written[name].versions) - len(done.versions) <= 1

    from_the_log = apply_entries(CatalogState(), entries)
    for record in from_the_log.adapters():
        digests = [version.digest for version in record.versions]
        assert len(set(digests)) == len(digests)
        for digest in digests:
            assert store.size(blob_key(digest)) > 0
    for reader in (CatalogReader(store), CatalogReader(store)):
        reader.refresh()
        reader.read(range(PARTITIONS + 1))
        assert contents(reader.state) == contents(from_the_log)
        reader.snapshot()
    return written


def by_writer(entries: Sequence[Entry]) -> dict[str, Done]:
    """Return each actor's changes from the log; a move begins where the log had the alias."""
    written: dict[str, Done] = defaultdict(Done)
    prod: dict[str, int] = {}
    for entry in entries:
        for change in entry.changes:
            if isinstance(change, VersionRegistered):
                at = (f"{change.tenant}/{change.name}", change.version)
                assert not any(at in done.versions for done in written.values())
                written[entry.actor].versions[at] = change.digest
            elif isinstance(change, AliasMoved):
                adapter = f"{change.tenant}/{change.name}"
                if adapter in prod:  # else its first version became prod by itself
                    move = (adapter, prod[adapter], change.version)
                    written[entry.actor].moves.append(move)
                prod[adapter] = change.version
    return written


def contents(state: CatalogState) -> list[bytes]:
    return [
        partition_to_bytes(partition)
        for partition in state.partitions
        if isinstance(partition, Partition)
    ]
