"""What one gateway knows of one base model's replicas, and where it would send a request."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random
from threading import Lock
from typing import NamedTuple

from lorikeet.rendezvous import rendezvous_candidates
from lorikeet.routing.agreed import agreed_costs
from lorikeet.routing.costs import H200_LLAMA_8B, Costs
from lorikeet.routing.known_replica import KnownReplica, Sent
from lorikeet.routing.locations import AdapterLocations
from lorikeet.routing.prefixes import PrefixMap
from lorikeet.routing.ranking import Ask, Candidate, Holders, candidate_sample, rank
from lorikeet.routing.status_update import StatusUpdate
from lorikeet_engine.adapter import AdapterRef, Residency

UPDATE_AGE_S = 0.12
"""An engine reports once in a tenth of a second; then a replica passes it on."""
HEADER_AGE_S = 0.2
"""An answer's header carries what its replica had heard of its engine last."""
STATS_AGE_S = 1.2
"""Serve asks for stats every second and hands them on a little later."""
UNFETCHABLE_S = 10.0
"""For so long after an adapter could not be fetched, requests stay where theirs already is."""
LOST_S = 10.0
"""A replica that failed is tried again after so long even if nobody hears it."""
_AGREE_S = 1.0  # measured costs change slowly, and each replica speaks of its own every second


class Decision(NamedTuple):
    """Where a request was sent.

    taken_s: when that replica took it, by the fleet's clock; None: not yet. weighed: the replicas
    that were considered, the best first.
    """

    replica: str
    taken_s: float | None
    weighed: tuple[Candidate[str], ...]


def _unknown(_: str) -> int | None:
    return None


