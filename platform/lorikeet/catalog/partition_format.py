"""The rows of which a partition's bytes are made, and tenants read back from them.

Those bytes (snapshots.py) are a line of JSON for keys, pins and what is shared, then one line a
tenant: its name, a space, and JSON. A reader takes lines apart without reading them, so one tenant
costs one tenant's JSON. Equal partitions have equal bytes.
"""

import json
import sys
import threading
from collections.abc import Mapping
from dataclasses import astuple, replace
from functools import cache
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
from lorikeet_engine.adapter import Residency, TouchedModules

PARTITION_SCHEMA = 4
# A version of schema 2 says nothing of what it touches, one of 3 nothing of trained tokens and of
# what it was trained on.
READ_SCHEMAS = (2, 3, 4)
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


RECENTLY_DECODED = TenantStateCache(most_bytes=16 * 2**20)  # some 80,000 adapters


def key_row(key: KeyRecord) -> Json:
    """A key without its id."""
    scopes = sorted(scope.value for scope in key.scopes)
    once = [key.tenant, scopes, key.sha256, key.created]
    return [*once, int(key.revoked), key.replaced_by, options_of(key)]


def key_of(key_id: str, row: Json) -> KeyRecord:
    """What key_row wrote."""
    tenant, scopes, sha256, created, revoked, replaced_by, options = row
    if "adapters" in options:
        options["adapters"] = tuple(options["adapters"])
    key = KeyRecord(key_id, tenant, frozenset(map(Scope, scopes)), sha256, created, bool(revoked))
    return with_options(replace(key, replaced_by=replaced_by), options)


def pin_row(pin: PinRecord) -> Json:
    """A pin as a row of JSON."""
    promise = [pin.selector, str(pin.tier), pin.replicas, pin.priority, pin.reason, pin.expires]
    return [pin.tenant, pin.name, *promise, pin.created, pin.actor]


def pin_of(row: Json) -> PinRecord:
    """The pin in a row that pin_row wrote."""
    tenant, name, selector, tier, *rest = row
    return PinRecord(tenant, name, selector, Residency[tier.upper()], *rest)


def compact(value: Json) -> bytes:
    """JSON without spaces, and without a line break."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _adapter_row(record: AdapterRecord) -> Json:
    versions = list(map(_version_row, record.versions))
    aliases = {alias: _alias_row(record, alias) for alias in sorted(record.aliases)}
    return [int(record.shared), record.retired_at, versions, aliases]


def _version_row(v: VersionRecord) -> Json:
    row = [v.digest, v.size_bytes, v.max_rank, v.base_model, v.created, int(v.retired), v.gpu_bytes]
    if v.touches is None:
        return row
    linears, *numbers = astuple(v.touches)
    trained_on = [] if v.trained_on is None else [v.trained_on]
    return [*row, " ".join(linears), *numbers, *trained_on]


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
    digest, size, rank, base_model, created, retired, gpu, *touched = row
    touches = TouchedModules(_words(touched[0]), *touched[1:5]) if touched else None
    trained_on = sys.intern(touched[5]) if len(touched) > 5 else None
    once = (digest, size, rank, base_model, gpu, number, created, bool(retired))
    return VersionRecord(*once, touches=touches, trained_on=trained_on)


@cache  # of the few sets of linears that there are, all versions share theirs
def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _shares(aliases: Mapping[str, Json]) -> Mapping[str, AliasShare]:
    return {alias: AliasShare(at[2], at[3]) for alias, at in aliases.items() if len(at) > 2}
