"""Pushed versions that replicas have but that the catalog's log does not have yet.

Every gateway knows these versions: the gateway that received a push announces it to the other
gateways until the log has the version, and they forget it if the announcements stop.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from lorikeet.catalog.apply import apply_changes
from lorikeet.catalog.records import BlobFacts
from lorikeet.catalog.rules.adapters import register
from lorikeet.catalog.state import CatalogState
from lorikeet.errors import LorikeetError
from lorikeet.request_defaults import RequestDefaults
from lorikeet_engine.adapter import Adapter

FORGOTTEN_S = 20.0
"""Seconds without an announcement after which a version is forgotten. One announcement can take
eight seconds on an overloaded machine.
"""
_CLAIMED_S = 3600.0
"""Seconds for which a gateway remembers the latest push that moved an alias. An earlier push of the
same alias may wait that long for the store, and must not move the alias back.
"""

Key = tuple[str, str, str]
"""A tenant, an adapter's name and the SHA-256 of a blob."""


@dataclass(frozen=True, slots=True)
class PushedVersion:
    """Version that was pushed with a publish key.

    facts: facts about the blob, such as its digest, from the check of the blob.
    alias: alias to move to this version, besides the aliases that an adapter's first version gets.
    created: Unix seconds.
    expires: end of the version's lifetime, Unix seconds; None: it will be recorded in the log. Only
        for display and comparison: gateways end the lifetime by left_s.
    keep: number of the adapter's expiring versions to keep, newest first, including this version;
        None: no limit.
    seq: number of the last entry of the catalog's log that the receiving gateway had read when the
        push began; None before the push begins.
    left_s: seconds of the lifetime left when the version was pushed or announced; None if `expires`
        is None.
    actor: id of the key that pushed the version.
    defaults: the version's own request defaults; None: the base model's.
    """

    tenant: str
    name: str
    facts: BlobFacts
    alias: str | None
    created: float
    expires: float | None = None
    keep: int | None = None
    seq: int | None = None
    left_s: float | None = None
    actor: str = ""
    defaults: RequestDefaults | None = None

    @property
    def key(self) -> Key:
        """Identity of the pushed version: tenant, adapter's name and digest of the blob."""
        return self.tenant, self.name, self.facts.digest

    def retired(self, state: CatalogState) -> bool:
        """Return whether the version's adapter was retired after the push began.

        Raises PartitionsNotRead if the adapter's partition of the catalog was not read yet.
        """
        record = state.find(self.tenant, self.name)
        return record is not None and self.seq is not None and record.retired_since(self.seq)

    def joined(self, again: "PushedVersion") -> "PushedVersion":
        """Return this version merged with another push of the same blob.

        The result has the longer lifetime, with its `keep`. If the other push is later and has
        another alias, the result has the alias and `created` of that push. It has the other push's
        parity proof, if any.

        again: version of the other push.
        """
        version = self
        if again.alias not in (None, self.alias) and again.created > self.created:
            version = replace(version, alias=again.alias, created=again.created)
        if self.expires is not None and (again.expires is None or again.expires > self.expires):
            version = replace(version, expires=again.expires, keep=again.keep, left_s=again.left_s)
        if again.facts.parity is not None:
            version = replace(version, facts=again.facts)
        return version


@dataclass(slots=True)
class _Claim:
    """Record of the latest push that moved an alias.

    created: creation of the pushed version, Unix seconds.
    until_s: time at which the record is forgotten, on the clock of PushedVersions.
    is_over: whether the catalog's log has moved the alias since the push.
    """

    created: float
    until_s: float
    is_over: bool = False


