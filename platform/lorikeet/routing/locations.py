"""Where adapters are: which replicas hold one, at each tier."""

import sys
from collections import Counter
from collections.abc import Collection
from typing import TypeVar

from lorikeet.routing.status_update import StatusUpdate
from lorikeet_engine.adapter import Residency

K = TypeVar("K")

_NOWHERE = Residency.REMOTE


class AdapterLocations:
    """Looked up by adapter for each request, kept up to date by replica."""

    def __init__(self) -> None:
        self._holders: dict[Residency, dict[str, tuple[str, ...]]] = {
            tier: {} for tier in Residency if tier is not _NOWHERE
        }
        self._held: dict[str, dict[str, Residency]] = {}
        self._unconfirmed: dict[str, set[str]] = {}  # while a replica sends a snapshot
        self._coming: dict[str, Counter[str]] = {}

    def at(self, tier: Residency, digest: str) -> tuple[str, ...]:
        """The replicas whose nearest copy is at this tier, which is not remote."""
        return self._holders[tier].get(digest, ())

    def tier(self, replica: str, digest: str) -> Residency:
        """The nearest tier at which a replica has the adapter."""
        held = self._held.get(replica)
        return held.get(digest, _NOWHERE) if held else _NOWHERE

    def take(self, replica: str, update: StatusUpdate) -> None:
        """Take in what has moved; what a whole snapshot does not name is held no more."""
        if update.begins_snapshot:
            self._unconfirmed[replica] = set(self._held.get(replica, ()))
        for digest, tier in update.moved.items():
            self.move(replica, digest, tier)
        if replica in self._unconfirmed:
            self._unconfirmed[replica].difference_update(update.moved)
        if update.ends_snapshot:
            for digest in self._unconfirmed.pop(replica, ()):
                self.move(replica, digest, _NOWHERE)

    def move(self, replica: str, digest: str, tier: Residency) -> None:
        """It has the adapter there now and no nearer."""
        held = self._held.setdefault(replica, {})
        before = held.get(digest, _NOWHERE)
        if before is tier:
            return
        digest = sys.intern(digest)  # one string for all replicas that hold it
        if before is not _NOWHERE:
            self._take_out(before, digest, replica)
        if tier is _NOWHERE:
            del held[digest]
        else:
            held[digest] = tier
            holders = self._holders[tier]
            holders[digest] = (*holders.get(digest, ()), replica)

    def coming_to(self, digest: str) -> Collection[str]:
        """The replicas where requests wait for the adapter, so that it is on its way there."""
        return self._coming.get(digest, ())

    def is_or_comes(self, replica: str, digest: str) -> bool:
        """Whether the adapter is on that GPU, or on its way there."""
        on_gpu = self.tier(replica, digest) is Residency.GPU
        return on_gpu or replica in self.coming_to(digest)

    def wait(self, replica: str, digest: str) -> None:
        """One more request waits there for the adapter."""
        self._coming.setdefault(digest, Counter())[replica] += 1

    def wait_no_more(self, replica: str, digest: str) -> None:
        """One of them does no more."""
        waiting = self._coming[digest]
        take_one(waiting, replica)
        if not waiting:
            del self._coming[digest]

    def forget(self, replica: str) -> None:
        """It is gone."""
        self._unconfirmed.pop(replica, None)
        for digest, tier in self._held.pop(replica, {}).items():
            self._take_out(tier, digest, replica)

    def _take_out(self, tier: Residency, digest: str, replica: str) -> None:
        left = tuple(name for name in self._holders[tier][digest] if name != replica)
        if left:
            self._holders[tier][digest] = left
        else:
            del self._holders[tier][digest]


def take_one(counts: Counter[K], key: K) -> None:
    """One less of it; a count of 0 is not kept."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
