"""The catalog at one moment: an immutable value that every request is answered from.

Its parts are partitions: tenants are spread over PARTITIONS of them by a hash of their names, keys
by hashes of their ids, and the way from a secret's SHA-256 to its key's id by a hash of that. One
more holds what concerns all tenants. A snapshot stores each by itself (snapshots/), so that a
process holds only those it needs.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from lorikeet.catalog.changes import Entry
from lorikeet.catalog.names import DEFAULT_ALIAS, is_selector
from lorikeet.catalog.partition_format import RECENTLY_DECODED
from lorikeet.catalog.records import (
    AdapterRecord,
    KeyRecord,
    PinKey,
    PinRecord,
    TenantRecord,
    TenantState,
    VersionRecord,
)
from lorikeet.errors import UnknownKey, UnknownModel, UnknownTenant
from lorikeet_engine.adapter import AdapterRef

PARTITIONS = 256
COMMON = PARTITIONS
"""The number of the partition that concerns all tenants: what is shared, pins, admins' keys."""


def partition_of(name: str) -> int:
    """The number of the partition that holds this tenant, key id or secret's SHA-256."""
    return hashlib.sha256(name.encode()).digest()[0]


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
        return RECENTLY_DECODED.decode(tenant, held) if isinstance(held, bytes) else held


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


