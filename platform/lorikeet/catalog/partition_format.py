"""JSON rows of a partition's bytes, and the cache of decoded tenants.

A partition's bytes (snapshots.py) are one line of JSON for keys, pins and shared adapters, then one
line per tenant: its name, a space, and its JSON. A reader decodes only the lines of the tenants
that it reads. Equal partitions have equal bytes.
"""

import json
import sys
import threading
from collections.abc import Mapping, Sequence
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
from lorikeet.parity.figures import GapCause, Parity, Verdict
from lorikeet.request_defaults import AddedToken, RequestDefaults, TokenizerChanges
from lorikeet_engine.adapter import Embedder, Head, Pooling, Problem, Residency, TouchedModules

PARTITION_SCHEMA = 5
"""Format version; increased whenever an older reader could misread new partitions."""
READ_SCHEMAS = (2, 3, 4, 5)
"""Format versions that this release reads.

Adapter versions lack `touches` in schema 2, lack trained tokens and `trained_on` in schemas 2 and
3, and lack invocation tokens, heads, embedders, added tokens and request defaults in schemas 2 to
4. In schemas 2 to 4, only publish keys have adapters, tenants lack budgets in money and limits on
files and batches, and pins lack prompts. Releases that know no parity proofs ignore them.
"""

Json = Any


def encode_tenant(tenant: TenantState) -> bytes:
    """Encode a tenant as JSON, without its name.

    Equal request defaults of versions are encoded once.
    """
    adapters, defaults = tenant.adapters, list[Json]()
    rows = {name: _adapter_row(adapters[name], defaults) for name in sorted(adapters)}
    record = options_of(tenant.record), tenant.record.created, list(tenant.key_ids), rows
    return compact([*record, *([defaults] if defaults else [])])


def decode_tenant(tenant: str, data: bytes) -> TenantState:
    """Decode a tenant's JSON, which `encode_tenant` has made."""
    options, created, key_ids, adapters, *more = json.loads(data)
    defaults = [_defaults(row) for rows in more for row in rows]
    return TenantState(
        with_options(TenantRecord(tenant, created), options),
        {name: _adapter(tenant, name, row, defaults) for name, row in adapters.items()},
        tuple(key_ids),
    )


class TenantStateCache:
    """LRU cache of decoded tenants, which spares requests decoding the same JSON again.

    Holds up to `most_bytes` of JSON; the decoded records take some eight times as much memory.
    Thread-safe.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held: dict[tuple[str, bytes], TenantState] = {}  # least recently used first
        self._held_bytes = 0
        self._changing = threading.Lock()

    def decode(self, tenant: str, data: bytes) -> TenantState:
        """Return a tenant's state, from the cache or decoded from its JSON."""
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
    """Encode a key as a JSON row, without its id."""
    scopes = sorted(scope.value for scope in key.scopes)
    once = [key.tenant, scopes, key.sha256, key.created]
    return [*once, int(key.revoked), key.replaced_by, options_of(key)]


def key_of(key_id: str, row: Json) -> KeyRecord:
    """Decode a key's row, which `key_row` has made."""
    tenant, scopes, sha256, created, revoked, replaced_by, options = row
    if "adapters" in options:
        options["adapters"] = tuple(options["adapters"])
    key = KeyRecord(key_id, tenant, frozenset(map(Scope, scopes)), sha256, created, bool(revoked))
    return with_options(replace(key, replaced_by=replaced_by), options)


def pin_row(pin: PinRecord) -> Json:
    """Encode a pin as a JSON row."""
    promise = [pin.selector, str(pin.tier), pin.replicas, pin.priority, pin.reason, pin.expires]
    more = (pin.prompt, True) if pin.draft else (pin.prompt,) if pin.prompt is not None else ()
    return [pin.tenant, pin.name, *promise, pin.created, pin.actor, *more]


def pin_of(row: Json) -> PinRecord:
    """Decode a pin's row, which `pin_row` has made."""
    tenant, name, selector, tier, *rest = row
    return PinRecord(tenant, name, selector, Residency[tier.upper()], *rest)


