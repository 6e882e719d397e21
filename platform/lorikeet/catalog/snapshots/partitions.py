"""The partitions that a state is made of: what every request's questions are answered from.

A snapshot stores each by itself, so that a reader holds only those it needs.

Tenants are spread over PARTITIONS partitions by a hash of their names, keys by hashes of their
ids, and the way from a secret's SHA-256 to its key's id by a hash of that. One more partition
holds what concerns all tenants.
"""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lorikeet.catalog.log.changes import Entry
from lorikeet.catalog.records import KeyRecord, PinKey, PinRecord, TenantState
from lorikeet.catalog.snapshots.partition_format import (
    SCHEMA,
    compact,
    decode_tenant,
    encode_tenant,
    key_of,
    key_row,
    pin_of,
    pin_row,
)
from lorikeet.errors import StoreError

PARTITIONS = 256
COMMON = PARTITIONS
"""The number of the partition that concerns all tenants: what is shared, pins, admins' keys."""


def partition_of(name: str) -> int:
    """The number of the partition that holds this tenant, key id or secret's SHA-256."""
    return hashlib.sha256(name.encode()).digest()[0]


class TenantStateCache:
    """An LRU cache of decoded tenants, so that a request does not decode their JSON again.

    Holds up to `most_bytes` of JSON. Records take some eight times as much memory as their JSON.
    For any number of threads.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held: dict[tuple[str, bytes], TenantState] = {}  # the least recently used first
        self._held_bytes = 0
        self._changing = threading.Lock()

    def decode(self, tenant: str, data: bytes) -> TenantState:
        """Return a tenant's state from its JSON."""
        key = (tenant, data)
        with self._changing:
            found = self._held.pop(key, None)
            if found is not None:
                self._held[key] = found
                return found
        found = decode_tenant(tenant, data)
        with self._changing:
            if key not in self._held:
                self._held_bytes += len(data)
            self._held[key] = found
            while self._held_bytes > self._most_bytes and len(self._held) > 1:
                oldest = next(iter(self._held))
                del self._held[oldest]
                self._held_bytes -= len(oldest[1])
        return found


_RECENTLY_READ = TenantStateCache(most_bytes=16 * 2**20)  # some 80,000 adapters


@dataclass(frozen=True, slots=True)
class Partition:
    """A part of the state, never changed. tenants: as their JSON until somebody changes them.

    key_ids: by SHA-256 of the secret. admin_keys: ids of admins' keys that work and never expire.
    digest: of its bytes in the store while it is as it was read; comparisons ignore it.
    """

    tenants: Mapping[str, TenantState | bytes] = field(default_factory=dict)
    keys: Mapping[str, KeyRecord] = field(default_factory=dict)
    key_ids: Mapping[str, str] = field(default_factory=dict)
    shared: frozenset[tuple[str, str]] = frozenset()
    pins: Mapping[PinKey, PinRecord] = field(default_factory=dict)
    admin_keys: frozenset[str] = frozenset()
    digest: str | None = field(default=None, compare=False)

    def tenant_state(self, tenant: str) -> TenantState | None:
        """A tenant's state; None without such a tenant."""
        held = self.tenants.get(tenant)
        return _RECENTLY_READ.decode(tenant, held) if isinstance(held, bytes) else held


@dataclass(frozen=True, slots=True)
class UnreadPartition:
    """A partition that lies in the store, and the entries that changed it since."""

    digest: str
    pending: tuple[Entry, ...] = ()


class PartitionsNotRead(Exception):
    """A question needs these partitions, by number: whoever asked reads them and asks again."""

    def __init__(self, numbers: frozenset[int]) -> None:
        super().__init__(f"{len(numbers)} partitions of the catalog are not read yet")
        self.numbers = numbers


def partition_to_bytes(partition: Partition) -> bytes:
    """The partition's canonical bytes."""
    return b"\n".join(_lines(partition))


def partition_from_bytes(data: bytes, digest: str) -> Partition:
    """Read a partition back; `digest` is the SHA-256 of `data`, which somebody has checked.

    Raises StoreError for what another release wrote.
    """
    first, *tenants = data.split(b"\n")
    head = json.loads(first)
    if head["schema"] != SCHEMA:
        raise StoreError(
            f"partition {digest} has schema {head['schema']} and this process reads {SCHEMA}: "
            "another release writes this catalog, upgrade this one"
        )
    lines = (line.partition(b" ") for line in tenants)
    pins = map(pin_of, head["pins"])
    return Partition(
        tenants={name.decode(): data for name, _, data in lines},
        keys={key_id: key_of(key_id, row) for key_id, row in head["keys"].items()},
        key_ids=head["key_ids"],
        shared=frozenset((tenant, name) for tenant, name in head["shared"]),
        pins={pin.key: pin for pin in pins},
        admin_keys=frozenset(head["admin_keys"]),
        digest=digest,
    )


def _lines(partition: Partition) -> Iterator[bytes]:
    yield compact(
        {
            "schema": SCHEMA,
            "keys": {key_id: key_row(partition.keys[key_id]) for key_id in sorted(partition.keys)},
            "key_ids": dict(sorted(partition.key_ids.items())),
            "shared": sorted(partition.shared),
            "pins": [pin_row(partition.pins[at]) for at in sorted(partition.pins)],
            "admin_keys": sorted(partition.admin_keys),
        }
    )
    for name in sorted(partition.tenants):
        held = partition.tenants[name]
        yield b"%s %s" % (
            name.encode(),
            held if isinstance(held, bytes) else encode_tenant(held),
        )