class Fleet:
    """Learns from what replicas say and from what this gateway sends them.

    Serve's router runs on another thread than the gateway's event loop, so every method holds one
    lock for as long as it runs: microseconds, but for snapshots of thousands of adapters. Nothing
    waits while it holds it. Unknown replicas and requests are left alone.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        rng: Random | None = None,
        costs: Costs = H200_LLAMA_8B,
    ) -> None:
        self._clock, self._costs = clock, costs
        self._rng = rng or Random()
        self._lock = Lock()
        self._known: dict[str, KnownReplica] = {}
        self._lost_s: dict[str, float] = {}  # since when
        self._in_order: tuple[str, ...] = ()
        self._locations = AdapterLocations()
        self._prefixes = PrefixMap()
        self._sent: dict[str, Sent | None] = {}
        self._wanted: dict[tuple[str, AdapterRef], set[str]] = {}  # the requests that wait
        self._fetching_from_s = -math.inf
        self._agreed_s = -math.inf

    @property
    def replicas(self) -> tuple[str, ...]:
        """All that Serve says exist."""
        with self._lock:
            return tuple(self._known)

    @property
    def usable(self) -> tuple[str, ...]:
        """All that are not lost; if all are, all."""
        return self._in_order

    def exist(self, replicas: Iterable[str]) -> None:
        """Serve says that these exist and no others."""
        with self._lock:
            names = tuple(replicas)
            if self._known.keys() == set(names):
                return
            for gone in self._known.keys() - set(names):
                self._locations.forget(gone)
                self._lost_s.pop(gone, None)
            self._known = {
                name: self._known.get(name) or KnownReplica(name, self._costs) for name in names
            }
            self._arrange()

    def heard(self, replica: str, update: StatusUpdate, age_s: float = UPDATE_AGE_S) -> None:
        """A replica has sent an update. age_s: how old its live stats may be."""
        with self._lock:
            known = self._known.get(replica)
            if known is None:
                return
            now_s = self._clock()
            if known.take(update, now_s, age_s) and self._lost_s.pop(replica, None) is not None:
                self._arrange()
            if update.costs is not None and now_s >= self._agreed_s + _AGREE_S:
                self._agreed_s = now_s
                self._agree()
            self._locations.take(replica, update)

    def found(self, replica: str, digest: str, tier: Residency) -> None:
        """An answer says where its adapter was when its replica took the request."""
        with self._lock:
            if replica in self._known:
                self._locations.move(replica, digest, tier)

    def lost(self, replica: str | None) -> None:
        """It did not do what it had taken: not to be asked for LOST_S, or until it speaks again."""
        with self._lock:
            if replica in self._known:
                self._lost_s[replica] = self._clock()
                self._arrange()

    def unfetchable(self, digest: str) -> bool:
        """An adapter could not be brought to a replica; whether some replica has it already.

        The store may be away, so for a while no adapter is fetched where another replica has it.
        """
        with self._lock:
            self._fetching_from_s = self._clock() + UNFETCHABLE_S
            tiers = (Residency.GPU, Residency.HOST, Residency.DISK)
            return any(self._of_use(self._locations.at(tier, digest)) for tier in tiers)

    def rank(self, ask: Ask, queue: Callable[[str], int | None] = _unknown) -> list[Candidate[str]]:
        """A few replicas, the one with the least expected cost first; none if there are none.

        queue: the requests at a replica, as far as Serve knows, at once; for those that are silent.
        """
        with self._lock:
            now_s = self._clock()
            self._try_again(now_s)
            if not self._in_order:
                return []
            cached = self._prefixes.cached_tokens(ask.prefixes)
            sample = candidate_sample(self._holders(ask.digest), self._in_order, self._rng)
            options = [
                self._known[name].option(
                    ask, self._locations, cached.get(name, 0), now_s, queue(name)
                )
                for name in dict.fromkeys([*sample, *self._of_use(cached)])
            ]
            fetchable = ask.digest is None or now_s >= self._fetching_from_s
            return rank(ask.work, options, fetchable=fetchable)

    def expect(self, request_id: str) -> None:
        """A request is about to be sent; until ended() it counts where it goes."""
        with self._lock:
            self._sent[request_id] = None

    def intend(
        self, request_id: str, replica: str, ask: Ask, weighed: Sequence[Candidate[str]] = ()
    ) -> None:
        """It goes to this replica, the best of what was weighed, unless that turns out to be full.

        A request that is intended again waits for a place; its adapter may come before it.
        """
        with self._lock:
            if request_id not in self._sent:
                return
            again, adapter = self._sent[request_id] is not None, ask.adapter
            if again and adapter and self._locations.tier(replica, adapter.digest) < Residency.GPU:
                self._wanted.setdefault((replica, adapter), set()).add(request_id)
            self._send(request_id, replica, ask, weighed)

    def accepted(self, request_id: str, replica: str) -> None:
        """The replica that took it, as Serve or its answer says; whoever says it first."""
        with self._lock:
            sent = self._sent.get(request_id)
            if sent is None or sent.accepted_s is not None:
                return
            if sent.replica.name != replica:
                self._send(request_id, replica, sent.ask, sent.weighed)
                sent = self._sent[request_id]
            if sent is not None:
                sent.accepted_s = self._clock()
                self._prefixes.add(sent.ask.prefixes, replica)

    def taker(self, request_id: str) -> str | None:
        """The replica that took a request, if one did."""
        with self._lock:
            sent = self._sent.get(request_id)
            return sent.replica.name if sent is not None and sent.accepted_s is not None else None

    def busy(self, replica: str) -> bool:
        """Whether a request was sent there that has not ended, though it may exist no more."""
        with self._lock:
            return any(sent and sent.replica.name == replica for sent in self._sent.values())

    def decision(self, request_id: str) -> Decision | None:
        """Where a request that has not ended was sent, and why; None while it waits for that."""
        with self._lock:
            sent = self._sent.get(request_id)
            if sent is None:
                return None
            return Decision(sent.replica.name, sent.accepted_s, tuple(sent.weighed))

    def begun(self, request_id: str) -> None:
        """The first bytes of its answer have come, so its adapter is on that GPU."""
        with self._lock:
            sent = self._sent.get(request_id)
            if sent is None or sent.begun:
                return
            sent.replica.begin(sent)
            name, digest = sent.replica.name, sent.ask.digest
            if digest is not None:
                self._locations.wait_no_more(name, digest)
                if name in self._known:
                    self._locations.move(name, digest, Residency.GPU)

    def ended(self, request_id: str) -> None:
        """It is over, answered or not."""
        with self._lock:
            self._take_back(request_id)
            self._sent.pop(request_id, None)

    def take_wanted(self) -> dict[str, dict[AdapterRef, int]]:
        """For each replica the adapters of requests that have waited for a place there.

        And how many requests for each, all since the call before.
        """
        with self._lock:
            waited, self._wanted = self._wanted, {}
        wanted: dict[str, dict[AdapterRef, int]] = {}
        for (replica, adapter), requests in waited.items():
            wanted.setdefault(replica, {})[adapter] = len(requests)
        return wanted

    def _agree(self) -> None:
        said = {name: known.measured for name, known in self._known.items() if known.measured}
        for name, costs in agreed_costs(said, self._costs).items():
            self._known[name].costs = costs

    def _try_again(self, now_s: float) -> None:
        """Lost replicas of long ago: a healthy one whose words are all lost would stay out."""
        again = [name for name, since_s in self._lost_s.items() if now_s - since_s >= LOST_S]
        for name in again:
            del self._lost_s[name]
        if again:
            self._arrange()

    def _arrange(self) -> None:
        found = tuple(name for name in self._known if name not in self._lost_s)
        self._in_order = found or tuple(self._known)

    def _holders(self, digest: str | None) -> Holders[str] | None:
        if digest is None:
            return None
        at, coming = self._locations.at, self._locations.coming_to(digest)
        return Holders(
            self._of_use(dict.fromkeys((*at(Residency.GPU, digest), *coming))),
            self._of_use(at(Residency.HOST, digest) or at(Residency.DISK, digest)),
            partial(rendezvous_candidates, digest, self._in_order),
        )

    def _of_use(self, names: Iterable[str]) -> list[str]:
        """Those that exist and are not lost."""
        return [name for name in names if name in self._known and name not in self._lost_s]

    def _send(
        self, request_id: str, replica: str, ask: Ask, weighed: Sequence[Candidate[str]]
    ) -> None:
        self._take_back(request_id)
        known, digest = self._known.get(replica), ask.digest
        if known is None:
            return
        brought_bytes = 0
        if digest is not None:
            if not self._locations.is_or_comes(replica, digest):
                brought_bytes = ask.work.adapter_bytes
            self._locations.wait(replica, digest)
        cached = self._prefixes.cached_tokens(ask.prefixes).get(replica, 0)
        tokens = max(1, ask.work.prompt_tokens - cached)
        sent = Sent(ask, known, self._clock(), tokens, brought_bytes, weighed)
        self._sent[request_id] = sent
        known.send(sent)

    def _take_back(self, request_id: str) -> None:
        sent = self._sent.get(request_id)
        if sent is None:
            return
        self._sent[request_id] = None
        if sent.ask.digest is not None and not sent.begun:
            self._locations.wait_no_more(sent.replica.name, sent.ask.digest)
        sent.replica.end(sent)
