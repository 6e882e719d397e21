"""Admission of waiting sequences to a step: adapters are leased, and limits of adapters are kept.

Reasons to wait, and which later sequences in fair order (waiting_queue.py) wait as well:

adapter is not on the GPU         none: others overtake.
another computes the same prefix  none: others overtake until the pages can be shared.
other adapters use up the step's  none, until MAX_OVERTAKES sequences with adapters have overtaken.
number of adapters, Σ of ranks,   Then, once it is next of its tenant, capacity is reserved for the
or GPU memory                     sequence: no other sequence with an adapter begins before it.
no slot, or too few KV pages      all: the next slot and pages that come free are for this
                                  sequence. preemption.py may free some.
"""

from collections.abc import Iterable
from typing import Protocol

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.errors import AdapterError
from lorikeet_engine.scheduling.kv_cache import KVCache
from lorikeet_engine.scheduling.sequence import AdapterLease, OvertakeCount, Sequence

MAX_OVERTAKES = 32


class AdapterProvider(Protocol):
    """Source of adapters, as far as the scheduler needs one.

    Implemented by Tiers (residency/tiers.py).
    """

    def residency(self, ref: AdapterRef) -> Residency:
        """Return the nearest tier that holds an adapter now."""

    def copy_s(self, ref: AdapterRef) -> float:
        """Return the seconds that copying an adapter to the GPU takes; 0 if requested before."""

    def loaded_at_s(self, ref: AdapterRef) -> float:
        """Return the monotonic time at which an adapter, now on the GPU, was loaded there."""

    def request(self, ref: AdapterRef, tenant: str) -> None:
        """Start loading an adapter to the GPU for a tenant; spare it from eviction for a while.

        Repeated calls change nothing.
        """

    def rank(self, ref: AdapterRef) -> int | None:
        """Return the largest rank of an adapter that is on the GPU, else None."""

    def lease(self, ref: AdapterRef, tenant: str) -> AdapterLease | None:
        """Lease an adapter to a tenant; None if it is not on the GPU.

        Raises AdapterError if loading failed.
        """


class Admission:
    """Admission of waiting sequences to one step, asked in fair order.

    max_adapters: limit of distinct adapters in the step.
    max_ranks: limit of Σ rank of the distinct adapters; a single adapter may exceed it.
    failed: errors of adapters that could not be loaded, by digest.
    reserved_for: sequence before which no other with an adapter may begin.
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
        self._ranks = 0  # Σ rank of the active adapters
        self._blocked: set[str] = set()  # digests that cannot join the step
        self.reserved_for: Sequence | None = None
        self._leases = False  # whether a running sequence holds one, even if it is complete
        for sequence in running:
            self._include(sequence)

    def prepare(self, sequence: Sequence, admitted: int) -> bool:
        """Lease the sequence's adapter; return whether only a slot and KV pages are still needed.

        admitted: sequences with adapters that have ever begun.
        """
        if sequence.adapter is not None and not self._leased(sequence, sequence.adapter, admitted):
            return False
        return not self._cache.awaits_prefix(sequence.kv)

    def is_blocked(self, sequence: Sequence) -> bool:
        """Whether the sequence's adapter was already found unable to join the step."""
        ref = sequence.request.adapter
        return ref is not None and (self.reserved_for is not None or ref.digest in self._blocked)

    def admit(self, sequence: Sequence) -> None:
        """Count the sequence among the running ones."""
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
        """Whether the limits allow this adapter; its rank counts as 0 until it is on the GPU."""
        if not self._active or ref.digest in self._active:
            return True
        ranks = self._ranks + (self._adapters.rank(ref) or 0)
        return len(self._active) < self._max_adapters and ranks <= self._max_ranks

    def _pass_over(
        self, sequence: Sequence, ref: AdapterRef, has_room: bool, admitted: int
    ) -> None:
        self._adapters.request(ref, sequence.request.scheduling.tenant)
        # An adapter that stays on the host mostly waits for GPU memory that leases occupy.
        if has_room and self._adapters.residency(ref) is not Residency.HOST:
            sequence.overtakes.pause()
            return
        sequence.overtakes.update(admitted)
        # Without any lease no memory will be given back, so reserving capacity would not help.
        if sequence.overtakes.count >= MAX_OVERTAKES and self._leases:
            self.reserved_for = sequence

    def _include(self, sequence: Sequence) -> None:
        if sequence.adapter is not None and sequence.lease is not None:
            self._leases = True
            digest = sequence.adapter.digest
            if not sequence.complete and digest not in self._active:
                self._active.add(digest)
                self._ranks += sequence.lease.rank
