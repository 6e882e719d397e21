"""The replicas of one base model as one gateway knows them, and their order for a request."""

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
    CostCoefficients,
    Holders,
    RoutingRequest,
    candidate_sample,
    rank_by_cost,
)
from lorikeet.routing.tracked_replica import InFlightRequest, RoutingDecision, TrackedReplica
from lorikeet_engine.adapter import AdapterRef, Residency

UPDATE_AGE_S = 0.12
"""How old the live stats of a status update are: an engine reports ten times a second."""
HEADER_AGE_S = 0.2
"""How old the status is that an answer's header carries."""
STATS_AGE_S = 1.2
"""How old the stats that Serve passes on are: it asks for them every second."""
LOST_S = 10.0
"""A lost replica is tried again after so long, even if it sends no status."""
_COSTS_PERIOD_S = 1.0  # measured costs change slowly; each replica sends its own every second


class Fleet:
    """The replicas of one base model, known from their status and from what this gateway sends.

    Serve's router runs on another thread than the gateway's event loop, so every method holds one
    lock for as long as it runs: microseconds, but for snapshots of thousands of adapters. Nothing
    waits while it holds it. What concerns unknown replicas and requests is ignored.
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
        self._lost_s: dict[str, float] = {}  # since when
        self._usable: tuple[str, ...] = ()
        self._locations = AdapterLocations()
        self._prefixes = PrefixIndex()
        self._in_flight: dict[str, InFlightRequest | None] = {}
        self._waiting: dict[tuple[str, AdapterRef], set[str]] = {}  # request ids
        self._costs_updated_s = -math.inf

    @property
    def replicas(self) -> tuple[str, ...]:
        """All replicas that Serve says exist."""
        with self._lock:
            return tuple(self._replicas)

    @property
    def usable(self) -> tuple[str, ...]:
        """The replicas that are not lost, or all if all are lost."""
        return self._usable

    def set_replicas(self, replicas: Iterable[str]) -> None:
        """Take in from Serve that these replicas exist and no others."""
        with self._lock:
            names = tuple(replicas)
            if self._replicas.keys() == set(names):
                return
            for gone in self._replicas.keys() - set(names):
                self._locations.remove_replica(gone)
                self._lost_s.pop(gone, None)
            self._replicas = {
                name: self._replicas.get(name) or TrackedReplica(name, self._costs)
                for name in names
            }
            self._update_usable()

    def on_status_update(
        self, replica: str, update: StatusUpdate, age_s: float = UPDATE_AGE_S
    ) -> None:
        """Take in a replica's update. age_s: how old its live stats may be."""
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
        """Take in from an answer where its adapter was when its replica took the request."""
        with self._lock:
            if replica in self._replicas:
                self._locations.set_tier(replica, digest, tier)

    def on_replica_lost(self, replica: str | None) -> None:
        """Send nothing to a replica that failed a request, for LOST_S or until its next status."""
        with self._lock:
            if replica in self._replicas:
                self._lost_s[replica] = self._clock()
                self._update_usable()

    def on_load_failed(self, digest: str, full: str | None = None) -> bool:
        """Take in that a replica could not load an adapter; return whether another one may.

        The store may be away, so for a while requests go to replicas that have their adapter;
        only from the replica named `full` if its disk is the cause.
        """
        with self._lock:
            now_s, tier = self._clock(), self._locations.tier
            for name, replica in self._replicas.items():
                if full in (None, name):  # a full one that is gone is no news of the others
                    replica.pause_fetches(now_s)
            have = any(tier(name, digest) is not Residency.REMOTE for name in self._usable)
            return have or any(self._replicas[name].can_fetch(now_s) for name in self._usable)

    def rank_replicas(
        self, request: RoutingRequest, queue_length: Callable[[str], int | None] = lambda _: None
    ) -> list[Candidate[str]]:
        """A few replicas, the one with the least expected cost first; none if there are none.

        queue_length: the requests at a replica as Serve knows them, for one without recent status.
        """
        with self._lock:
            now_s = self._clock()
            self._retry_lost(now_s)
            if not self._usable:
                return []
            cached = self._prefixes.cached_tokens(request.prefix_hashes)
            sample = candidate_sample(self._holders(request.digest), self._usable, self._rng)
            options = [
                self._replicas[name].option(
                    request, self._locations, cached.get(name, 0), now_s, queue_length(name)
                )
                for name in dict.fromkeys([*sample, *self._filter_usable(cached)])
            ]
            return rank_by_cost(request.work, options)

    def on_begun(self, request_id: str) -> None:
        """Count a request from here until on_ended; the router will `assign` it to a replica."""
        with self._lock:
            self._in_flight[request_id] = None

    def assign(
        self,
        request_id: str,
        replica: str,
        request: RoutingRequest,
        candidates: Sequence[Candidate[str]] = (),
    ) -> None:
        """Send a tracked request to this replica, the best candidate, unless it proves to be full.

        A request that is assigned again waits for room; its adapter may be loaded before it.
        """
        with self._lock:
            if request_id not in self._in_flight:
                return
            again, adapter = self._in_flight[request_id] is not None, request.adapter
            if again and adapter and self._locations.tier(replica, adapter.digest) < Residency.GPU:
                self._waiting.setdefault((replica, adapter), set()).add(request_id)
            self._assign(request_id, replica, request, candidates)

    def on_accepted(self, request_id: str, replica: str) -> None:
        """Take in which replica took a request, as Serve or the answer says, whichever is first."""
        with self._lock:
            sent = self._in_flight.get(request_id)
            if sent is None or sent.accepted_s is not None:
                return
            if sent.replica.name != replica:
                self._assign(request_id, replica, sent.request, sent.candidates)
                sent = self._in_flight[request_id]
            if sent is not None:
                sent.accepted_s = self._clock()
                self._prefixes.add(sent.request.prefix_hashes, replica)

    def accepted_by(self, request_id: str) -> str | None:
        """The replica that took a request, if one did."""
        with self._lock:
            sent = self._in_flight.get(request_id)
            return sent.replica.name if sent is not None and sent.accepted_s is not None else None

    def has_in_flight(self, replica: str) -> bool:
        """Whether a request sent to this replica has not ended; the replica may be gone."""
        with self._lock:
            return any(sent and sent.replica.name == replica for sent in self._in_flight.values())

    def decision(self, request_id: str) -> RoutingDecision | None:
        """Where a request that has not ended was sent, and why; None while it is not assigned."""
        with self._lock:
            sent = self._in_flight.get(request_id)
            return sent.decision if sent is not None else None

    def on_first_bytes(self, request_id: str) -> None:
        """Take in that an answer has begun, so that its adapter is on that GPU."""
        with self._lock:
            sent = self._in_flight.get(request_id)
            if sent is None or sent.has_first_byte:
                return
            sent.replica.begin_answer(sent)
            name, digest = sent.replica.name, sent.request.digest
            if digest is not None:
                self._locations.remove_waiting(name, digest)
                if name in self._replicas:
                    self._locations.set_tier(name, digest, Residency.GPU)

    def on_ended(self, request_id: str) -> None:
        """Forget a request that is over, answered or not."""
        with self._lock:
            self._unassign(request_id)
            self._in_flight.pop(request_id, None)

    def take_waiting_adapters(self) -> dict[str, dict[AdapterRef, int]]:
        """Return, by replica, the adapters of requests that wait for room there, and how many wait.

        All since the previous call.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        adapters: dict[str, dict[AdapterRef, int]] = {}
        for (replica, adapter), requests in waiting.items():
            adapters.setdefault(replica, {})[adapter] = len(requests)
        return adapters

    def _update_costs(self) -> None:
        measured = {name: each.measured for name, each in self._replicas.items() if each.measured}
        for name, costs in median_costs(measured, self._costs).items():
            self._replicas[name].costs = costs

    def _retry_lost(self, now_s: float) -> None:
        """Use lost replicas again after LOST_S: a healthy one may have lost only its feed."""
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
        return Holders(
            self._filter_usable(dict.fromkeys((*at(Residency.GPU, digest), *loading))),
            self._filter_usable(at(Residency.HOST, digest) or at(Residency.DISK, digest)),
            partial(rendezvous_candidates, digest, self._usable),
        )

    def _filter_usable(self, names: Iterable[str]) -> list[str]:
        """The replicas among these that exist and are not lost."""
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
                load_bytes = request.work.adapter_bytes
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
