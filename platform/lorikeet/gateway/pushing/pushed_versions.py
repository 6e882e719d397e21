"""Versions that replicas hold and the catalog's log does not have yet, as this gateway knows them.

Every gateway answers for them: the one that took a push tells the others, again and again until the
log has the version. What is not told again is forgotten: its gateway is no more.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from lorikeet.catalog.log.apply import apply_changes
from lorikeet.catalog.log.changes import VersionRegistered
from lorikeet.catalog.records import BlobFacts
from lorikeet.catalog.rules.adapters import register
from lorikeet.catalog.state import CatalogState
from lorikeet.errors import LorikeetError

FORGOTTEN_S = 10.0

Key = tuple[str, str, str]
"""A tenant, an adapter's name and a digest."""


@dataclass(frozen=True, slots=True)
class PushedVersion:
    """alias: what is to point to it beside what its first version gets. created: Unix seconds.

    expires: when it goes by itself, Unix seconds; None: it will be in the log. keep: of its
    adapter's versions that expire, only so many of the newest stay, itself among them.
    """

    tenant: str
    name: str
    facts: BlobFacts
    alias: str | None
    created: float
    expires: float | None = None
    keep: int | None = None

    @property
    def key(self) -> Key:
        """There is one version with this key."""
        return self.tenant, self.name, self.facts.digest


class PushedVersions:
    """Shows the catalog's state as the log will have it with these versions. For one event loop.

    The numbers that they get there may change: another version may be recorded first. An alias that
    the log moves meanwhile, because an admin has, stays where the log has it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: dict[Key, PushedVersion] = {}  # the oldest first
        self._until_s: dict[Key, float] = {}
        self._alias_was: dict[Key, str | None] = {}  # the digest that the log's alias pointed to
        self._seen: dict[str, tuple[CatalogState, CatalogState]] = {}  # by tenant

    def __len__(self) -> int:
        return len(self._held)

    def add(self, version: PushedVersion) -> None:
        """Take in a version, or that it still is one. An alias goes to the later one of two."""
        self._until_s[version.key] = self._clock() + FORGOTTEN_S
        if version.key in self._held:
            return
        version = replace(version, alias=self.alias_of(version))
        held = _kept((*self._held.values(), version), version)
        self._held = {
            each.key: replace(each, alias=None)
            if _same_alias(each, version) and each.created < version.created
            else each
            for each in sorted(held, key=lambda each: each.created)
        }
        for gone in self._until_s.keys() - self._held.keys():
            self.remove(gone)
        self._seen.pop(version.tenant, None)

    def get(self, key: Key) -> PushedVersion | None:
        """The version with this key, if it is here."""
        return self._held.get(key)

    def alias_of(self, version: PushedVersion) -> str | None:
        """The alias that a version is to get, unless another has it by now. Any thread."""
        version, held = self._held.get(version.key, version), list(self._held.values())
        later = (each for each in held if each.created > version.created)
        return None if any(_same_alias(each, version) for each in later) else version.alias

    def remove(self, key: Key) -> None:
        """Forget a version."""
        self._until_s.pop(key, None)
        self._alias_was.pop(key, None)
        if self._held.pop(key, None) is not None:
            self._seen.pop(key[0], None)

    def applied_to(self, state: CatalogState, tenant: str) -> CatalogState:
        """Return the state with a tenant's versions; forget those that it has. Reads no store.

        Raises PartitionsNotRead, for this tenant's partition alone.
        """
        now_s, now = self._clock(), time.time()
        for key, version in list(self._held.items()):
            expired = version.expires is not None and version.expires <= now
            if expired or self._until_s[key] < now_s:
                self.remove(key)
        versions = [version for version in self._held.values() if version.tenant == tenant]
        if not versions:
            return state
        if tenant not in self._seen or self._seen[tenant][0] is not state:
            self._seen[tenant] = (state, self._apply(state, versions))
        return self._seen[tenant][1]

    def _apply(self, state: CatalogState, versions: Sequence[PushedVersion]) -> CatalogState:
        log, landed = state, set[str | None]()
        for version in versions:
            tenant, name, digest = version.key
            version = self._with_alias(version, log, landed)
            try:
                changes = register(state, tenant, name, version.facts, alias=version.alias)
            except LorikeetError:  # it found no room, which its own gateway will be told
                continue
            if any(isinstance(change, VersionRegistered) for change in changes):
                state = apply_changes(state, changes, version.created)
            else:  # the log has it, and has moved its alias
                landed.add(digest)
                for table in (self._held, self._until_s, self._alias_was):
                    table.pop(version.key, None)
        return state

    def _with_alias(
        self, version: PushedVersion, log: CatalogState, landed: Collection[str | None]
    ) -> PushedVersion:
        """Return the version without its alias where the log has moved that.

        landed: digests of earlier pushes that the log has now, and whose moves do not count.
        """
        if version.alias is None:
            return version
        record = log.find(version.tenant, version.name)
        target = record.select(version.alias) if record else None
        now = target.digest if target else None
        if now not in (self._alias_was.get(version.key, now), version.facts.digest, *landed):
            version = self._held[version.key] = replace(version, alias=None)
        self._alias_was[version.key] = now
        return version


def _kept(held: Sequence[PushedVersion], newest: PushedVersion) -> tuple[PushedVersion, ...]:
    """What stays of these, in which the expiring ones of the newest's adapter are too many."""
    passing = [
        each
        for each in sorted(held, key=lambda each: each.created)
        if each.expires is not None and (each.tenant, each.name) == (newest.tenant, newest.name)
    ]
    keep = passing[-1].keep if passing else None
    gone = {each.key for each in passing[:-keep]} if keep is not None else set()
    return tuple(each for each in held if each.key not in gone)


def _same_alias(one: PushedVersion, other: PushedVersion) -> bool:
    of_one_adapter = (one.tenant, one.name) == (other.tenant, other.name)
    return of_one_adapter and one.alias is not None and one.alias == other.alias
