"""The bytes of one partition of a snapshot.

A line of JSON for keys, pins and what is shared, then one line a tenant: its name, a space, and
JSON. A reader takes lines apart without reading them, so one tenant costs one tenant's JSON. Equal
partitions have equal bytes.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lorikeet.catalog.records import (
    AdapterRecord,
    AliasShare,
    KeyRecord,
    PinRecord,
    Scope,
    TenantRecord,
    TenantState,
    VersionRecord,
)
from lorikeet.catalog.rules.limits import options_of, with_options
from lorikeet_engine.adapter import Residency

SCHEMA = 2
"""Raised whenever an older reader could misread what is written."""

Json = Any


def encode_tenant(tenant: TenantState) -> bytes:
    """A tenant's JSON, without its name."""
    adapters = tenant.adapters
    return compact(
        [
            options_of(tenant.record),
            tenant.record.created,
            list(tenant.key_ids),
            {name: _adapter_row(adapters[name]) for name in sorted(adapters)},
        ]
    )


def decode_tenant(tenant: str, data: bytes) -> TenantState:
    """What encode_tenant wrote."""
    options, created, key_ids, adapters = json.loads(data)
    return TenantState(
        with_options(TenantRecord(tenant, created), options),
        {name: _adapter(tenant, name, row) for name, row in adapters.items()},
        tuple(key_ids),
    )


def key_row(key: KeyRecord) -> Json:
    """A key without its id."""
    scopes = sorted(scope.value for scope in key.scopes)
    once = [key.tenant, scopes, key.sha256, key.created]
    return [*once, int(key.revoked), key.replaced_by, options_of(key)]


def key_of(key_id: str, row: Json) -> KeyRecord:
    """What key_row wrote."""
    tenant, scopes, sha256, created, revoked, replaced_by, options = row
    key = KeyRecord(key_id, tenant, frozenset(map(Scope, scopes)), sha256, created, bool(revoked))
    return with_options(replace(key, replaced_by=replaced_by), options)


def pin_row(pin: PinRecord) -> Json:
    """A pin."""
    promise = [pin.selector, str(pin.tier), pin.replicas, pin.priority, pin.reason, pin.expires]
    return [pin.tenant, pin.name, *promise, pin.created, pin.actor]


def pin_of(row: Json) -> PinRecord:
    """What pin_row wrote."""
    tenant, name, selector, tier, *rest = row
    return PinRecord(tenant, name, selector, Residency[tier.upper()], *rest)


def compact(value: Json) -> bytes:
    """JSON without spaces, and without a line break."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _adapter_row(record: AdapterRecord) -> Json:
    versions = [
        [v.digest, v.size_bytes, v.max_rank, v.base_model, v.created, int(v.retired), v.gpu_bytes]
        for v in record.versions
    ]
    aliases = {alias: _alias_row(record, alias) for alias in sorted(record.aliases)}
    return [int(record.shared), record.retired_at, versions, aliases]


def _alias_row(record: AdapterRecord, alias: str) -> Json:
    row: list[Json] = [record.aliases[alias], list(record.alias_history[alias])]
    share = record.shares.get(alias)
    return row if share is None else [*row, share.version, share.fraction]


def _adapter(tenant: str, name: str, row: Json) -> AdapterRecord:
    shared, retired_at, versions, aliases = row
    return AdapterRecord(
        tenant,
        name,
        bool(shared),
        tuple(_version(number, row) for number, row in enumerate(versions, 1)),
        {alias: at[0] for alias, at in aliases.items()},
        {alias: tuple(at[1]) for alias, at in aliases.items()},
        _shares(aliases),
        retired_at,
    )


def _version(number: int, row: Json) -> VersionRecord:
    digest, size, rank, base_model, created, retired, gpu = row
    return VersionRecord(digest, size, rank, base_model, gpu, number, created, bool(retired))


def _shares(aliases: Mapping[str, Json]) -> Mapping[str, AliasShare]:
    return {alias: AliasShare(at[2], at[3]) for alias, at in aliases.items() if len(at) > 2}
