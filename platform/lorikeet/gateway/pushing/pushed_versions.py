"""Versions that replicas hold and the catalog's log does not have yet, as this gateway knows them.

Every gateway answers for them: the one that took a push tells the others, again and again until the
log has the version. What is not told again is forgotten: its gateway is no more.
"""

import time
from collections.abc import Callable
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
    """alias: what is to point to it beside what its first version gets. created: Unix seconds."""

    tenant: str
    name: str
    facts: BlobFacts
    alias: str | None
    created: float

    @property
    def key(self) -> Key:
        """There is one version with this key."""
        return self.tenant, self.name, self.facts.digest


class PushedVersions:
    """Shows the catalog's state as the log will have it with these versions. For one event loop.

    The numbers that they get there may change: another version may be recorded first.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: dict[Key, PushedVersion] = {}  # the oldest first
        self._until_s: dict[Key, float] = {}
        self._seen: tuple[CatalogState, CatalogState] | None = None

    def __len__(self) -> int:
        return len(self._held)

    def add(self, version: PushedVersion) -> None:
        """Take in a version, or that it still is one. An alias goes to the later one of two."""
        self._until_s[version.key] = self._clock() + FORGOTTEN_S
        if version.key in self._held:
            return
        version = replace(version, alias=self.alias_of(version))
        held = (*self._held.values(), version)
        self._held = {
            each.key: replace(each, alias=None)
            if _same_alias(each, version) and each.created < version.created
            else each
            for each in sorted(held, key=lambda each: each.created)
        }
        self._seen = None

    def alias_of(self, version: PushedVersion) -> str | None:
        """The alias that a version is to get, unless a later one here is to get it. Any thread."""
        held = list(self._held.values())
        later = (each for each in held if each.created > version.created)
        return None if any(_same_alias(each, version) for each in later) else version.alias

    def remove(self, key: Key) -> None:
        """Forget a version."""
        self._until_s.pop(key, None)
        if self._held.pop(key, None) is not None:
            self._seen = None

    def applied_to(self, state: CatalogState) -> CatalogState:
        """Return the state with these versions; forget those that it has. Reads no store.

        Raises PartitionsNotRead.
        """
        if not self._held:
            return state
        now_s = self._clock()
        for key in [key for key, until_s in self._until_s.items() if until_s < now_s]:
            self.remove(key)
        if self._seen is None or self._seen[0] is not state:
            self._seen = (state, self._apply(state))
        return self._seen[1]

    def _apply(self, state: CatalogState) -> CatalogState:
        for version in list(self._held.values()):
            tenant, name, _ = version.key
            try:
                changes = register(state, tenant, name, version.facts, alias=version.alias)
            except LorikeetError:  # it found no room, which its own gateway will be told
                continue
            if any(isinstance(change, VersionRegistered) for change in changes):
                state = apply_changes(state, changes, version.created)
            else:  # the log has it, and has moved its alias
                self._until_s.pop(version.key, None)
                self._held.pop(version.key, None)
        return state


def _same_alias(one: PushedVersion, other: PushedVersion) -> bool:
    of_one_adapter = (one.tenant, one.name) == (other.tenant, other.name)
    return of_one_adapter and one.alias is not None and one.alias == other.alias
