"""The parts that a state is made of, so that a reader holds only those it needs.

Tenants are spread over PARTS parts by a hash of their names, keys by hashes of their ids, and the
way from a secret's SHA-256 to its key's id by a hash of that. One more part holds what concerns
all tenants.
"""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lorikeet.catalog.log.changes import Entry
from lorikeet.catalog.records import Holdings, KeyRecord, PinKey, PinRecord
from lorikeet.catalog.snapshots.partition_format import (
    SCHEMA,
    compact,
    decode_holdings,
    encode_holdings,
    key_of,
    key_row,
    pin_of,
    pin_row,
)
from lorikeet.errors import StoreError

PARTS = 256
COMMON = PARTS
"""The number of the part that concerns all tenants: what is shared, pins, admins' keys."""


def part_of(name: str) -> int:
    """The number of the part that holds this tenant, key id or secret's SHA-256."""
    return hashlib.sha256(name.encode()).digest()[0]


class HoldingsCache:
    """Tenants' JSON that was read lately, so that a request does not read it again.

    Keeps what `decode` answered for `most_bytes` of JSON; more is forgotten, the least lately used
    first. Records take some eight times as much memory as their JSON. For any number of threads.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held: dict[tuple[str, bytes], Holdings] = {}  # the least lately used first
        self._held_bytes = 0
        self._changing = threading.Lock()

    def decode(self, tenant: str, data: bytes) -> Holdings:
        """What a tenant has, by its JSON."""
        key = (tenant, data)
        with self._changing:
            found = self._held.pop(key, None)
            if found is not None:
                self._held[key] = found
                return found
        found = decode_holdings(tenant, data)
        with self._changing:
            if key not in self._held:
                self._held_bytes += len(data)
            self._held[key] = found
            while self._held_bytes > self._most_bytes and len(self._held) > 1:
                oldest = next(iter(self._held))
                del self._held[oldest]
                self._held_bytes -= len(oldest[1])
        return found


_LATELY_READ = HoldingsCache(most_bytes=16 * 2**20)  # some 80,000 adapters


@dataclass(frozen=True, slots=True)
class Partition:
    """One part, never changed. tenants: as their JSON until somebody changes them.

    key_ids: by SHA-256 of the secret. admin_keys: ids of admins' keys that work and never expire.
    digest: of its bytes in the store while it is as it was read; it has no part in comparisons.
    """

    tenants: Mapping[str, Holdings | bytes] = field(default_factory=dict)
    keys: Mapping[str, KeyRecord] = field(default_factory=dict)
    key_ids: Mapping[str, str] = field(default_factory=dict)
    shared: frozenset[tuple[str, str]] = frozenset()
    pins: Mapping[PinKey, PinRecord] = field(default_factory=dict)
    admin_keys: frozenset[str] = frozenset()
    digest: str | None = field(default=None, compare=False)

    def holdings(self, tenant: str) -> Holdings | None:
        """What a tenant has; None without such a tenant."""
        held = self.tenants.get(tenant)
        return _LATELY_READ.decode(tenant, held) if isinstance(held, bytes) else held


@dataclass(frozen=True, slots=True)
class Unread:
    """A part that lies in the store, and the entries that changed it since."""

    digest: str
    pending: tuple[Entry, ...] = ()


class NotRead(Exception):
    """A question needs these parts, by number: whoever asked reads them and asks again."""

    def __init__(self, numbers: frozenset[int]) -> None:
        super().__init__(f"{len(numbers)} parts of the catalog are not read yet")
        self.numbers = numbers


def part_to_bytes(part: Partition) -> bytes:
    """The part's canonical bytes."""
    return b"\n".join(_lines(part))


def part_from_bytes(data: bytes, digest: str) -> Partition:
    """Read a part back; `digest` is the SHA-256 of `data`, which somebody has checked.

    Raises StoreError for what another release wrote.
    """
    first, *tenants = data.split(b"\n")
    head = json.loads(first)
    if head["schema"] != SCHEMA:
        raise StoreError(
            f"part {digest} has schema {head['schema']} and this process reads {SCHEMA}: "
            "another release writes this catalog, upgrade this one"
        )
    lines = (line.partition(b" ") for line in tenants)
    pins = map(pin_of, head["pins"])
    return Partition(
        tenants={name.decode(): holdings for name, _, holdings in lines},
        keys={key_id: key_of(key_id, row) for key_id, row in head["keys"].items()},
        key_ids=head["key_ids"],
        shared=frozenset((tenant, name) for tenant, name in head["shared"]),
        pins={pin.key: pin for pin in pins},
        admin_keys=frozenset(head["admin_keys"]),
        digest=digest,
    )


def _lines(part: Partition) -> Iterator[bytes]:
    yield compact(
        {
            "schema": SCHEMA,
            "keys": {key_id: key_row(part.keys[key_id]) for key_id in sorted(part.keys)},
            "key_ids": dict(sorted(part.key_ids.items())),
            "shared": sorted(part.shared),
            "pins": [pin_row(part.pins[at]) for at in sorted(part.pins)],
            "admin_keys": sorted(part.admin_keys),
        }
    )
    for name in sorted(part.tenants):
        held = part.tenants[name]
        yield b"%s %s" % (
            name.encode(),
            held if isinstance(held, bytes) else encode_holdings(held),
        )
