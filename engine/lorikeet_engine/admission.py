"""Who of the waiting sequences may begin to run.

What a sequence can wait for, and whom that stops:

its adapter is not on the GPU     nobody: others pass it
another computes its prefix       nobody: others pass it until it can share those pages
other adapters take the room      nobody, until PATIENCE sequences with adapters have passed it;
                                  then no more of those are admitted until its own adapter is in;
                                  room is their number, Σ of their ranks, and memory
too few KV pages are free         everybody: the pages that come free are its own
"""

from collections.abc import Iterable
from typing import Protocol

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.errors import AdapterError
from lorikeet_engine.kv_cache import KVCache
from lorikeet_engine.sequence import Lease, Sequence

PATIENCE = 32


class Adapters(Protocol):
    """Where adapters are: `residency.Tiers`, as far as scheduling needs it."""

    def residency(self, ref: AdapterRef) -> Residency:
        """The fastest place that holds it now."""

    def want(self, ref: AdapterRef, tenant: str) -> None:
        """Start to bring it to the GPU for a tenant; doing so again changes nothing."""

    def rank(self, ref: AdapterRef) -> int | None:
        """Its largest rank while it is on the GPU."""

    def lease(self, ref: AdapterRef, tenant: str) -> Lease | None:
        """A tenant's lease once it is on the GPU. Raises AdapterError if it cannot come there."""


class Admission:
    """One step's look through the waiting sequences, in their order.

    max_adapters, max_ranks: of the distinct adapters that run, how many and Σ rank at most. One may
    run whatever its rank. failed: the adapters that could not be loaded, by digest.
    """

    def __init__(
        self,
        running: Iterable[Sequence],
        max_adapters: int,
        max_ranks: float,
        cache: KVCache,
        adapters: Adapters,
    ) -> None:
        self._max_adapters = max_adapters
        self._max_ranks = max_ranks
        self._cache = cache
        self._adapters = adapters
        self.failed: dict[str, AdapterError] = {}
        self._present: set[str] = set()  # digests that the step computes with
        self._ranks = 0  # of these, their sum
        self._absent: set[str] = set()  # digests that cannot join it
        self._computing: set[bytes] = set()  # keys of KV pages that will be there soon
        self._passed: list[Sequence] = []  # kept waiting by other sequences' adapters
        self._reserved = False
        self._leases = False  # whether anybody has one, if only until the step in flight is read
        for sequence in running:
            self._include(sequence)

    def allows(self, sequence: Sequence) -> bool:
        """Whether it can run but for KV pages; if so, it has its lease."""
        if sequence.adapter is not None and not self._leased(sequence, sequence.adapter):
            return False
        return not self._shares_soon(sequence)

    def admit(self, sequence: Sequence) -> None:
        """It runs from now on."""
        self._include(sequence)
        if sequence.adapter is not None:
            for passed in self._passed:
                passed.overtaken += 1

    def _leased(self, sequence: Sequence, ref: AdapterRef) -> bool:
        if self._reserved or ref.digest in self._absent:
            return False
        crowded = self._crowded(ref)
        if not crowded:
            try:
                tenant = sequence.request.terms.tenant
                sequence.lease = sequence.lease or self._adapters.lease(ref, tenant)
            except AdapterError as error:
                self.failed[ref.digest] = error
            if sequence.lease is not None:
                return True
        self._absent.add(ref.digest)
        if ref.digest not in self.failed:
            self._pass(sequence, ref, crowded)
        return False

    def _crowded(self, ref: AdapterRef) -> bool:
        """Whether those that run leave it no room; one that is not on the GPU has no rank yet."""
        if not self._present or ref.digest in self._present:
            return False
        ranks = self._ranks + (self._adapters.rank(ref) or 0)
        return len(self._present) >= self._max_adapters or ranks > self._max_ranks

    def _pass(self, sequence: Sequence, ref: AdapterRef, crowded: bool) -> None:
        self._adapters.want(ref, sequence.request.terms.tenant)
        # On the host and not further: what keeps it out is leased memory, as a rule.
        if crowded or self._adapters.residency(ref) is Residency.HOST:
            self._passed.append(sequence)
            # With no adapter leased there is nobody to wait for, and reserving would help nobody.
            self._reserved = sequence.overtaken >= PATIENCE and self._leases

    def _include(self, sequence: Sequence) -> None:
        if sequence.adapter is not None and sequence.lease is not None:
            self._leases = True
            digest = sequence.adapter.digest
            if not sequence.complete and digest not in self._present:
                self._present.add(digest)
                self._ranks += sequence.lease.rank
        self._computing.update(sequence.coming_keys())

    def _shares_soon(self, sequence: Sequence) -> bool:
        keys = sequence.shareable_keys()
        found = len(self._cache.find(keys))
        return found < len(keys) and keys[found] in self._computing
