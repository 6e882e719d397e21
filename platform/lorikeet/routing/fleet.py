"""Fleet: one gateway's knowledge of one base model's replicas, and their ranking per request."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random
from threading import Lock

from lorikeet.protocol.messages import Candidate
from lorikeet.protocol.status_update import StatusUpdate
from lorikeet.rendezvous import rendezvous_candidates
from lorikeet.routing.locations import AdapterLocations, PrefixIndex
from lorikeet.routing.median_costs import median_costs
from lorikeet.routing.ranking import (
    H200_LLAMA_8B,
    MOST_OFF_GPU,
    CostCoefficients,
    Holders,
    RoutingRequest,
    candidate_sample,
    rank_by_cost,
)
from lorikeet.routing.tracked_replica import (
    FETCH_PAUSE_S,
    InFlightRequest,
    RoutingDecision,
    TrackedReplica,
)
from lorikeet_engine.adapter import AdapterRef, Residency, member_digests

_lock = Lock()
_fleets: "dict[tuple[str, str], Fleet]" = {}

UPDATE_AGE_S = 0.12
"""Assumed age, in seconds, of the live stats in a status update; an engine reports ten times a
second.
"""
HEADER_AGE_S = 0.2
"""Assumed age, in seconds, of the status in an answer's header."""
STATS_AGE_S = 1.2
"""Assumed age, in seconds, of stats that Serve passes on; Serve collects stats every second."""
LOST_S = 10.0
"""Seconds after which a lost replica is used again, even if it sends no status."""
SILENT_S = 2.5
"""Seconds without a status update after which a replica is silent; engines report their status at
least every half second.
"""
RECENT_S = 1.5
"""Greatest age in seconds of a status that shows that updates of live replicas arrive."""
_COSTS_PERIOD_S = 1.0
"""Seconds between two updates of the median costs; each replica sends its costs every second."""


