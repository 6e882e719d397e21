"""The catalog at one moment: an immutable value that every request is answered from."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from lorikeet.catalog.names import parse_model
from lorikeet.catalog.records import (
    AdapterRecord,
    Holdings,
    KeyRecord,
    PinKey,
    PinRecord,
    TenantRecord,
    VersionRecord,
)
from lorikeet.catalog.snapshots.partitions import COMMON, PARTS, NotRead, Partition, Unread, part_of
from lorikeet.errors import UnknownKey, UnknownModel, UnknownTenant
from lorikeet_engine.adapter import AdapterRef


@dataclass(frozen=True, slots=True)
class CatalogState:
    """Everything the log says up to entry `seq`. Shared between threads and never changed.

    time: when that entry was written, Unix seconds. Every question raises NotRead when it needs a
    part that was not read; `ask` of a CatalogView, or of a gateway's follower, reads it.
    """

    seq: int = 0
    time: float = 0.0
    parts: tuple[Partition | Unread, ...] = field(default=(Partition(),) * (PARTS + 1), repr=False)

    def resolve(self, model: str, tenant: str, session: str | None = None) -> AdapterRef:
        """The version that `model` names for this tenant: its own adapter's or a shared one's.

        session: whose request it is, for aliases that share theirs; see AdapterRecord.select.
        Raises UnknownModel, alike for what is absent, retired, misspelt or another tenant's.
        """
        wanted = parse_model(model)
        if wanted and self._may_use(tenant, wanted.tenant, wanted.name):
            record = self.find(wanted.tenant, wanted.name)
            version = record.select(wanted.selector, session) if record else None
            if record and version:
                return record.ref(version)
        shown = model if len(model) <= 200 else model[:197] + "..."
        raise UnknownModel(
            f"The model {shown!r} does not exist or you do not have access to it.", param="model"
        )

    def version_of(self, ref: AdapterRef) -> VersionRecord:
        """What is recorded of this version. Raises UnknownModel."""
        version = self.adapter(ref.tenant, ref.name).version(ref.version)
        if version is None:
            raise UnknownModel(f"There is no adapter {ref}.", param="model")
        return version

    def find(self, tenant: str, name: str) -> AdapterRecord | None:
        """One adapter, retired or not, if it is there."""
        holdings = self.holdings(tenant)
        return holdings.adapters.get(name) if holdings else None

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
        self._need(map(part_of, tenants))
        return (
            held.adapters[name]
            for owner in tenants
            if owner >= after[0] and (held := self.holdings(owner))
            for name in sorted(held.adapters)
            if (owner, name) > after
        )

    def visible_to(self, tenant: str) -> tuple[AdapterRecord, ...]:
        """What this tenant may use now: its own adapters and shared ones, none retired."""
        shared = self._part(COMMON).shared
        self._need(map(part_of, {tenant, *(owner for owner, _ in shared)}))
        holdings = self.holdings(tenant)
        own = {(tenant, name) for name in holdings.adapters} if holdings else set()
        records = (self.adapter(owner, name) for owner, name in sorted(own | shared))
        return tuple(record for record in records if not record.retired)

    def holdings(self, tenant: str) -> Holdings | None:
        """All that one tenant has, if there is such a tenant."""
        return self._part(part_of(tenant)).holdings(tenant)

    def held(self, tenant: str) -> Holdings | bytes:
        """What there is of a tenant, read or not: the same object as long as nothing changes it."""
        return self._part(part_of(tenant)).tenants[tenant]

    def tenant(self, name: str) -> TenantRecord:
        """One tenant. Raises UnknownTenant."""
        holdings = self.holdings(name)
        if holdings is None:
            raise UnknownTenant(f"There is no tenant {name!r}: create it first.", param="tenant")
        return holdings.record

    def tenants(self) -> tuple[TenantRecord, ...]:
        """Every tenant, by name."""
        return tuple(map(self.tenant, self._tenant_names()))

    def key(self, key_id: str) -> KeyRecord:
        """One key, revoked or not. Raises UnknownKey."""
        record = self._part(part_of(key_id)).keys.get(key_id)
        if record is None:
            raise UnknownKey(f"There is no key {key_id!r}.", param="id")
        return record

    def keys(self, tenant: str | None = None) -> tuple[KeyRecord, ...]:
        """Every key, or one tenant's, revoked ones too; oldest first. Raises UnknownTenant."""
        if tenant is None:
            found = [key for part in self._all() for key in part.keys.values()]
        else:
            self.tenant(tenant)
            holdings = self.holdings(tenant)
            key_ids = holdings.key_ids if holdings else ()
            self._need(map(part_of, key_ids))
            found = list(map(self.key, key_ids))
        return tuple(sorted(found, key=lambda key: (key.created, key.id)))

    def key_by_sha256(self, sha256: str) -> KeyRecord | None:
        """The key whose secret has this SHA-256 (64 hex digits), revoked or not."""
        key_id = self._part(part_of(sha256)).key_ids.get(sha256)
        return None if key_id is None else self.key(key_id)

    def admin_keys(self) -> frozenset[str]:
        """The ids of admins' keys that work and never expire; of those that may change things."""
        return self._part(COMMON).admin_keys

    def pin_of(self, tenant: str, name: str | None) -> PinRecord | None:
        """The pin of an adapter, or with None of a tenant, expired or not, if it has one."""
        return self._part(COMMON).pins.get(PinKey(tenant, name))

    def pins(self, now: float) -> tuple[PinRecord, ...]:
        """The pins that have not expired at `now` (Unix seconds), by tenant and name."""
        pins = self._part(COMMON).pins
        return tuple(pin for at in sorted(pins) if not (pin := pins[at]).expired(now))

    def expect(self, tenants: Iterable[str]) -> None:
        """Ask for all that questions about these tenants need, not for one after the other."""
        self._need(map(part_of, tenants))

    def _may_use(self, tenant: str, owner: str, name: str) -> bool:
        return tenant == owner or (owner, name) in self._part(COMMON).shared

    def _tenant_names(self) -> list[str]:
        return sorted(name for part in self._all() for name in part.tenants)

    def _all(self) -> list[Partition]:
        self._need(range(PARTS))
        return [self._part(number) for number in range(PARTS)]

    def _need(self, numbers: Iterable[int]) -> None:
        """Ask for all at once what would else be missed one by one."""
        missing = frozenset(at for at in set(numbers) if isinstance(self.parts[at], Unread))
        if missing:
            raise NotRead(missing)

    def _part(self, number: int) -> Partition:
        part = self.parts[number]
        if isinstance(part, Unread):
            raise NotRead(frozenset((number,)))
        return part
