"""One replica as one gateway knows it: its last status, and what was sent to it since."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lorikeet.protocol.messages import Candidate
from lorikeet.protocol.status_update import StatusUpdate
from lorikeet.routing.locations import AdapterLocations, decrement
from lorikeet.routing.ranking import (
    CostCoefficients,
    ReplicaOption,
    RoutingRequest,
    RoutingStatus,
    evicted_uses,
)
from lorikeet_engine.costs import MeasuredCosts, seen_tokens

FETCH_PAUSE_S = 10.0
"""A replica that could not load an adapter is for so long the last to be sent what it lacks."""
STALE_S = 3.0
"""After so long without status a replica is judged by what this gateway itself sent there."""


class RoutingDecision(NamedTuple):
    """Where a request was sent.

    accepted_s: when that replica took it, by the fleet's clock; None: not yet. candidates: the
    replicas that were considered, the best first.
    """

    replica: str
    accepted_s: float | None
    candidates: tuple[Candidate[str], ...]


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """A request on its way to a replica or at work there.

    tokens: of its prompt, those that are not cached there. bytes: of its adapter if this request
    brings it to that GPU. candidates: the replicas that were considered, the best first.
    accepted_s: when the replica took it, if it did. has_first_byte: whether its answer has begun.
    """

    request: RoutingRequest
    replica: "TrackedReplica"
    sent_s: float
    tokens: int
    bytes: int
    candidates: Sequence[Candidate[str]]
    accepted_s: float | None = None
    has_first_byte: bool = False

    @property
    def seen(self) -> int:
        """What those tokens see: seen_tokens."""
        return seen_tokens(self.tokens, self.request.work.prompt_tokens - self.tokens)

    @property
    def decision(self) -> RoutingDecision:
        """The decision that sent the request here."""
        return RoutingDecision(self.replica.name, self.accepted_s, tuple(self.candidates))


class TrackedReplica:
    """Adds what this gateway sent to the stats that the replica reported before it could know.

    costs: what routing expects of it. measured: the costs that it reported, if any. decoding: own
    requests that decode with each adapter.
    """

    def __init__(self, name: str, costs: CostCoefficients) -> None:
        self.name, self.costs = name, costs
        self.measured: MeasuredCosts | None = None
        self.decoding: Counter[str] = Counter()
        self._update: StatusUpdate | None = None  # the newest
        self._updated_s = 0.0
        self._unreported: dict[InFlightRequest, None] = {}  # not in the update yet, oldest first
        self._new = _Totals()  # of the unreported
        self._own = _Totals()  # of all without a first token
        self._fetch_paused_until_s = -math.inf
        self._tenant_tokens: Counter[str | None] = Counter()  # waiting, by tenant
        self._running = 0
        self._ranks = 0

    def apply(self, update: StatusUpdate, now_s: float, age_s: float) -> bool:
        """Apply a status update unless a newer one came; whether it was applied.

        age_s: how long before now_s the stats may have been read.
        """
        if self._update is not None and update.seq <= self._update.seq:
            return False
        self._update, self._updated_s = update, now_s
        if update.costs is not None:
            self.measured = update.costs
        while self._unreported and (oldest := next(iter(self._unreported))).sent_s <= now_s - age_s:
            self._mark_reported(oldest)
        return True

    def add(self, sent: InFlightRequest) -> None:
        """Count a request that is sent there."""
        self._unreported[sent] = None
        self._new.add(sent)
        self._own.add(sent)
        self._tenant_tokens[sent.request.tenant] += sent.tokens

    def begin_answer(self, sent: InFlightRequest) -> None:
        """Count a request whose first bytes have come as decoding."""
        self._leave_queue(sent)
        sent.has_first_byte = True
        self._running += sent.request.work.sequences
        if sent.request.digest is not None:
            self._ranks += 0 if self.decoding[sent.request.digest] else sent.request.work.rank
            self.decoding[sent.request.digest] += 1

    def remove(self, sent: InFlightRequest) -> None:
        """Count a request no more: it is over, answered or not."""
        if not sent.has_first_byte:
            self._leave_queue(sent)
            return
        self._running -= sent.request.work.sequences
        if sent.request.digest is not None:
            decrement(self.decoding, sent.request.digest)
            self._ranks -= 0 if self.decoding[sent.request.digest] else sent.request.work.rank

    def pause_fetches(self, now_s: float) -> None:
        """Take in that it could not fetch or store an adapter, nor may for FETCH_PAUSE_S."""
        self._fetch_paused_until_s = now_s + FETCH_PAUSE_S

    def can_fetch(self, now_s: float) -> bool:
        """Whether it may be expected to fetch an adapter that it lacks."""
        return now_s >= self._fetch_paused_until_s

    def option(
        self,
        request: RoutingRequest,
        locations: AdapterLocations,
        cached_tokens: int,
        now_s: float,
        queue_length: int | None,
    ) -> ReplicaOption[str]:
        """The replica as an option for a request. cached_tokens: of the prompt."""
        status, queue_share = self.status(now_s, queue_length), self._queue_share(request.tenant)
        if (digest := request.digest) is None:
            return ReplicaOption(
                self.name, status, self.costs, cached_tokens=cached_tokens, queue_share=queue_share
            )
        return ReplicaOption(
            self.name,
            status,
            self.costs,
            locations.tier(self.name, digest),
            digest in self.decoding,
            self._evicted_uses(request.work.adapter_bytes),
            cached_tokens,
            self.name in locations.loading_on(digest),
            queue_share,
            self.can_fetch(now_s),
        )

    def status(self, now_s: float, queue_length: int | None) -> RoutingStatus:
        """What the replica does now. queue_length: all gateways' requests there, if known."""
        new, own = self._new, self._own
        if self._update is None or now_s - self._updated_s > STALE_S:
            running = max(self._running, (queue_length or 0) - own.sequences)
            return RoutingStatus(
                running,
                self._ranks,
                waiting=own.sequences,
                waiting_tokens=own.tokens,
                waiting_seen=own.seen,
                loading_bytes=own.bytes,
            )
        live = self._update.live
        return RoutingStatus(
            live.decoding,
            live.ranks,
            live.context,
            live.pending + new.sequences,
            live.pending_tokens + new.tokens,
            live.pending_seen + new.seen,
            live.loading_bytes + new.bytes,
            live.room_bytes - new.bytes,
        )

    def _queue_share(self, tenant: str | None) -> float:
        """The share of all waiting tokens there that comes before one more request of the tenant.

        The engine serves the tenant next that has had the least, so of each other's queue about as
        much goes before it as waits of its own. What others sent is taken to be like what this
        gateway did.
        """
        waiting = self._own.tokens
        if not waiting:
            return 1.0
        own = self._tenant_tokens[tenant]
        return sum(min(tokens, own) for tokens in self._tenant_tokens.values()) / waiting

    def _evicted_uses(self, adapter_bytes: int) -> float:
        if self._update is None or self._update.live.victim is None:
            return 0.0
        live, victim = self._update.live, self._update.live.victim
        free_bytes = live.free_bytes - self._new.bytes
        return evicted_uses(adapter_bytes, free_bytes, victim.image_bytes, victim.uses)

    def _leave_queue(self, sent: InFlightRequest) -> None:
        self._mark_reported(sent)
        self._own.remove(sent)
        self._tenant_tokens[sent.request.tenant] -= sent.tokens
        if not self._tenant_tokens[sent.request.tenant]:
            del self._tenant_tokens[sent.request.tenant]

    def _mark_reported(self, sent: InFlightRequest) -> None:
        if sent in self._unreported:
            del self._unreported[sent]
            self._new.remove(sent)


@dataclass(slots=True)
class _Totals:
    """Totals over requests without a first token."""

    sequences: int = 0
    tokens: int = 0
    seen: int = 0
    bytes: int = 0

    def add(self, sent: InFlightRequest) -> None:
        self.sequences += sent.request.work.sequences
        self.tokens += sent.tokens
        self.seen += sent.seen
        self.bytes += sent.bytes

    def remove(self, sent: InFlightRequest) -> None:
        self.sequences -= sent.request.work.sequences
        self.tokens -= sent.tokens
        self.seen -= sent.seen
        self.bytes -= sent.bytes