class Fleet:
    """Replicas of one base model, known from their status and this gateway's own requests.

    Thread-safe: every method holds one lock while it runs, for microseconds, or longer for
    snapshots of thousands of adapters.

    Events of unknown replicas and requests are ignored.

    clock: returns seconds.
    rng: source of the random candidates.
    costs: cost coefficients for replicas that have reported no measurements.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        rng: Random | None = None,
        costs: CostCoefficients = H200_LLAMA_8B,
    ) -> None:
        self._clock, self._costs = clock, costs
        self._rng = rng or Random()
        self._lock = Lock()
        self._replicas: dict[str, TrackedReplica] = {}
        self._lost_s: dict[str, float] = {}  # time of the loss, by replica
        self._all_silent_s = -math.inf  # last time when no replica's status was recent
        self._usable: tuple[str, ...] = ()
        self._locations = AdapterLocations()
        self._prefixes = PrefixIndex()
        self._in_flight: dict[str, InFlightRequest | None] = {}
        self._waiting: dict[tuple[str, AdapterRef], set[str]] = {}  # request ids
        self._costs_updated_s = -math.inf
        self._unfetchable: dict[str, float] = {}  # time of the failed load, by adapter's digest
        self._last_failure: tuple[str, float] | None = None  # digest and time; perhaps the store's

    @property
    def replicas(self) -> tuple[str, ...]:
        """All replicas that Serve lists."""
        with self._lock:
            return tuple(self._replicas)

    @property
    def usable(self) -> tuple[str, ...]:
        """Replicas that are not lost; all replicas if all are lost."""
        return self._usable

    @property
    def max_context(self) -> int | None:
        """Maximum of prompt plus output tokens that every replica accepts; None: no replica has
        reported its maximum.
        """
        with self._lock:
            told = [replica.max_context for replica in self._replicas.values()]
        return min((tokens for tokens in told if tokens is not None), default=None)

    def set_replicas(self, replicas: Iterable[str]) -> None:
        """Replace the list of existing replicas by the list that Serve sends."""
        with self._lock:
            names = tuple(replicas)
            if self._replicas.keys() == set(names):
                return
            for gone in self._replicas.keys() - set(names):
                self._locations.remove_replica(gone)
                self._prefixes.remove_replica(gone)
                self._lost_s.pop(gone, None)
            self._replicas = {
                name: self._replicas.get(name) or TrackedReplica(name, self._costs)
                for name in names
            }
            self._update_usable()

    def on_status_update(
        self, replica: str, update: StatusUpdate, age_s: float = UPDATE_AGE_S
    ) -> None:
        """Apply a replica's status update.

        age_s: assumed age of its live stats, seconds.
        """
        with self._lock:
            known = self._replicas.get(replica)
            if known is None:
                return
            now_s = self._clock()
            if known.apply(update, now_s, age_s) and self._lost_s.pop(replica, None) is not None:
                self._update_usable()
            if update.costs is not None and now_s >= self._costs_updated_s + _COSTS_PERIOD_S:
                self._costs_updated_s = now_s
                self._update_costs()
            self._locations.apply(replica, update)

    def on_adapter_found(self, replica: str, digest: str, tier: Residency) -> None:
        """Record the tier at which a replica had an adapter when it accepted a request.

        Of a composition (several adapters applied together) only the tier GPU is recorded, which
        is then that of each of its adapters.
        """
        with self._lock:
            members = member_digests(digest)
            if replica in self._replicas and (tier is Residency.GPU or len(members) == 1):
                for member in members:
                    self._locations.set_tier(replica, member, tier)

    def on_replica_lost(self, replica: str | None) -> None:
        """Mark a replica as lost: not usable until its next status, or for LOST_S seconds."""
        with self._lock:
            if replica in self._replicas:
                self._lost_s[replica] = self._clock()
                self._update_usable()

    def take_silent(self) -> dict[str, list[str]]:
        """Mark silent replicas as lost; return the ids of their requests in flight.

        A replica is silent if it sent a status before, but none in the last SILENT_S seconds. No
        replica counts as silent if at any time in these seconds all were late: then this gateway
        or the machine is slow. To be called several times a second.
        """
        with self._lock:
            now_s = self._clock()
            ages_s = {name: each.status_age_s(now_s) for name, each in self._replicas.items()}
            if min(ages_s.values(), default=math.inf) > RECENT_S:
                self._all_silent_s = now_s
            if now_s - self._all_silent_s < SILENT_S:
                return {}
            silent = {name for name, age_s in ages_s.items() if SILENT_S <= age_s < math.inf}
            if not silent:
                return {}
            self._lost_s |= dict.fromkeys(silent, now_s)
            self._update_usable()
            in_flight: dict[str, list[str]] = {name: [] for name in silent}
            for request_id, sent in self._in_flight.items():
                if sent and sent.replica.name in silent:
                    in_flight[sent.replica.name].append(request_id)
            return in_flight

    def on_load_failed(self, digest: str, full: str | None = None) -> bool:
        """Pause fetches after a failed load of an adapter; return True if another replica can serve
        the adapter.

        For FETCH_PAUSE_S seconds, requests for the adapter prefer replicas that already have it. If
        the loads of two adapters fail within that time, the object store may be unreachable: then
        requests for any adapter prefer replicas that already have it. If the cause was a full disk,
        only the replica with this disk pauses its fetches, of all adapters.

        digest: adapter that failed to load.
        full: replica whose disk is full; None: another cause, such as the store.
        """
        with self._lock:
            now_s = self._clock()
            if full is not None:
                if full in self._replicas:
                    self._replicas[full].pause_fetches(now_s)
                can_fetch = any(self._replicas[name].can_fetch(now_s) for name in self._usable)
                return can_fetch or self._is_held(digest)
            before, self._last_failure = self._last_failure, (digest, now_s)
            if before is not None and before[0] != digest and now_s - before[1] < FETCH_PAUSE_S:
                for replica in self._replicas.values():
                    replica.pause_fetches(now_s)
            self._pause_fetches_of(digest, now_s)
            return self._is_held(digest)

    def on_adapter_failed(self, digest: str) -> bool:
        """Pause fetches of one adapter that the store cannot give or that does not load; return
        True if a replica already has the adapter.
        """
        with self._lock:
            self._pause_fetches_of(digest, self._clock())
            return self._is_held(digest)

    def rank_replicas(
        self, request: RoutingRequest, queue_length: Callable[[str], int | None] = lambda _: None
    ) -> list[Candidate[str]]:
        """Return a sample of replicas, and those with a part of the prompt cached, ordered by
        expected cost; empty if there are no replicas.

        queue_length: returns Serve's count of requests at a replica, used for replicas without
            recent status.
        """
        with self._lock:
            now_s = self._clock()
            self._retry_lost(now_s)
            if not self._usable:
                return []
            cached = self._prefixes.cached_tokens(request.prefix_hashes)
            sample = candidate_sample(self._holders(request.digest), self._usable, self._rng)
            failed_s = self._unfetchable.get(request.digest or "", -math.inf)
            fetchable = now_s - failed_s >= FETCH_PAUSE_S
            options = [
                self._replicas[name].option(
                    request,
                    self._locations,
                    cached.get(name, 0),
                    now_s,
                    queue_length(name),
                    fetchable=fetchable,
                    host_tokens=self._prefixes.host_tokens(
                        request.prefix_hashes, name, cached.get(name, 0)
                    ),
                )
                for name in dict.fromkeys([*sample, *self._filter_usable(cached)])
            ]
            return rank_by_cost(request.work, options)

    def on_begun(self, request_id: str) -> None:
        """Start to track a request, until `on_ended`. The router then calls `assign` for it."""
        with self._lock:
            self._in_flight[request_id] = None

    def assign(
        self,
        request_id: str,
        replica: str,
        request: RoutingRequest,
        candidates: Sequence[Candidate[str]] = (),
    ) -> None:
        """Assign a tracked request to a replica, the best of the candidates.

        Assigning a request for a second time means that no replica had a free request slot yet. The
        request's adapter is then listed in `take_waiting_adapters`, so that the replica can load it
        in advance.

        candidates: ranked replicas, best first.
        """
        with self._lock:
            if request_id not in self._in_flight:
                return
            again, adapter = self._in_flight[request_id] is not None, request.adapter
            for member in adapter.members if again and adapter else ():
                if self._locations.tier(replica, member.digest) < Residency.GPU:
                    self._waiting.setdefault((replica, member), set()).add(request_id)
            self._assign(request_id, replica, request, candidates)

    def on_accepted(self, request_id: str, replica: str) -> None:
        """Record the replica that accepted a request; only the first call counts."""
        with self._lock:
            sent = self._in_flight.get(request_id)
            if sent is None or sent.accepted_s is not None:
                return
            if sent.replica.name != replica:
                self._assign(request_id, replica, sent.request, sent.candidates)
                sent = self._in_flight[request_id]
            if sent is not None:
                sent.accepted_s = self._clock()
                if replica in self._replicas:
                    room = sent.replica.prefix_room
                    self._prefixes.add(sent.request.prefix_hashes, replica, room)

    def accepted_by(self, request_id: str) -> str | None:
        """Return the replica that accepted a request; None if none has."""
        with self._lock:
            sent = self._in_flight.get(request_id)
            return sent.replica.name if sent is not None and sent.accepted_s is not None else None

    def has_in_flight(self, replica: str) -> bool:
        """Whether any request sent to this replica has not ended, even if the replica is gone."""
        with self._lock:
            return any(sent and sent.replica.name == replica for sent in self._in_flight.values())

    def decision(self, request_id: str) -> RoutingDecision | None:
        """Return the routing decision of a request in flight; None while it is not assigned."""
        with self._lock:
            sent = self._in_flight.get(request_id)
            return sent.decision if sent is not None else None

    def on_first_bytes(self, request_id: str) -> None:
        """Record that a request's answer has begun, which shows that its adapter is on the
        replica's GPU.
        """
        with self._lock:
            sent = self._in_flight.get(request_id)
            if sent is None or sent.has_first_byte:
                return
            sent.replica.begin_answer(sent)
            name, digest = sent.replica.name, sent.request.digest
            if digest is not None:
                self._locations.remove_waiting(name, digest)
                if name in self._replicas:
                    for member in member_digests(digest):
                        self._locations.set_tier(name, member, Residency.GPU)

    def on_ended(self, request_id: str) -> None:
        """Stop tracking a request that has ended, answered or not."""
        with self._lock:
            self._unassign(request_id)
            self._in_flight.pop(request_id, None)

    def take_waiting_adapters(self) -> dict[str, dict[AdapterRef, int]]:
        """Return the adapters of requests that have waited for a request slot since the last call.

        The result has the number of waiting requests, by replica, then by adapter.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        adapters: dict[str, dict[AdapterRef, int]] = {}
        for (replica, adapter), requests in waiting.items():
            adapters.setdefault(replica, {})[adapter] = len(requests)
        return adapters

    def _pause_fetches_of(self, digest: str, now_s: float) -> None:
        """Make replicas that lack an adapter rank last for it, for FETCH_PAUSE_S seconds."""
        recent = {
            each: failed_s
            for each, failed_s in self._unfetchable.items()
            if now_s - failed_s < FETCH_PAUSE_S
        }
        self._unfetchable = {**recent, digest: now_s}

    def _is_held(self, digest: str) -> bool:
        tier = self._locations.tier
        return any(tier(name, digest) is not Residency.REMOTE for name in self._usable)

    def _update_costs(self) -> None:
        measured = {name: each.measured for name, each in self._replicas.items() if each.measured}
        for name, costs in median_costs(measured, self._costs).items():
            self._replicas[name].costs = costs

    def _retry_lost(self, now_s: float) -> None:
        """Use lost replicas again after LOST_S seconds: a healthy replica may have lost only its
        stream of status updates.
        """
        again = [name for name, since_s in self._lost_s.items() if now_s - since_s >= LOST_S]
        for name in again:
            del self._lost_s[name]
        if again:
            self._update_usable()

    def _update_usable(self) -> None:
        usable = tuple(name for name in self._replicas if name not in self._lost_s)
        self._usable = usable or tuple(self._replicas)

    def _holders(self, digest: str | None) -> Holders[str] | None:
        if digest is None:
            return None
        at, loading = self._locations.at, self._locations.loading_on(digest)
        off_gpu = at(Residency.HOST, digest) or at(Residency.DISK, digest)
        if not off_gpu and len(member_digests(digest)) > 1:
            off_gpu = self._locations.partly_at(digest)[:MOST_OFF_GPU]
        return Holders(
            self._filter_usable(dict.fromkeys((*at(Residency.GPU, digest), *loading))),
            self._filter_usable(off_gpu),
            partial(rendezvous_candidates, digest, self._usable),
        )

    def _filter_usable(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name in self._replicas and name not in self._lost_s]

    def _assign(
        self,
        request_id: str,
        replica: str,
        request: RoutingRequest,
        candidates: Sequence[Candidate[str]],
    ) -> None:
        self._unassign(request_id)
        known, digest = self._replicas.get(replica), request.digest
        if known is None:
            return
        load_bytes = 0
        if digest is not None:
            if not self._locations.on_gpu_or_loading(replica, digest):
                new_share = self._locations.new_share(replica, digest)
                load_bytes = round(new_share * request.work.adapter_bytes)
            self._locations.add_waiting(replica, digest)
        cached = self._prefixes.cached_tokens(request.prefix_hashes).get(replica, 0)
        tokens = max(1, request.work.prompt_tokens - cached)
        sent = InFlightRequest(request, known, self._clock(), tokens, load_bytes, candidates)
        self._in_flight[request_id] = sent
        known.add(sent)

    def _unassign(self, request_id: str) -> None:
        sent = self._in_flight.get(request_id)
        if sent is None:
            return
        self._in_flight[request_id] = None
        if sent.request.digest is not None and not sent.has_first_byte:
            self._locations.remove_waiting(sent.replica.name, sent.request.digest)
        sent.replica.remove(sent)


def fleet_of(application: str, deployment: str) -> Fleet:
    """Return this process's one Fleet of a deployment, which router and gateway share.

    Created on first use. Thread-safe. Not in the router's module: Serve pickles the router's class
    by value, so that globals of its module would be copies.
    """
    name = (application, deployment)
    with _lock:
        if name not in _fleets:
            _fleets[name] = Fleet()
        return _fleets[name]
