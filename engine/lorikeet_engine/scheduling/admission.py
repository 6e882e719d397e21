"""Who of the waiting sequences may begin to run.

What a sequence can wait for, and whom that stops:

its adapter is not on the GPU     nobody: others pass it
another computes its prefix       nobody: others pass it until it can share those pages
other adapters take the room      nobody, until PATIENCE sequences with adapters have passed it;
                                  then, at its tenant's turn, it is promised that no more of those
                                  are admitted until its own adapter is in; room is their number,
                                  Σ of their ranks, and memory
too few KV pages are free         everybody: the pages that come free are its own

Those behind a sequence are those whose turn (waiting.py) comes later.
"""

from collections.abc import Iterable
from typing import Protocol

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.errors import AdapterError
from lorikeet_engine.scheduling.kv_cache import KVCache
from lorikeet_engine.scheduling.sequence import AdapterLease, KeptOut, Sequence

PATIENCE = 32


class Adapters(Protocol):
    """Where adapters are: `residency.Tiers`, as far as scheduling needs it."""

    def residency(self, ref: AdapterRef) -> Residency:
        """The fastest place that holds it now."""

    def copy_s(self, ref: AdapterRef) -> float:
        """How long its copy to the GPU takes if nobody has wanted it there so far, else 0."""

    def here_since_s(self, ref: AdapterRef) -> float:
        """When it came to the GPU, where it is, by the monotonic clock."""

    def want(self, ref: AdapterRef, tenant: str) -> None:
        """Start to bring it to the GPU for a tenant; doing so again changes nothing."""

    def rank(self, ref: AdapterRef) -> int | None:
        """Its largest rank while it is on the GPU."""

    def lease(self, ref: AdapterRef, tenant: str) -> AdapterLease | None:
        """A tenant's lease once it is on the GPU. Raises AdapterError if it cannot come there."""


class Admission:
    """One step's look through the waiting sequences, in the order of their turns.

    max_adapters, max_ranks: of the distinct adapters that run, how many and Σ rank at most. One may
    run whatever its rank. failed: the adapters that could not be loaded, by digest. promised: who
    waits for room that nobody else may take.
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
        self.promised: Sequence | None = None
        self._leases = False  # whether anybody has one, if only until the step in flight is read
        for sequence in running:
            self._include(sequence)

    def allows(self, sequence: Sequence, admitted: int) -> bool:
        """Whether it can run but for KV pages; if so, it has its lease.

        admitted: how many sequences with adapters ever were.
        """
        if sequence.adapter is not None and not self._leased(sequence, sequence.adapter, admitted):
            return False
        return not self._shares_soon(sequence)

    def refuses(self, sequence: Sequence) -> bool:
        """Whether it is known already that its adapter cannot be used."""
        ref = sequence.request.adapter
        return ref is not None and (self.promised is not None or ref.digest in self._absent)

    def admit(self, sequence: Sequence) -> None:
        """It runs from now on."""
        self._include(sequence)
        sequence.kept_out = KeptOut()

    def _leased(self, sequence: Sequence, ref: AdapterRef, admitted: int) -> bool:
        if self.refuses(sequence):
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
            self._pass(sequence, ref, crowded, admitted)
        return False

    def _crowded(self, ref: AdapterRef) -> bool:
        """Whether those that run leave it no room; one that is not on the GPU has no rank yet."""
        if not self._present or ref.digest in self._present:
            return False
        ranks = self._ranks + (self._adapters.rank(ref) or 0)
        return len(self._present) >= self._max_adapters or ranks > self._max_ranks

    def _pass(self, sequence: Sequence, ref: AdapterRef, crowded: bool, admitted: int) -> None:
        self._adapters.want(ref, sequence.request.terms.tenant)
        # On the host and not further: what keeps it out is leased memory, as a rule.
        if not crowded and self._adapters.residency(ref) is not Residency.HOST:
            sequence.kept_out.since = None
            return
        sequence.kept_out.again(admitted)
        # With no adapter leased there is nobody to wait for, and a promise would help nobody.
        if sequence.kept_out.overtaken >= PATIENCE and self._leases:
            self.promised = sequence

    def _include(self, sequence: Sequence) -> None:
        if sequence.adapter is not None and sequence.lease is not None:
            self._leases = True
            digest = sequence.adapter.digest
            if not sequence.complete and digest not in self._present:
                self._present.add(digest)
                self._ranks += sequence.lease.rank
        self._computing.update(sequence.kv.coming_keys())

    def _shares_soon(self, sequence: Sequence) -> bool:
        keys = sequence.kv.shareable_keys()
        found = len(self._cache.find(keys))
        return found < len(keys) and keys[found] in self._computing
