"""Record of the adapters that each tier (GPU, host, disk) gained or lost since the last report."""

import threading
from collections.abc import Callable, Set

from lorikeet_engine.adapter import Residency

OnChange = Callable[[str], None]
"""Callback for a change of a tier's contents; takes the digest of the adapter gained or lost."""


def ignore_change(_digest: str) -> None:
    """Do nothing: the default `on_change` of a tier, for when nothing needs its changes."""


class ResidencyChanges:
    """Digests of adapters that came to a tier (disk, host memory, GPU) or left it since the last
    call of `moved`.

    Records only that an adapter's tier may have changed, in any order and any number of times.
    Thread-safe.

    residency: returns the tier nearest to the GPU that holds an adapter now.
    changed: event that is set when `moved` may have something to return.
    """

    def __init__(self, residency: Callable[[str], Residency]) -> None:
        self._residency = residency
        self._lock = threading.Lock()  # guards `_touched`, and is held only while that changes
        self._touched: set[str] = set()
        self._reading = threading.Lock()  # guards `_reported`
        self._reported: dict[str, Residency] = {}  # last reported tier, unless remote
        self.changed = threading.Event()

    def note(self, digest: str) -> None:
        """Record that an adapter has changed tier; call it after the change."""
        with self._lock:
            self._touched.add(digest)
        self.changed.set()

    def on_disk(self, digests: Set[str]) -> None:
        """Record adapters that came to the disk or left it.

        digests: all adapters that are on the disk now.
        """
        with self._reading:
            gone = {d for d, tier in self._reported.items() if tier is Residency.DISK} - digests
            changed = gone | (digests - self._reported.keys())
        if changed:
            with self._lock:
                self._touched |= changed
            self.changed.set()

    def moved(self) -> dict[str, Residency]:
        """Return the current tiers, by digest, of adapters that changed tier since the last
        call.
        """
        with self._reading:
            with self._lock:
                touched, self._touched = self._touched, set()
            moved = dict[str, Residency]()
            for digest in touched:
                tier = self._residency(digest)
                if tier is not self._reported.get(digest, Residency.REMOTE):
                    moved[digest] = tier
                    self._report(digest, tier)
            return moved

    def _report(self, digest: str, tier: Residency) -> None:
        if tier is Residency.REMOTE:
            del self._reported[digest]
        else:
            self._reported[digest] = tier
