"""One replica as one gateway knows it: its last status, and the requests sent to it since.

`TrackedReplica.costs` has the replica's seconds for steps (`StepCosts`) and adapter loads
(`LoadCosts`), which `expected_cost` in ranking.py applies.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lorikeet.protocol.messages import Candidate
from lorikeet.protocol.status_update import PrefixRoom, StatusUpdate
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
"""Seconds after a failed load during which a replica ranks last for adapters that it lacks."""
STALE_S = 3.0
"""Age in seconds beyond which a status is ignored; this gateway's own requests then show
the load.
"""


class RoutingDecision(NamedTuple):
    """Replica to which a request was sent, and the candidates it was chosen from.

    accepted_s: time when the replica accepted the request, by the fleet's clock; None: not yet.
    candidates: ranked replicas, best first.
    """

    replica: str
    accepted_s: float | None
    candidates: tuple[Candidate[str], ...]


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """Request that was sent to a replica and has not ended.

    sent_s: time of its assignment, by the fleet's clock.
    tokens: prompt tokens that are not cached at the replica.
    bytes: size of its adapter if this request causes the load to the GPU, else 0.
    candidates: ranked replicas, best first.
    accepted_s: time when the replica accepted the request; None: not yet.
    has_first_byte: whether its answer has begun.
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
        """Number of pairs of an uncached prompt token and a token that it attends to."""
        return seen_tokens(self.tokens, self.request.work.prompt_tokens - self.tokens)

    @property
    def decision(self) -> RoutingDecision:
        """Routing decision that sent the request to this replica."""
        return RoutingDecision(self.replica.name, self.accepted_s, tuple(self.candidates))


class TrackedReplica:
    """Replica's reported stats plus the requests that this gateway sent after the report.

    costs: coefficients that routing uses for the replica.
    measured: costs that the replica reported; None: none yet.
    max_context: reported maximum of prompt plus output tokens; None: not reported yet.
    prefix_room: reported room for cached prefixes; None: not reported yet.
    decoding: number of this gateway's decoding requests, by adapter digest.
    """

    def __init__(self, name: str, costs: CostCoefficients) -> None:
        self.name, self.costs = name, costs
        self.measured: MeasuredCosts | None = None
        self.max_context: int | None = None
        self.prefix_room: PrefixRoom | None = None
        self.decoding: Counter[str] = Counter()
        self._update: StatusUpdate | None = None  # the newest
        self._updated_s = 0.0
        self._unreported: dict[InFlightRequest, None] = {}  # not in the update yet, oldest first
        self._new = _Totals()  # over _unreported
        self._own = _Totals()  # over all own requests without a first token
        self._fetch_paused_until_s = -math.inf
        self._tenant_tokens: Counter[str | None] = Counter()  # waiting, by tenant
        self._running = 0
        self._ranks = 0

    def apply(self, update: StatusUpdate, now_s: float, age_s: float) -> bool:
        """Apply a status update and return True; return False and ignore it if a newer one was
        applied before.

        now_s: time of arrival, by the fleet's clock.
        age_s: assumed age of the stats at now_s, seconds.
        """
        if self._update is not None and update.seq <= self._update.seq:
            return False
        self._update, self._updated_s = update, now_s
        if update.costs is not None:
            self.measured = update.costs
        if update.max_context is not None:
            self.max_context = update.max_context
        if update.prefix_room is not None:
            self.prefix_room = update.prefix_room
        while self._unreported and (oldest := next(iter(self._unreported))).sent_s <= now_s - age_s:
            self._mark_reported(oldest)
        return True

    def status_age_s(self, now_s: float) -> float:
        """Return the seconds since the last status update; infinity before the first update."""
        return now_s - self._updated_s if self._update is not None else math.inf

    def add(self, sent: InFlightRequest) -> None:
        """Count a request that is sent to the replica."""
        self._unreported[sent] = None
        self._new.add(sent)
        self._own.add(sent)
        self._tenant_tokens[sent.request.tenant] += sent.tokens

    def begin_answer(self, sent: InFlightRequest) -> None:
        """Move a request from waiting to decoding, at the first bytes of its answer."""
        self._leave_queue(sent)
        sent.has_first_byte = True
        self._running += sent.request.work.sequences
        if sent.request.digest is not None:
            self._ranks += 0 if self.decoding[sent.request.digest] else sent.request.work.rank
            self.decoding[sent.request.digest] += 1

    def remove(self, sent: InFlightRequest) -> None:
        """Stop counting a request that has ended, answered or not."""
        if not sent.has_first_byte:
            self._leave_queue(sent)
            return
        self._running -= sent.request.work.sequences
        if sent.request.digest is not None:
            decrement(self.decoding, sent.request.digest)
            self._ranks -= 0 if self.decoding[sent.request.digest] else sent.request.work.rank

    def pause_fetches(self, now_s: float) -> None:
        """Make the replica rank last for adapters that it lacks, for FETCH_PAUSE_S seconds from
        now.
        """
        self._fetch_paused_until_s = now_s + FETCH_PAUSE_S

    def can_fetch(self, now_s: float) -> bool:
        """Whether the replica is expected to be able to fetch an adapter that it lacks."""
        return now_s >= self._fetch_paused_until_s

    def option(
        self,
        request: RoutingRequest,
        locations: AdapterLocations,
        cached_tokens: int,
        now_s: float,
        queue_length: int | None,
        *,
        fetchable: bool = True,
        host_tokens: int = 0,
    ) -> ReplicaOption[str]:
        """Return the replica as an option for a request.

        locations: adapters of all replicas.
        cached_tokens: prompt tokens that the replica has computed before.
        queue_length: Serve's count of all gateways' requests at the replica, used if the last
            status is stale; None: unknown.
        fetchable: whether any replica is expected to be able to fetch the request's adapter.
        host_tokens: those of the cached tokens that only the replica's host has.
        """
        room = self.prefix_room
        host_bytes = host_tokens * room.host_token_bytes if room is not None else 0
        status, queue_share = self.status(now_s, queue_length), self._queue_share(request.tenant)
        if (digest := request.digest) is None:
            return ReplicaOption(
                self.name,
                status,
                self.costs,
                cached_tokens=cached_tokens,
                queue_share=queue_share,
                host_tokens=host_tokens,
                host_bytes=host_bytes,
            )
        new_share = locations.new_share(self.name, digest)
        return ReplicaOption(
            self.name,
            status,
            self.costs,
            locations.tier(self.name, digest),
            digest in self.decoding,
            self._evicted_uses(round(new_share * request.work.adapter_bytes)),
            cached_tokens,
            self.name in locations.loading_on(digest),
            queue_share,
            fetchable and self.can_fetch(now_s),
            new_share,
            host_tokens,
            host_bytes,
        )

    def status(self, now_s: float, queue_length: int | None) -> RoutingStatus:
        """Return the replica's estimated load now.

        queue_length: Serve's count of all gateways' requests at the replica, used if the last
            status is stale; None: unknown.
        """
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
        """Return the fraction of waiting prompt tokens that go before a tenant's new request.

        The engine serves the tenant that has had the fewest tokens: from every other tenant's
        queue, about as many tokens go first as this tenant has waiting. Other gateways' requests
        are assumed to be distributed over tenants like this gateway's.
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
    """Totals over a set of requests without a first token.

    tokens: prompt tokens that are not cached at the replica.
    seen: number of pairs of such a token and a token that it attends to.
    bytes: size of the adapters whose loads to the GPU these requests cause.
    """

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
