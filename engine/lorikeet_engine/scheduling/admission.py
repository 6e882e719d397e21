"""The sequences that wait: in which order their turns come, and which of them may begin.

WaitingQueue keeps them, and FairOrder goes through them turn by turn: the next is always of the
tenant whose virtual counter (fairness.py) is least. Admission leases the adapter of each and says
whether it may begin. What a sequence can wait for, and which others that stops:

its adapter is not on the GPU     none: others pass it
another computes its prefix       none: others pass it until it can share those pages
other adapters take the room      none, until MAX_OVERTAKES sequences with adapters have passed it;
                                  then, at its tenant's turn, room is reserved for it: no more of
                                  those are admitted until its own adapter is in; room is their
                                  number, Σ of their ranks, and memory
too few places or KV pages        all: what comes free is its own; who gives way to it is said in
                                  preemption.py

Those behind a sequence are those whose turn comes later.
"""

from collections.abc import Iterable
from typing import Protocol

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.errors import AdapterError
from lorikeet_engine.scheduling.kv_cache import KVCache
from lorikeet_engine.scheduling.sequence import AdapterLease, OvertakeCount, Sequence

MAX_OVERTAKES = 32


class AdapterProvider(Protocol):
    """Where adapters are, as far as scheduling needs it.

    Implemented by Tiers (residency/tiers.py).
    """

    def residency(self, ref: AdapterRef) -> Residency:
        """The fastest place that holds an adapter now."""

    def copy_s(self, ref: AdapterRef) -> float:
        """How long an adapter's copy to the GPU takes; 0 if some request asked for it before."""

    def loaded_at_s(self, ref: AdapterRef) -> float:
        """When an adapter that is on the GPU came there, by the monotonic clock."""

    def request(self, ref: AdapterRef, tenant: str) -> None:
        """Start to load an adapter to the GPU for a tenant, or spare it for a while if it is there.

        Doing so again changes nothing.
        """

    def rank(self, ref: AdapterRef) -> int | None:
        """An adapter's largest rank while it is on the GPU, else None."""

    def lease(self, ref: AdapterRef, tenant: str) -> AdapterLease | None:
        """A tenant's lease of an adapter on the GPU. Raises AdapterError if its loading failed."""


class Admission:
    """Admits waiting sequences to one step; `prepare` is asked in the order of their turns.

    max_adapters, max_ranks: bounds of the number and of Σ rank of the distinct adapters that run;
    one may run whatever its rank. failed: errors of adapters that could not be loaded, by digest.
    reserved_for: the sequence that waits for room which no other may take.
    """

    def __init__(
        self,
        running: Iterable[Sequence],
        max_adapters: int,
        max_ranks: float,
        cache: KVCache,
        adapters: AdapterProvider,
    ) -> None:
        self._max_adapters = max_adapters
        self._max_ranks = max_ranks
        self._cache = cache
        self._adapters = adapters
        self.failed: dict[str, AdapterError] = {}
        self._active: set[str] = set()  # digests of the adapters that the step computes with
        self._ranks = 0  # their sum
        self._blocked: set[str] = set()  # digests that cannot join the step
        self.reserved_for: Sequence | None = None
        self._leases = False  # whether any is held, if only until the step in flight is read
        for sequence in running:
            self._include(sequence)

    def prepare(self, sequence: Sequence, admitted: int) -> bool:
        """Lease the sequence's adapter; returns whether it can run if there are KV pages for it.

        admitted: how many sequences with adapters ever were.
        """
        if sequence.adapter is not None and not self._leased(sequence, sequence.adapter, admitted):
            return False
        return not self._cache.awaits_prefix(sequence.kv)

    def is_blocked(self, sequence: Sequence) -> bool:
        """Whether the sequence's adapter was already found unable to join the step."""
        ref = sequence.request.adapter
        return ref is not None and (self.reserved_for is not None or ref.digest in self._blocked)

    def admit(self, sequence: Sequence) -> None:
        """Count the sequence among those that run."""
        self._include(sequence)
        sequence.overtakes = OvertakeCount()

    def _leased(self, sequence: Sequence, ref: AdapterRef, admitted: int) -> bool:
        if self.is_blocked(sequence):
            return False
        has_room = self._has_room(ref)
        if has_room:
            try:
                tenant = sequence.request.scheduling.tenant
                sequence.lease = sequence.lease or self._adapters.lease(ref, tenant)
            except AdapterError as error:
                self.failed[ref.digest] = error
            if sequence.lease is not None:
                return True
        self._blocked.add(ref.digest)
        if ref.digest not in self.failed:
            self._pass_over(sequence, ref, has_room, admitted)
        return False

    def _has_room(self, ref: AdapterRef) -> bool:
        """Whether running adapters leave it room; one that is not on the GPU has no rank yet."""
        if not self._active or ref.digest in self._active:
            return True
        ranks = self._ranks + (self._adapters.rank(ref) or 0)
        return len(self._active) < self._max_adapters and ranks <= self._max_ranks

    def _pass_over(
        self, sequence: Sequence, ref: AdapterRef, has_room: bool, admitted: int
    ) -> None:
        self._adapters.request(ref, sequence.request.scheduling.tenant)
        # On the host and not further: what keeps it out is leased memory, as a rule.
        if has_room and self._adapters.residency(ref) is not Residency.HOST:
            sequence.overtakes.pause()
            return
        sequence.overtakes.update(admitted)
        # Without any lease there is none to wait for, and reserving room would help nobody.
        if sequence.overtakes.count >= MAX_OVERTAKES and self._leases:
            self.reserved_for = sequence

    def _include(self, sequence: Sequence) -> None:
        if sequence.adapter is not None and sequence.lease is not None:
            self._leases = True
            digest = sequence.adapter.digest
            if not sequence.complete and digest not in self._active:
                self._active.add(digest)
                self._ranks += sequence.lease.rank