def compact(value: Json) -> bytes:
    """Encode a value as JSON without spaces and line breaks."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _adapter_row(record: AdapterRecord, defaults: list[Json]) -> Json:
    """Encode an adapter.

    defaults: encoded request defaults of the tenant's versions, to which the adapter's row refers
        by index; those that are missing are appended.
    """
    versions = list(map(_version_row, record.versions))
    aliases = {alias: _alias_row(record, alias) for alias in sorted(record.aliases)}
    places = {}
    for version in record.versions:
        if version.defaults is not None:
            row = _defaults_row(version.defaults)
            if row not in defaults:
                defaults.append(row)
            places[version.version] = defaults.index(row)
    return [int(record.shared), record.retired_at, versions, aliases, *([places] if places else [])]


def _defaults_row(d: RequestDefaults) -> Json:
    sampling = dict(sorted(d.sampling.items()))
    row = [d.chat_template, d.system_prompt, list(d.stop), list(d.stop_token_ids), sampling]
    if d.tokenizer is None:
        return row
    added = [list(astuple(token)) for token in d.tokenizer.added]
    return [*row, added, list(map(list, d.tokenizer.special_tokens))]


def _version_row(v: VersionRecord) -> Json:
    row = [v.digest, v.size_bytes, v.max_rank, v.base_model, v.created, int(v.retired), v.gpu_bytes]
    if v.touches is None:
        return row
    linears, *numbers = astuple(v.touches)
    last: list[Json] = [
        v.trained_on,
        v.invocation_tokens,
        None if v.parity is None else _parity_row(v.parity),
        None if v.head is None else astuple(v.head),
        None if v.embedder is None else astuple(v.embedder),
        v.vocabulary,
    ]
    while last and last[-1] in (None, (), 0):
        last.pop()
    return [*row, " ".join(linears), *numbers, *last]


def _parity_row(p: Parity) -> Json:
    cause = None if p.cause is None else p.cause.value
    return [p.verdict.value, p.tokens, p.mean, p.max, p.kl, p.base_mean, cause, p.reason]


def _parity(row: Json) -> Parity:
    verdict, tokens, mean, max_, kl, base_mean, cause, reason = row
    found = None if cause is None else GapCause(cause)
    return Parity(Verdict(verdict), tokens, mean, max_, kl, base_mean, found, reason)


def _alias_row(record: AdapterRecord, alias: str) -> Json:
    row: list[Json] = [record.aliases[alias], list(record.alias_history[alias])]
    share = record.shares.get(alias)
    return row if share is None else [*row, share.version, share.fraction]


def _defaults(row: Json) -> RequestDefaults:
    template, system_prompt, stop, stop_token_ids, sampling, *tokenizer = row
    changes = None
    if tokenizer:
        added, special_tokens = tokenizer
        named = ((name, text) for name, text in special_tokens)
        changes = TokenizerChanges(tuple(AddedToken(*each) for each in added), tuple(named))
    once = template, system_prompt, tuple(stop), tuple(stop_token_ids), sampling
    return RequestDefaults(*once, changes)


def _adapter(
    tenant: str, name: str, row: Json, defaults: Sequence[RequestDefaults]
) -> AdapterRecord:
    shared, retired_at, versions, aliases, *more = row
    places: Mapping[str, int] = more[0] if more else {}
    return AdapterRecord(
        tenant,
        name,
        bool(shared),
        tuple(
            _version(number, row, defaults[places[at]] if (at := str(number)) in places else None)
            for number, row in enumerate(versions, 1)
        ),
        {alias: at[0] for alias, at in aliases.items()},
        {alias: tuple(at[1]) for alias, at in aliases.items()},
        _shares(aliases),
        retired_at,
    )


def _version(number: int, row: Json, defaults: RequestDefaults | None) -> VersionRecord:
    digest, size, rank, base_model, created, retired, gpu, *touched = row
    touches = TouchedModules(_words(touched[0]), *touched[1:5]) if touched else None
    trained_on = sys.intern(touched[5]) if len(touched) > 5 and touched[5] is not None else None
    invocation = tuple(touched[6]) if len(touched) > 6 else ()
    once = (digest, size, rank, base_model, gpu, number, created, bool(retired))
    return VersionRecord(
        *once,
        touches=touches,
        trained_on=trained_on,
        invocation_tokens=invocation,
        parity=_parity(touched[7]) if len(touched) > 7 and touched[7] is not None else None,
        head=_head(touched[8]) if len(touched) > 8 and touched[8] is not None else None,
        embedder=_embedder(touched[9]) if len(touched) > 9 and touched[9] is not None else None,
        vocabulary=touched[10] if len(touched) > 10 else 0,
        defaults=defaults,
    )


def _head(row: Json) -> Head:
    labels, problem, pad_token = row
    return Head(tuple(labels), None if problem is None else Problem(problem), pad_token)


def _embedder(row: Json) -> Embedder:
    pooling, normalizes, dimensions = row
    cuts = None if dimensions is None else tuple(dimensions)
    return Embedder(Pooling(pooling), normalizes, cuts)


@cache  # versions share the few different sets of linears
def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _shares(aliases: Mapping[str, Json]) -> Mapping[str, AliasShare]:
    return {alias: AliasShare(at[2], at[3]) for alias, at in aliases.items() if len(at) > 2}
