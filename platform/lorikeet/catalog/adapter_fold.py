"""What each change makes of one adapter: pure functions."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from lorikeet.catalog.changes import AliasMoved, AliasRolledBack, ShareGiven, VersionRegistered
from lorikeet.catalog.records import AdapterRecord, Share, VersionRecord

V = TypeVar("V")


def version_registered(
    record: AdapterRecord, change: VersionRegistered, time: float
) -> AdapterRecord:
    """With one more version. time: Unix seconds."""
    version = VersionRecord(
        version=change.version,
        digest=change.digest,
        size_bytes=change.size_bytes,
        max_rank=change.max_rank,
        base_model=change.base_model,
        created=time,
        gpu_bytes=change.gpu_bytes,
    )
    return replace(record, versions=(*record.versions, version))


def alias_moved(record: AdapterRecord, change: AliasMoved) -> AdapterRecord:
    """What the alias pointed to joins its history."""
    history = record.alias_history.get(change.alias, ())
    if change.alias in record.aliases:
        history = (*history, record.aliases[change.alias])
    return _pointed(record, change.alias, change.version, history)


def alias_rolled_back(record: AdapterRecord, change: AliasRolledBack) -> AdapterRecord:
    """The history ends before that version's last place in it."""
    history = record.alias_history[change.alias]
    at = len(history) - 1 - history[::-1].index(change.version)
    return _pointed(record, change.alias, change.version, history[:at])


def share_given(record: AdapterRecord, change: ShareGiven) -> AdapterRecord:
    """Replaces the alias's share, if it has one."""
    share = Share(change.version, change.part)
    return replace(record, shares={**record.shares, change.alias: share})


def share_ended(record: AdapterRecord, alias: str) -> AdapterRecord:
    """The alias gives all to what it points to."""
    return replace(record, shares=_without(record.shares, alias))


def version_retired(record: AdapterRecord, number: int) -> AdapterRecord:
    """One version can be used no more."""
    return _marked(record, number, retired=True)


def version_restored(record: AdapterRecord, number: int) -> AdapterRecord:
    """One version can be used again."""
    return _marked(record, number, retired=False)


def adapter_retired(record: AdapterRecord, seq: int) -> AdapterRecord:
    """No version can be used, and none is pointed to. seq: the entry that says so."""
    versions = tuple(replace(version, retired=True) for version in record.versions)
    return AdapterRecord(record.tenant, record.name, versions=versions, retired_at=seq)


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
