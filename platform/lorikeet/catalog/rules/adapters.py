"""Rules of operations on adapters: versions, aliases, shares and retirement.

Pure functions of the state. Each function returns the changes to commit together, or no changes if
the state is as wanted already. It raises the error that refuses the operation.
"""

from collections.abc import Sequence
from dataclasses import fields

from lorikeet.catalog.changes import (
    AdapterRetired,
    AdapterShared,
    AliasMoved,
    AliasRolledBack,
    Change,
    DefaultsSet,
    ShareEnded,
    ShareGiven,
    VersionRegistered,
    VersionRetired,
)
from lorikeet.catalog.names import DEFAULT_ALIAS
from lorikeet.catalog.records import AdapterRecord, AliasShare, BlobFacts, VersionRecord
from lorikeet.catalog.rules.quota import check_quota
from lorikeet.catalog.state import CatalogState
from lorikeet.errors import Conflict, NotFound, UnknownModel
from lorikeet.request_defaults import RequestDefaults

Changes = Sequence[Change]


def register(
    state: CatalogState,
    tenant: str,
    name: str,
    facts: BlobFacts,
    *,
    defaults: RequestDefaults | None = None,
    shared: bool | None = None,
    alias: str | None = None,
    since: int | None = None,
) -> Changes:
    """Return the changes that add a version with these facts, unless a usable (not retired) version
    holds the same blob with the same request defaults.

    If no other version is usable, the alias prod then points to it.

    facts: facts about the version's blob, found when it was validated.
    defaults: the version's own request defaults; None: the base model's.
    shared: open the adapter to every tenant; None keeps the present setting.
    alias: alias to point to the version.
    since: number of the log entry that the caller's decision was based on; None: the newest.

    Raises UnknownTenant, and Conflict beyond the tenant's limits, or if the adapter was retired
    after `since`.
    """
    state.tenant(tenant)
    record = state.find(tenant, name) or AdapterRecord(tenant, name)
    if since is not None and record.retired_since(since):
        raise Conflict(f"{record.label} was retired after this version was sent: send it again")
    changes: list[Change] = []
    held = record.registered(facts.digest, defaults)
    number = held.version if held else len(record.versions) + 1
    if held is None:
        known = {field.name: getattr(facts, field.name) for field in fields(facts)}
        changes.append(VersionRegistered(tenant=tenant, name=name, version=number, **known))
        if defaults is not None:
            changes.append(DefaultsSet(tenant=tenant, name=name, version=number, defaults=defaults))
    if shared is not None and shared != record.shared:
        changes.append(AdapterShared(tenant=tenant, name=name, shared=shared))
    moving = {alias} if alias else set()
    for each in sorted(moving | {DEFAULT_ALIAS} if record.retired else moving):
        if record.aliases.get(each) != number:
            changes.append(AliasMoved(tenant=tenant, name=name, alias=each, version=number))
    if held is None:
        check_quota(state, tenant, changes)
    return changes


def promote(
    state: CatalogState, tenant: str, name: str, version: int, alias: str, expect: int | None
) -> Changes:
    """Return the changes that point an alias to a usable version, for all its requests.

    expect: version that the alias must point to; None: any.

    Raises UnknownModel for an unknown version, and Conflict if the version is retired or the alias
    does not point to `expect`.
    """
    record = state.adapter(tenant, name)
    _check_usable(record, version)
    _check_expected(record, alias, expect)
    if record.aliases.get(alias) != version:
        return (AliasMoved(tenant=tenant, name=name, alias=alias, version=version),)
    if alias in record.shares:
        return (ShareEnded(tenant=tenant, name=name, alias=alias),)
    return ()


