"""Copy of the catalog on local disk, for gateways that start while the store is unreachable.

All gateways of a machine share the file. Its first line is the number of the newest entry; the rest
is compressed. The compressed part begins with a line of JSON: the entry's time and, for each
partition, a digest or null, and a number of bytes; the bytes of all partitions follow in the same
order. Bytes without a digest are the partition itself (snapshots.py). A digest marks a partition
that was not read: its bytes are the log entries since the snapshot that names the partition by this
digest.
"""

import hashlib
import json
import logging
import os
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from lorikeet.catalog.log_format import object_from_json, object_to_json
from lorikeet.catalog.snapshots import partition_from_bytes, partition_to_bytes
from lorikeet.catalog.state import CatalogState, Partition, UnreadPartition
from lorikeet.errors import StoreError

log = logging.getLogger(__name__)

_SCHEMA = 1


class KeptState(NamedTuple):
    """A catalog state read from the local file.

    age_s: seconds since the store last confirmed that the state was the newest.
    """

    state: CatalogState
    age_s: float


class KeptView:
    """Local file with the newest state of the catalog at `url`, for gateways that start while the
    store is unreachable. All gateways of a machine share the file.

    folder: folder of the file.

    Writes are atomic and the last one wins. If a slow gateway has overwritten a newer state, the
    next `confirm` of the newer state returns False.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self.path = folder / f"catalog-{hashlib.sha256(url.encode()).hexdigest()[:16]}.view"

    def write(self, state: CatalogState) -> None:
        """Write to the file a state that the store has just confirmed to be the newest.

        Raises OSError if the file cannot be written.
        """
        records = [_to_record(partition) for partition in state.partitions]
        sizes = [(digest, len(data)) for digest, data in records]
        head = {"schema": _SCHEMA, "time": state.time, "partitions": sizes}
        data = b"\n".join((json.dumps(head).encode(), b"".join(data for _, data in records)))
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = self.path.with_suffix(f".{os.getpid()}.part")
        try:
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.write(b"%d\n" % state.seq + zlib.compress(data, level=1))
            part.replace(self.path)
        finally:
            part.unlink(missing_ok=True)

    def confirm(self, seq: int) -> bool:
        """Record that log entry `seq` is still the store's newest.

        Returns False, and records nothing, if the file holds the state after another entry.
        Raises OSError if there is no file, or it cannot be changed.
        """
        with self.path.open("rb") as file:
            if file.readline() != b"%d\n" % seq:
                return False
        os.utime(self.path)
        return True

    def read(self) -> KeptState | None:
        """Return the state in the file; None if there is no file, or if it is damaged, which is
        logged.
        """
        try:
            seq, _, data = self.path.read_bytes().partition(b"\n")
            age_s = time.time() - self.path.stat().st_mtime
            return KeptState(_state_of(int(seq), zlib.decompress(data)), max(0.0, age_s))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, zlib.error, StoreError) as error:
            log.warning("kept_view_unreadable", extra={"error": repr(error)})
            return None


def _to_record(partition: Partition | UnreadPartition) -> tuple[str | None, bytes]:
    """Return how the file records a partition: a digest or None, and bytes.

    A partition that was read: None and its own bytes. An unread one: the digest of its bytes in the
    store, and the log entries that changed it since.
    """
    if isinstance(partition, UnreadPartition):
        pending = partition.pending
        return partition.digest, object_to_json(pending) if pending else b""
    return None, partition_to_bytes(partition)


def _state_of(seq: int, data: bytes) -> CatalogState:
    line, _, rest = data.partition(b"\n")
    head = json.loads(line)
    if head["schema"] != _SCHEMA:
        raise ValueError(f"schema {head['schema']}, and this release reads {_SCHEMA}")
    partitions, at = list[Partition | UnreadPartition](), 0
    for digest, size in head["partitions"]:
        body = rest[at : at + size]
        at += size
        if digest is not None:
            pending = object_from_json(body, "the kept view") if body else ()
            partitions.append(UnreadPartition(digest, pending))
        else:
            partitions.append(replace(partition_from_bytes(body, ""), digest=None))
    return CatalogState(seq, head["time"], tuple(partitions))
