"""The bytes of one part of a snapshot.

A line of JSON for keys, pins and what is shared, then one line a tenant: its name, a space, and
JSON. A reader takes lines apart without reading them, so one tenant costs one tenant's JSON. Equal
parts have equal bytes.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lorikeet.catalog.records import (
    AdapterRecord,
    AdapterShare,
    Holdings,
    KeyRecord,
    PinRecord,
    Scope,
    TenantRecord,
    VersionRecord,
)
from lorikeet.catalog.rules.tenant_terms import terms_of, with_terms
from lorikeet_engine.adapter import Residency

SCHEMA = 2
"""Raised whenever an older reader could misread what is written."""

Json = Any


def encode_holdings(holdings: Holdings) -> bytes:
    """A tenant's JSON, without its name."""
    adapters = holdings.adapters
    return compact(
        [
            terms_of(holdings.record),
            holdings.record.created,
            list(holdings.key_ids),
            {name: _adapter_row(adapters[name]) for name in sorted(adapters)},
        ]
    )


def decode_holdings(tenant: str, data: bytes) -> Holdings:
    """What encode_holdings wrote."""
    terms, created, key_ids, adapters = json.loads(data)
    return Holdings(
        with_terms(TenantRecord(tenant, created), terms),
        {name: _adapter(tenant, name, row) for name, row in adapters.items()},
        tuple(key_ids),
    )


def key_row(key: KeyRecord) -> Json:
    """A key without its id."""
    scopes = sorted(scope.value for scope in key.scopes)
    once = [key.tenant, scopes, key.sha256, key.created]
    return [*once, int(key.revoked), key.replaced_by, terms_of(key)]


def key_of(key_id: str, row: Json) -> KeyRecord:
    """What key_row wrote."""
    tenant, scopes, sha256, created, revoked, replaced_by, terms = row
    key = KeyRecord(key_id, tenant, frozenset(map(Scope, scopes)), sha256, created, bool(revoked))
    return with_terms(replace(key, replaced_by=replaced_by), terms)


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
    return row if share is None else [*row, share.version, share.part]


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


def _shares(aliases: Mapping[str, Json]) -> Mapping[str, AdapterShare]:
    return {alias: AdapterShare(at[2], at[3]) for alias, at in aliases.items() if len(at) > 2}
