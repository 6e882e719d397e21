"""State of the catalog after one log entry: an immutable value that answers every request.

The state consists of partitions. Tenants are spread over PARTITIONS partitions by a hash of the
name, keys by a hash of the id, and the mapping from a secret's SHA-256 to its key's id by a hash of
that SHA-256. One more partition, COMMON, holds data of all tenants. A snapshot (snapshots.py)
stores each partition separately.
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
"""Number of the partition of all tenants: shared adapters, pins and admins' keys."""


def partition_of(name: str) -> int:
    """Return the number, 0 to 255, of the partition of a tenant, key id or secret's SHA-256."""
    return hashlib.sha256(name.encode()).digest()[0]


@dataclass(frozen=True, slots=True)
class Partition:
    """An immutable part of the state: tenants and keys by the first byte of their hash.

    The last part has what tenants share instead: `shared`, `pins` and `admin_keys`.

    tenants: tenants by name; each as JSON until an entry changes it.
    keys: keys by id.
    key_ids: ids of keys by SHA-256 of the secret.
    shared: tenant and name of every shared adapter.
    admin_keys: ids of admins' keys that are valid and never expire.
    digest: SHA-256 of the partition's bytes in the store; None if an entry has changed the
        partition. Comparisons ignore the digest.
    """

    tenants: Mapping[str, TenantState | bytes] = field(default_factory=dict)
    keys: Mapping[str, KeyRecord] = field(default_factory=dict)
    key_ids: Mapping[str, str] = field(default_factory=dict)
    shared: frozenset[tuple[str, str]] = frozenset()
    pins: Mapping[PinKey, PinRecord] = field(default_factory=dict)
    admin_keys: frozenset[str] = frozenset()
    digest: str | None = field(default=None, compare=False)

    def tenant_state(self, tenant: str) -> TenantState | None:
        """Return a tenant's state, or None if there is no such tenant."""
        held = self.tenants.get(tenant)
        return RECENTLY_DECODED.decode(tenant, held) if isinstance(held, bytes) else held


@dataclass(frozen=True, slots=True)
class UnreadPartition:
    """A partition whose bytes this process has not read from the store.

    digest: SHA-256 of those bytes.
    pending: log entries that changed the partition after those bytes were written.
    """

    digest: str
    pending: tuple[Entry, ...] = ()


class PartitionsNotRead(Exception):
    """Raised if a question about a CatalogState needs partitions that were not read yet.

    numbers: numbers of these partitions. Read them, then ask again.
    """

    def __init__(self, numbers: frozenset[int]) -> None:
        super().__init__(f"{len(numbers)} partitions of the catalog are not read yet")
        self.numbers = numbers