@dataclass(frozen=True, slots=True)
class CatalogState:
    """Everything the log says up to entry `seq`. Shared between threads and never changed.

    time: when that entry was written, Unix seconds. Every method raises PartitionsNotRead when it
    needs a partition that was not read; `ask` of a CatalogView, or of a gateway's follower, reads
    it.
    """

    seq: int = 0
    time: float = 0.0
    partitions: tuple[Partition | UnreadPartition, ...] = field(
        default=(Partition(),) * (PARTITIONS + 1), repr=False
    )

    def resolve(self, model: str, tenant: str, session: str | None = None) -> AdapterRef:
        """The version that `model` names for this tenant: its own adapter's or a shared one's.

        model: owner/name, owner/name@alias, @version or @digest; without any, the alias prod.
        session: whose request it is, for aliases that share theirs; see AdapterRecord.select.
        Raises UnknownModel, alike for what is absent, retired, misspelt or another tenant's.
        """
        path, at, selector = model.partition("@")
        owner, _, name = path.partition("/")
        selector = selector if at else DEFAULT_ALIAS
        if is_selector(selector) and self._may_use(tenant, owner, name):
            record = self.find(owner, name)
            version = record.select(selector, session) if record else None
            if record and version:
                return record.ref(version)
        shown = model if len(model) <= 200 else model[:197] + "..."
        raise UnknownModel(
            f"The model {shown!r} does not exist or you do not have access to it. GET /v1/models "
            "lists yours.",
            param="model",
        )

    def version_of(self, ref: AdapterRef) -> VersionRecord:
        """The record of this version. Raises UnknownModel."""
        version = self.adapter(ref.tenant, ref.name).version(ref.version)
        if version is None:
            raise UnknownModel(f"There is no adapter {ref}.", param="model")
        return version

    def find(self, tenant: str, name: str) -> AdapterRecord | None:
        """One adapter, retired or not, if it is there."""
        held = self.tenant_state(tenant)
        return held.adapters.get(name) if held else None

    def adapter(self, tenant: str, name: str) -> AdapterRecord:
        """One adapter, retired or not. Raises UnknownModel."""
        record = self.find(tenant, name)
        if record is None:
            raise UnknownModel(f"There is no adapter {f'{tenant}/{name}'!r}: register it first.")
        return record

    def adapters(
        self, tenant: str | None = None, after: tuple[str, str] = ("", "")
    ) -> Iterator[AdapterRecord]:
        """Every adapter, or one tenant's, retired ones too; by tenant and name.

        after: the tenant and name after which to begin.
        """
        tenants = self._tenant_names() if tenant is None else [tenant]
        self._need(map(partition_of, tenants))
        return (
            held.adapters[name]
            for owner in tenants
            if owner >= after[0] and (held := self.tenant_state(owner))
            for name in sorted(held.adapters)
            if (owner, name) > after
        )

    def visible_to(self, tenant: str) -> tuple[AdapterRecord, ...]:
        """What this tenant may use now: its own adapters and shared ones, none retired."""
        shared = self._partition(COMMON).shared
        self._need(map(partition_of, {tenant, *(owner for owner, _ in shared)}))
        held = self.tenant_state(tenant)
        own = {(tenant, name) for name in held.adapters} if held else set()
        records = (self.adapter(owner, name) for owner, name in sorted(own | shared))
        return tuple(record for record in records if not record.retired)

    def tenant_state(self, tenant: str) -> TenantState | None:
        """One tenant with its adapters and key ids; None if there is no such tenant."""
        return self._partition(partition_of(tenant)).tenant_state(tenant)

    def tenant_as_held(self, tenant: str) -> TenantState | bytes:
        """A tenant, decoded or as its JSON: one object as long as nothing changes the tenant."""
        return self._partition(partition_of(tenant)).tenants[tenant]

    def tenant(self, name: str) -> TenantRecord:
        """One tenant. Raises UnknownTenant."""
        held = self.tenant_state(name)
        if held is None:
            raise UnknownTenant(f"There is no tenant {name!r}: create it first.", param="tenant")
        return held.record

    def tenants(self) -> tuple[TenantRecord, ...]:
        """Every tenant, by name."""
        return tuple(map(self.tenant, self._tenant_names()))

    def key(self, key_id: str) -> KeyRecord:
        """One key, revoked or not. Raises UnknownKey."""
        record = self._partition(partition_of(key_id)).keys.get(key_id)
        if record is None:
            problem = f"There is no key {key_id!r}: `lorikeet keys list` shows their ids."
            raise UnknownKey(problem, param="id")
        return record

    def keys(self, tenant: str | None = None) -> tuple[KeyRecord, ...]:
        """Every key, or one tenant's, revoked ones too; oldest first. Raises UnknownTenant."""
        if tenant is None:
            found = [key for partition in self._all() for key in partition.keys.values()]
        else:
            self.tenant(tenant)
            held = self.tenant_state(tenant)
            key_ids = held.key_ids if held else ()
            self._need(map(partition_of, key_ids))
            found = list(map(self.key, key_ids))
        return tuple(sorted(found, key=lambda key: (key.created, key.id)))

    def key_by_sha256(self, sha256: str) -> KeyRecord | None:
        """The key whose secret has this SHA-256 (64 hex digits), revoked or not."""
        key_id = self._partition(partition_of(sha256)).key_ids.get(sha256)
        return None if key_id is None else self.key(key_id)

    def admin_keys(self) -> frozenset[str]:
        """The ids of admins' keys that work, never expire and may change things."""
        return self._partition(COMMON).admin_keys

    def pin_of(self, tenant: str, name: str | None) -> PinRecord | None:
        """The pin of an adapter, or with None of a tenant, expired or not, if it has one."""
        return self._partition(COMMON).pins.get(PinKey(tenant, name))

    def pins(self, now: float) -> tuple[PinRecord, ...]:
        """The pins that have not expired at `now` (Unix seconds), by tenant and name."""
        pins = self._partition(COMMON).pins
        return tuple(pin for at in sorted(pins) if not (pin := pins[at]).expired(now))

    def require(self, tenants: Iterable[str]) -> None:
        """Raise PartitionsNotRead for all of these tenants together, not one after the other."""
        self._need(map(partition_of, tenants))

    def _may_use(self, tenant: str, owner: str, name: str) -> bool:
        return tenant == owner or (owner, name) in self._partition(COMMON).shared

    def _tenant_names(self) -> list[str]:
        return sorted(name for partition in self._all() for name in partition.tenants)

    def _all(self) -> list[Partition]:
        self._need(range(PARTITIONS))
        return [self._partition(number) for number in range(PARTITIONS)]

    def _need(self, numbers: Iterable[int]) -> None:
        """Raise PartitionsNotRead for all of these at once that are not read."""
        missing = frozenset(
            at for at in set(numbers) if isinstance(self.partitions[at], UnreadPartition)
        )
        if missing:
            raise PartitionsNotRead(missing)

    def _partition(self, number: int) -> Partition:
        partition = self.partitions[number]
        if isinstance(partition, UnreadPartition):
            raise PartitionsNotRead(frozenset((number,)))
        return partition
