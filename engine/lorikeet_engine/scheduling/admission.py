"""Admission of waiting sequences to a step: leases their adapters and keeps the limits on adapters.

The left column has the reasons why a sequence must wait. The right column says which of the
sequences behind it in fair order (waiting_queue.py) must then wait as well:

adapter is not on the GPU         none: later sequences overtake.
another sequence computes the     none: later sequences overtake until the pages can be shared.
same prefix, or its pages come
from host memory
other adapters use up the step's  none, until MAX_OVERTAKES sequences with adapters have overtaken.
number of adapters, Σ of ranks,   Then, once the sequence is its tenant's next, capacity is reserved
or GPU memory                     for it: no other sequence with an adapter begins before it. In the
                                  background, sequences with adapters wait at once, and running ones
                                  are preempted; nothing is reserved for them.
no slot, or too few KV pages      all: the next slot and pages that come free are for this
                                  sequence. preemption.py may free some.
"""

from collections.abc import Iterable
from typing import Protocol

from lorikeet_engine.adapter import Adapter, Residency
from lorikeet_engine.errors import AdapterError
from lorikeet_engine.scheduling.kv_cache import KVCache
from lorikeet_engine.scheduling.sequence import AdapterLease, OvertakeCount, Sequence

MAX_OVERTAKES = 32


class AdapterProvider(Protocol):
    """Interface to the adapters and their memory tiers, as far as the scheduler needs it.

    Implemented by Tiers (residency/tiers.py).
    """

    def residency(self, ref: Adapter) -> Residency:
        """Return the nearest tier (GPU, host, disk, remote) that holds an adapter now."""

    def copy_s(self, ref: Adapter) -> float:
        """Return the seconds of an adapter's copy to the GPU; 0 if the adapter was requested
        before.
        """

    def loaded_at_s(self, ref: Adapter) -> float:
        """Return the time at which an adapter on the GPU was loaded there, by the monotonic
        clock.
        """

    def request(self, ref: Adapter, tenant: str) -> None:
        """Begin to load an adapter to the GPU for a tenant's request.

        If the adapter is on the GPU already, it is protected from eviction for a while. A second
        call for the same adapter changes nothing.
        """

    def rank(self, ref: Adapter) -> int | None:
        """Return an adapter's largest LoRA rank on any linear; None if the adapter is not on the
        GPU.
        """

    def lease(self, ref: Adapter, tenant: str) -> AdapterLease | None:
        """Lease an adapter's GPU slot to a tenant; a leased adapter is not evicted.

        Returns None if the adapter is not on the GPU. Raises AdapterError if loading the adapter
        failed.
        """


class Admission:
    """Admission of waiting sequences to one step.

    Call `prepare` for the sequences in fair order: those of the tenant that has got the least
    service first.

    running: sequences that run already, with their adapters' leases.
    max_adapters: limit on the number of distinct adapters in the step.
    max_ranks: limit on the sum of the LoRA ranks of the distinct adapters; a single adapter may
        exceed it.
    cache: tells whether another sequence is about to compute the same prefix.
    adapters: leases adapters.
    failed: by digest, the errors of adapters that could not be loaded; `prepare` adds them.
    reserved_for: sequence that must begin before any other sequence with an adapter does; None if
        there is no such sequence.
    lacks_room: whether `prepare` has refused a foreground sequence because other adapters use up
        the step's limits or the GPU's adapter memory.
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
        self.lacks_room = False
        self._leases = False  # whether a running sequence holds one, even if it is complete
        for sequence in running:
            self._include(sequence)

    def prepare(self, sequence: Sequence, admitted: int) -> bool:
        """Lease the adapter of a waiting sequence; return True if the sequence now lacks nothing
        but a slot and KV pages.

        admitted: number of sequences with adapters that have begun since the engine's start.
        """
        if sequence.adapter is not None and not self._leased(sequence, sequence.adapter, admitted):
            return False
        return not self._cache.awaits_prefix(sequence.kv)

    def is_blocked(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence cannot begin in this step because of its adapter.

        True if this step has refused the adapter before, if `reserved_for` is set, or if the
        sequence is in the background and `lacks_room` is set.
        """
        if (ref := sequence.adapter) is None:
            return False
        gives_way = self.lacks_room and sequence.background
        return gives_way or self.reserved_for is not None or ref.digest in self._blocked

    def admit(self, sequence: Sequence) -> None:
        """Record that a waiting sequence begins: its adapter counts towards the step's limits."""
        self._include(sequence)
        sequence.overtakes = OvertakeCount()

    def _leased(self, sequence: Sequence, ref: Adapter, admitted: int) -> bool:
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

    def _has_room(self, ref: Adapter) -> bool:
        """Whether the step's limits on adapters and ranks allow this adapter in addition.

        The rank of an adapter that is not on the GPU counts as 0.
        """
        if not self._active or ref.digest in self._active:
            return True
        ranks = self._ranks + (self._adapters.rank(ref) or 0)
        return len(self._active) < self._max_adapters and ranks <= self._max_ranks

    def _pass_over(self, sequence: Sequence, ref: Adapter, has_room: bool, admitted: int) -> None:
        self._adapters.request(ref, sequence.request.scheduling.tenant)
        # An adapter that stays on the host mostly waits for GPU memory that leases occupy.
        tiers = (self._adapters.residency(member) for member in ref.members)
        if has_room and Residency.HOST not in tiers:
            sequence.overtakes.pause()
            return
        stays = sequence.overtakes.begun is not None
        sequence.overtakes.update(admitted)
        if sequence.background:
            return
        self.lacks_room |= stays or not has_room
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