def give_share(
    state: CatalogState, tenant: str, name: str, share: AliasShare, alias: str, expect: int | None
) -> Changes:
    """Return the changes that give a share of an alias's requests to a second usable version.

    share: the second version, and its fraction of the requests.
    expect: version that the alias must point to; None: any.

    Raises UnknownModel for an unknown version, NotFound for an unknown alias, and Conflict if the
    version is retired or the alias already points to it, or does not point to `expect`.
    """
    record = state.adapter(tenant, name)
    _check_usable(record, share.version)
    _check_expected(record, alias, expect)
    if _pointed(record, alias) == share.version:
        raise Conflict(
            f"{record.label}@{alias} already points to version {share.version}: a share is for "
            "another version",
            param="share",
        )
    if record.shares.get(alias) == share:
        return ()
    version, fraction = share.version, share.fraction
    return (ShareGiven(tenant=tenant, name=name, alias=alias, version=version, fraction=fraction),)


def rollback(
    state: CatalogState, tenant: str, name: str, alias: str, expect: int | None
) -> Changes:
    """Return the changes that end an alias's share (second version with a fraction of its requests)
    or, without a share, point the alias to its previous usable version.

    expect: version that the alias must point to; None: any.

    Raises UnknownModel for an unknown adapter, NotFound for an unknown alias, and Conflict if there
    is no such version or the alias does not point to `expect`.
    """
    record = state.adapter(tenant, name)
    _check_expected(record, alias, expect)
    _pointed(record, alias)
    if alias in record.shares:
        return (ShareEnded(tenant=tenant, name=name, alias=alias),)
    for number in reversed(record.alias_history[alias]):
        if not record.versions[number - 1].retired:
            return (AliasRolledBack(tenant=tenant, name=name, alias=alias, version=number),)
    raise Conflict(
        f"{record.label}@{alias} has nothing to go back to: before version "
        f"{record.aliases[alias]} it pointed to no version that can still be used",
        param="alias",
    )


def retire(state: CatalogState, tenant: str, name: str, version: int | None) -> Changes:
    """Return the changes that retire a version, or the whole adapter if `version` is None.

    Raises UnknownModel if there is no such version or adapter, and Conflict if an alias points to
    the version.
    """
    record = state.adapter(tenant, name)
    if version is None:
        return () if record.retired else (AdapterRetired(tenant=tenant, name=name),)
    if known_version(record, version).retired:
        return ()
    if aliases := record.aliases_of(version):
        raise Conflict(
            f"{record.label}@{version} is {' and '.join(aliases)}: promote another version "
            "there first, or retire the whole adapter",
            param="version",
        )
    return (VersionRetired(tenant=tenant, name=name, version=version),)


def known_version(record: AdapterRecord, number: int) -> VersionRecord:
    """Return the version with this number, retired or not. Raises UnknownModel if there is none."""
    version = record.version(number)
    if version is None:
        raise UnknownModel(
            f"{record.label} has no version {number}: {usable_versions(record)}", param="version"
        )
    return version


def _check_usable(record: AdapterRecord, number: int) -> None:
    if known_version(record, number).retired:
        raise Conflict(
            f"{record.label}@{number} is retired: {usable_versions(record)}", param="version"
        )


def _pointed(record: AdapterRecord, alias: str) -> int:
    if alias not in record.aliases:
        raise NotFound(f"{record.label} has no alias {alias!r}", param="alias")
    return record.aliases[alias]


def usable_versions(record: AdapterRecord) -> str:
    """Format an adapter's usable versions and aliases for an error message."""
    usable = [str(version.version) for version in record.versions if not version.retired]
    aliases = [f"{alias} → {at}" for alias, at in sorted(record.aliases.items())]
    if not usable:
        return "all its versions are retired"
    plural = "s" if len(usable) > 1 else ""
    pointing = f", aliases {', '.join(aliases)}" if aliases else ""
    return f"it has version{plural} {', '.join(usable)}{pointing}"


def _check_expected(record: AdapterRecord, alias: str, expect: int | None) -> None:
    now = record.aliases.get(alias)
    if expect is not None and now != expect:
        at = "nothing" if now is None else f"version {now}"
        raise Conflict(
            f"{record.label}@{alias} points to {at}, not to version {expect}: someone else moved "
            "it; look again and decide anew",
            param="expect",
        )