class PushedVersions:
    """Pushed versions not yet in the catalog's log, which extend the catalog's state for requests.

    The numbers of these versions are provisional: another version may be recorded first. If an
    admin moves an alias meanwhile, the admin's choice counts. For use in one event loop.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: dict[Key, PushedVersion] = {}  # oldest first
        self._until_s: dict[Key, float] = {}
        self._carried = set[Key]()
        self._alias_was: dict[Key, str | None] = {}  # digest that the alias had in the log before
        # by tenant, name and alias, in the order in which they are forgotten
        self._claims: dict[tuple[str, str, str], _Claim] = {}
        self._ends_s: dict[Key, float] = {}  # ends of lifetimes, on the clock
        self._seen: dict[str, tuple[CatalogState, CatalogState]] = {}  # by tenant

    def __len__(self) -> int:
        return len(self._held)

    def add(self, version: PushedVersion) -> None:
        """Add an announced version, or keep a known version for FORGOTTEN_S seconds from now.

        If two pushes have the same alias, the later push gets the alias.
        """
        self._until_s[version.key] = self._clock() + FORGOTTEN_S
        known = self._held.get(version.key)
        version = known.joined(version) if known else version
        if known is None or known.expires != version.expires:
            self._ends_s.pop(version.key, None)
            if version.left_s is not None:
                self._ends_s[version.key] = self._clock() + version.left_s
        version = replace(version, alias=self._claim(version), left_s=None)
        if version == known:
            return
        if known is None or known.alias != version.alias:
            self._alias_was.pop(version.key, None)
        held = _without_surplus([*(self._held | {version.key: version}).values()], version)
        self._held = {
            each.key: replace(each, alias=self._claimed(each))
            for each in sorted(held, key=lambda each: each.created)
        }
        for gone in self._until_s.keys() - self._held.keys():
            self.remove(gone)
        self._seen.pop(version.tenant, None)

    def carry(self, key: Key) -> None:
        """Keep a version that this gateway is pushing, announced again or not, until `let_go`."""
        self._carried.add(key)

    def let_go(self, key: Key) -> None:
        """End the effect of `carry`: forget the version once no gateway has announced it for
        FORGOTTEN_S seconds.
        """
        self._carried.discard(key)
        if key in self._until_s:
            self._until_s[key] = self._clock() + FORGOTTEN_S

    def get(self, key: Key) -> PushedVersion | None:
        """Return the pushed version with this key; None if there is none."""
        return self._held.get(key)

    def of(self, tenant: str, name: str) -> list[PushedVersion]:
        """Return the pushed versions of an adapter, oldest first."""
        return [each for each in self._held.values() if each.key[:2] == (tenant, name)]

    def alias_of(self, version: PushedVersion) -> str | None:
        """Return the alias that a version may move.

        None: it has no alias, or a later push has moved that alias. May be called from any thread.
        """
        held = self._held.get(version.key)
        return self._claimed(version if held is None or held.created < version.created else held)

    def remove(self, key: Key) -> None:
        """Forget the pushed version with this key, if any."""
        self._until_s.pop(key, None)
        self._alias_was.pop(key, None)
        self._ends_s.pop(key, None)
        if self._held.pop(key, None) is not None:
            self._seen.pop(key[0], None)

    def applied_to(self, state: CatalogState, tenant: str) -> CatalogState:
        """Return a catalog state extended by a tenant's pushed versions, without reading the store.

        Forgets pushed versions that the state contains already, that have expired, or that are no
        longer announced. Raises PartitionsNotRead if the tenant's partition of the catalog was not
        read yet.
        """
        now_s = self._clock()
        for key in list(self._held):
            expired = self._ends_s.get(key, now_s + 1) <= now_s
            untold = key not in self._carried and self._until_s[key] < now_s
            if expired or untold:
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
            if version.retired(log):
                self.remove(version.key)
                continue
            version = self._with_alias(version, log, landed)
            try:
                facts, defaults = version.facts, version.defaults
                changes = register(
                    state, tenant, name, facts, defaults=defaults, alias=version.alias
                )
            except LorikeetError:  # over the tenant's limits: the gateway of the push reports that
                continue
            if changes:  # possibly only the alias
                state = apply_changes(state, changes, version.created)
            else:
                landed.add(digest)
                self._end_claim(version)
                for table in (self._held, self._until_s, self._alias_was, self._ends_s):
                    table.pop(version.key, None)
        return state

    def _with_alias(
        self, version: PushedVersion, log: CatalogState, landed: Collection[str | None]
    ) -> PushedVersion:
        """Return the version; without its alias if the catalog's log has meanwhile moved that
        alias.

        log: catalog state without pushed versions.
        landed: digests of pushes that the log has recorded meanwhile; moves of the alias to these
            pushes do not count.
        """
        if version.alias is None:
            return version
        record = log.find(version.tenant, version.name)
        target = record.select(version.alias) if record else None
        now = target.digest if target else None
        if now not in (self._alias_was.get(version.key, now), version.facts.digest, *landed):
            self._end_claim(version)
            version = self._held[version.key] = replace(version, alias=None)
        self._alias_was[version.key] = now
        return version

    def _claim(self, version: PushedVersion) -> str | None:
        """Record that a version's push moves the version's alias; return the alias.

        None: the version has no alias, or a later push has moved the alias.
        """
        alias = self._claimed(version)
        if alias is not None:
            now_s, at = self._clock(), (version.tenant, version.name, alias)
            self._claims.pop(at, None)
            self._claims[at] = _Claim(version.created, now_s + _CLAIMED_S)
            while self._claims[oldest := next(iter(self._claims))].until_s <= now_s:
                del self._claims[oldest]
        return alias

    def _claimed(self, version: PushedVersion) -> str | None:
        if version.alias is None:
            return None
        claim = self._claims.get((version.tenant, version.name, version.alias))
        if claim is None or claim.created < version.created:
            return version.alias
        return version.alias if claim.created == version.created and not claim.is_over else None

    def _end_claim(self, version: PushedVersion) -> None:
        """Prevent later announcements of a version from moving the version's alias."""
        claim = self._claims.get((version.tenant, version.name, version.alias or ""))
        if claim is not None and claim.created == version.created:
            claim.is_over = True


def _without_surplus(
    held: Sequence[PushedVersion], newest: PushedVersion
) -> tuple[PushedVersion, ...]:
    """Return `held` without an adapter's oldest expiring versions, if there are more than may be
    kept.

    The latest of the adapter's expiring versions says how many may be kept (its `keep`).

    newest: latest announced version, which names the adapter.
    """
    passing = [
        each
        for each in sorted(held, key=lambda each: each.created)
        if each.expires is not None and (each.tenant, each.name) == (newest.tenant, newest.name)
    ]
    keep = passing[-1].keep if passing else None
    gone = {each.key for each in passing[:-keep]} if keep is not None else set()
    return tuple(each for each in held if each.key not in gone)


class AdapterUses:
    """Counter of the requests in flight on this gateway, by their adapter's digest.

    Replicas keep an adapter whose pushed version's lifetime has ended until they are done
    (pushing/push_pipeline.py). For use in one event loop.
    """

    def __init__(self) -> None:
        self._requests = Counter[str]()

    def __contains__(self, digest: str) -> bool:
        return digest in self._requests

    @contextmanager
    def using(self, adapter: Adapter | None) -> Iterator[None]:
        """Count a request that uses an adapter, or several added up, until the context ends.

        adapter: None: the request uses no adapter.
        """
        digests = [member.digest for member in adapter.members] if adapter else []
        self._requests.update(digests)
        try:
            yield
        finally:
            for digest in digests:
                self._requests[digest] -= 1
                if not self._requests[digest]:
                    del self._requests[digest]
