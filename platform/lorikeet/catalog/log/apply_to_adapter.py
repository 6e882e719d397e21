"""Applies a change to one adapter's record: a pure function."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar, assert_never

from lorikeet.catalog.log.changes import (
    AdapterRetired,
    AdapterShared,
    AliasMoved,
    AliasRolledBack,
    AnyAdapterChange,
    Entry,
    ShareEnded,
    ShareGiven,
    VersionRegistered,
    VersionRestored,
    VersionRetired,
)
from lorikeet.catalog.records import AdapterRecord, AliasShare, VersionRecord

V = TypeVar("V")


def apply_to_adapter(
    record: AdapterRecord, change: AnyAdapterChange, entry: Entry
) -> AdapterRecord:
    """Return the adapter after one of its changes, which this entry holds."""
    match change:
        case VersionRegistered():
            version = _version(change, entry.time)
            return replace(record, versions=(*record.versions, version))
        case AdapterShared(shared=shared):
            return replace(record, shared=shared)
        case AliasMoved(alias=alias, version=number):  # what it pointed to joins its history
            history = record.alias_history.get(alias, ())
            if alias in record.aliases:
                history = (*history, record.aliases[alias])
            return _pointed(record, alias, number, history)
        case AliasRolledBack(alias=alias, version=number):  # up to its last place in the history
            history = record.alias_history[alias]
            at = len(history) - 1 - history[::-1].index(number)
            return _pointed(record, alias, number, history[:at])
        case ShareGiven(alias=alias, version=number, fraction=fraction):
            return replace(record, shares={**record.shares, alias: AliasShare(number, fraction)})
        case ShareEnded(alias=alias):
            return replace(record, shares=_without(record.shares, alias))
        case VersionRetired(version=number):
            return _marked(record, number, retired=True)
        case VersionRestored(version=number):
            return _marked(record, number, retired=False)
        case AdapterRetired():
            versions = tuple(replace(version, retired=True) for version in record.versions)
            return AdapterRecord(
                record.tenant, record.name, versions=versions, retired_at=entry.seq
            )
        case _:
            assert_never(change)


def _version(change: VersionRegistered, time: float) -> VersionRecord:
    return VersionRecord(
        version=change.version,
        digest=change.digest,
        size_bytes=change.size_bytes,
        max_rank=change.max_rank,
        base_model=change.base_model,
        created=time,
        gpu_bytes=change.gpu_bytes,
        touches=change.touches,
        trained_on=change.trained_on,
    )


def _pointed(
    record: AdapterRecord, alias: str, version: int, history: tuple[int, ...]
) -> AdapterRecord:
    return replace(
        record,
        aliases={**record.aliases, alias: version},
        alias_history={**record.alias_history, alias: history},
        shares=_without(record.shares, alias),
    )


def _marked(record: AdapterRecord, number: int, *, retired: bool) -> AdapterRecord:
    versions = (replace(v, retired=retired) if v.version == number else v for v in record.versions)
    return replace(record, versions=tuple(versions))


def _without(table: Mapping[str, V], name: str) -> Mapping[str, V]:
    return {at: value for at, value in table.items() if at != name}