@dataclass(frozen=True, slots=True)
class CatalogState:
    """State after entry `seq` of the log. Immutable and shared between threads.

    Every method raises PartitionsNotRead if it needs a partition (part of the state) that was not
    read from the store yet; `ask` of CatalogView or GatewayCatalogView reads it and asks again.

    time: time of entry `seq`, Unix seconds.
    """

    seq: int = 0
    time: float = 0.0
    partitions: tuple[Partition | UnreadPartition, ...] = field(
        default=(Partition(),) * (PARTITIONS + 1), repr=False
    )

    def resolve(self, model: str, tenant: str, session: str | None = None) -> AdapterRef:
        """Return the version that `model` names for a tenant: its own adapter's or a shared one's.

        model: owner/name, owner/name@alias, owner/name@version or owner/name@digest; without @,
            the alias prod; without an owner, the tenant.
        session: name of the request's session. If an alias splits its requests between two
            versions, a session always gets the same one; None: the version it points to.

        Raises UnknownModel, with the same message for absent, retired, misspelt and other tenants'
        models.
        """
        path, at, selector = model.partition("@")
        owner, name = path.split("/", 1) if "/" in path else (tenant, path)
        selector = selector if at else DEFAULT_ALIAS
        if is_selector(selector) and self._may_use(tenant, owner, name):
            record = self.find(owner, name)
            version = record.select(selector, session) if record else None
            if record and version:
                return record.ref(version)
        raise unknown_model(model)

    def version_of(self, ref: AdapterRef) -> VersionRecord:
        """Return the record of a version. Raises UnknownModel if there is no such version."""
        version = self.adapter(ref.tenant, ref.name).version(ref.version)
        if version is None:
            raise UnknownModel(f"There is no adapter {ref}.", param="model")
        return version

    def find(self, tenant: str, name: str) -> AdapterRecord | None:
        """Return an adapter, retired or not; None if there is none."""
        held = self.tenant_state(tenant)
        return held.adapters.get(name) if held else None

    def adapter(self, tenant: str, name: str) -> AdapterRecord:
        """Return an adapter, retired or not. Raises UnknownModel if there is none."""
        record = self.find(tenant, name)
        if record is None:
            raise UnknownModel(f"There is no adapter {f'{tenant}/{name}'!r}: register it first.")
        return record

    def adapters(
        self, tenant: str | None = None, after: tuple[str, str] = ("", "")
    ) -> Iterator[AdapterRecord]:
        """Return adapters in order of tenant and name, retired ones included.

        tenant: owner of the adapters; None: every tenant.
        after: tenant and name after which to begin.
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
        """Return the usable adapters of a tenant: its own and shared ones, none retired."""
        shared = self._partition(COMMON).shared
        self._need(map(partition_of, {tenant, *(owner for owner, _ in shared)}))
        held = self.tenant_state(tenant)
        own = {(tenant, name) for name in held.adapters} if held else set()
        records = (self.adapter(owner, name) for owner, name in sorted(own | shared))
        return tuple(record for record in records if not record.retired)

    def tenant_state(self, tenant: str) -> TenantState | None:
        """Return a tenant with its adapters and key ids; None if there is no such tenant."""
        return self._partition(partition_of(tenant)).tenant_state(tenant)

    def tenant_as_held(self, tenant: str) -> TenantState | bytes:
        """Return a tenant in the form in which the state holds it: JSON until a log entry changes
        it, then decoded.

        Repeated calls return the same object until an entry changes the tenant.
        """
        return self._partition(partition_of(tenant)).tenants[tenant]

    def tenant(self, name: str) -> TenantRecord:
        """Return a tenant's record. Raises UnknownTenant."""
        held = self.tenant_state(name)
        if held is None:
            raise UnknownTenant(f"There is no tenant {name!r}: create it first.", param="tenant")
        return held.record

    def tenants(self) -> tuple[TenantRecord, ...]:
        """Return every tenant, by name."""
        return tuple(map(self.tenant, self._tenant_names()))

    def key(self, key_id: str) -> KeyRecord:
        """Return a key, revoked or not. Raises UnknownKey."""
        record = self._partition(partition_of(key_id)).keys.get(key_id)
        if record is None:
            problem = f"There is no key {key_id!r}: `lorikeet keys list` shows their ids."
            raise UnknownKey(problem, param="id")
        return record

    def keys(self, tenant: str | None = None) -> tuple[KeyRecord, ...]:
        """Return keys, oldest first, revoked ones included. Raises UnknownTenant.

        tenant: owner of the keys; None: every key, admins' included.
        """
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
        """Return the key whose secret has this SHA-256 (64 hex digits), revoked or not; or None."""
        key_id = self._partition(partition_of(sha256)).key_ids.get(sha256)
        return None if key_id is None else self.key(key_id)

    def admin_keys(self) -> frozenset[str]:
        """Return the ids of keys with scope ADMIN that are valid and never expire."""
        return self._partition(COMMON).admin_keys

    def pin_of(self, tenant: str, name: str | None) -> PinRecord | None:
        """Return the pin, expired or not, of an adapter, or of a tenant if `name` is None."""
        return self._partition(COMMON).pins.get(PinKey(tenant, name))

    def pins(self, now: float) -> tuple[PinRecord, ...]:
        """Return the pins that are in force at `now` (Unix seconds), by tenant and name."""
        pins = self._partition(COMMON).pins
        return tuple(pin for at in sorted(pins) if not (pin := pins[at]).expired(now))

    def require(self, tenants: Iterable[str]) -> None:
        """Raise PartitionsNotRead if any of these tenants' partitions is not read yet; the error
        names all that are not.
        """
        self._need(map(partition_of, tenants))

    def _may_use(self, tenant: str, owner: str, name: str) -> bool:
        return tenant == owner or (owner, name) in self._partition(COMMON).shared

    def _tenant_names(self) -> list[str]:
        return sorted(name for partition in self._all() for name in partition.tenants)

    def _all(self) -> list[Partition]:
        self._need(range(PARTITIONS))
        return [self._partition(number) for number in range(PARTITIONS)]

    def _need(self, numbers: Iterable[int]) -> None:
        """Raise PartitionsNotRead if any of these partitions is not read yet; the error names all
        that are not.
        """
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


def unknown_model(model: str) -> UnknownModel:
    """Return the error for a model that does not exist, or that the request's key may not use.

    model: `model` of the request.
    """
    shown = model if len(model) <= 200 else model[:197] + "..."
    return UnknownModel(
        f"The model {shown!r} does not exist or you do not have access to it. GET /v1/models "
        "lists yours.",
        param="model",
    )
