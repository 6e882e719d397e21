"""The catalog at one moment: an immutable value that every request is answered from."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lorikeet.catalog.names import parse_model
from lorikeet.catalog.records import AdapterRecord, KeyRecord, PinRecord, TenantRecord
from lorikeet.errors import UnknownKey, UnknownModel, UnknownTenant
from lorikeet_engine.adapter import AdapterRef


@dataclass(frozen=True, slots=True)
class CatalogState:
    """Everything the log says up to entry `seq`. Shared between threads and never changed."""

    seq: int = 0
    tenant_records: Mapping[str, TenantRecord] = field(default_factory=dict)
    key_records: Mapping[str, KeyRecord] = field(default_factory=dict)  # by id, oldest first
    key_ids: Mapping[str, str] = field(default_factory=dict)  # by SHA-256
    adapter_records: Mapping[str, Mapping[str, AdapterRecord]] = field(default_factory=dict)
    shared: frozenset[tuple[str, str]] = frozenset()
    pin_records: Mapping[tuple[str, str], PinRecord] = field(default_factory=dict)

    def resolve(self, model: str, tenant: str) -> AdapterRef:
        """The version that `model` names for this tenant: its own adapter's or a shared one's.

        Raises UnknownModel, alike for what is absent, retired, misspelt or another tenant's.
        """
        wanted = parse_model(model)
        record = self._find(wanted.tenant, wanted.name) if wanted else None
        if wanted and record and (record.tenant == tenant or record.shared):
            version = record.select(wanted.selector)
            if version is not None:
                return record.ref(version)
        shown = model if len(model) <= 200 else model[:197] + "..."
        raise UnknownModel(
            f"The model {shown!r} does not exist or you do not have access to it.", param="model"
        )

    def base_model_of(self, ref: AdapterRef) -> str:
        """The base model that this version was trained on. Raises UnknownModel."""
        version = self.adapter(ref.tenant, ref.name).version(ref.version)
        if version is None:
            raise UnknownModel(f"There is no adapter {ref}.", param="model")
        return version.base_model

    def adapter(self, tenant: str, name: str) -> AdapterRecord:
        """One adapter, retired or not. Raises UnknownModel."""
        record = self._find(tenant, name)
        if record is None:
            raise UnknownModel(f"There is no adapter {f'{tenant}/{name}'!r}: register it first.")
        return record

    def adapters(self, tenant: str | None = None) -> tuple[AdapterRecord, ...]:
        """Every adapter, or one tenant's, retired ones too; by tenant and name."""
        tenants = sorted(self.adapter_records) if tenant is None else [tenant]
        groups = (self.adapter_records.get(owner, {}) for owner in tenants)
        return tuple(group[name] for group in groups for name in sorted(group))

    def visible_to(self, tenant: str) -> tuple[AdapterRecord, ...]:
        """What this tenant may use now: its own adapters and shared ones, none retired."""
        own = {(tenant, name) for name in self.adapter_records.get(tenant, {})}
        records = (self.adapter_records[owner][name] for owner, name in sorted(own | self.shared))
        return tuple(record for record in records if not record.retired)

    def tenant(self, name: str) -> TenantRecord:
        """One tenant. Raises UnknownTenant."""
        record = self.tenant_records.get(name)
        if record is None:
            raise UnknownTenant(f"There is no tenant {name!r}: create it first.", param="tenant")
        return record

    def tenants(self) -> tuple[TenantRecord, ...]:
        """Every tenant, by name."""
        return tuple(self.tenant_records[name] for name in sorted(self.tenant_records))

    def key(self, key_id: str) -> KeyRecord:
        """One key, revoked or not. Raises UnknownKey."""
        record = self.key_records.get(key_id)
        if record is None:
            raise UnknownKey(f"There is no key {key_id!r}.", param="id")
        return record

    def key_by_sha256(self, sha256: str) -> KeyRecord | None:
        """The key whose secret has this SHA-256 (64 hex digits), revoked or not."""
        key_id = self.key_ids.get(sha256)
        return None if key_id is None else self.key_records[key_id]

    def pins(self, now: float) -> tuple[PinRecord, ...]:
        """The pins that have not expired at `now` (Unix seconds), by tenant and name."""
        records = (self.pin_records[at] for at in sorted(self.pin_records))
        return tuple(pin for pin in records if not pin.expired(now))

    def pin_refs(self, now: float) -> dict[AdapterRef, PinRecord]:
        """Each version that is pinned now; a pin whose version is retired promises nothing."""
        found = ((pin, self._find(pin.tenant, pin.name)) for pin in self.pins(now))
        return {
            record.ref(version): pin
            for pin, record in found
            if record is not None and (version := record.select(pin.selector)) is not None
        }

    def _find(self, tenant: str, name: str) -> AdapterRecord | None:
        return self.adapter_records.get(tenant, {}).get(name)
