"""One replica as one gateway knows it: what it said last, and what was sent to it since."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lorikeet.routing.costs import Costs
from lorikeet.routing.locations import AdapterLocations, take_one
from lorikeet.routing.ranking import Ask, Candidate, Option, RoutingStatus, lost_uses
from lorikeet.routing.status_update import StatusUpdate
from lorikeet_engine.costs import MeasuredCosts

BLIND_S = 3.0
"""A replica that was not heard for so long is judged by what this gateway itself sent there."""


@dataclass(slots=True, eq=False)
class Sent:
    """A request on its way to a replica or at work there.

    tokens: of its prompt, those that are not cached there. bytes: of its adapter if this request
    brings it to that GPU. weighed: the replicas that were considered, the best first. accepted_s:
    when the replica took it, if it did. begun: whether its first bytes have come.
    """

    ask: Ask
    replica: "KnownReplica"
    at_s: float
    tokens: int
    bytes: int
    weighed: Sequence[Candidate[str]] = ()
    accepted_s: float | None = None
    begun: bool = False


class KnownReplica:
    """Adds what this gateway sent to the stats that the replica reported before it could know.

    costs: what routing expects of it. measured: what it said of its own, if it has. streams: own
    requests that decode with each adapter.
    """

    def __init__(self, name: str, costs: Costs) -> None:
        self.name, self.costs = name, costs
        self.measured: MeasuredCosts | None = None
        self.streams: Counter[str] = Counter()
        self._update: StatusUpdate | None = None  # the newest
        self._updated_s = 0.0
        self._unheard: dict[Sent, None] = {}  # of which the update knows nothing yet, oldest first
        self._new = _Sums()  # of those
        self._own = _Sums()  # of all that have no token yet
        self._queues: Counter[str | None] = Counter()  # their tokens, by tenant
        self._running = 0
        self._ranks = 0

    def take(self, update: StatusUpdate, now_s: float, age_s: float) -> bool:
        """Take its live stats and measured costs, unless a newer update came; whether it is new.

        age_s: how long before now_s the stats may have been read.
        """
        if self._update is not None and update.seq <= self._update.seq:
            return False
        self._update, self._updated_s = update, now_s
        if update.costs is not None:
            self.measured = update.costs
        while self._unheard and (oldest := next(iter(self._unheard))).at_s <= now_s - age_s:
            self._told(oldest)
        return True

    def send(self, sent: Sent) -> None:
        """A request goes there."""
        self._unheard[sent] = None
        self._new.add(sent)
        self._own.add(sent)
        self._queues[sent.ask.tenant] += sent.tokens

    def begin(self, sent: Sent) -> None:
        """Its first bytes have come."""
        self._leave_queue(sent)
        sent.begun = True
        self._running += sent.ask.work.sequences
        if sent.ask.digest is not None:
            self._ranks += 0 if self.streams[sent.ask.digest] else sent.ask.work.rank
            self.streams[sent.ask.digest] += 1

    def end(self, sent: Sent) -> None:
        """It is over, answered or not."""
        if not sent.begun:
            self._leave_queue(sent)
            return
        self._running -= sent.ask.work.sequences
        if sent.ask.digest is not None:
            take_one(self.streams, sent.ask.digest)
            self._ranks -= 0 if self.streams[sent.ask.digest] else sent.ask.work.rank

    def option(
        self,
        ask: Ask,
        locations: AdapterLocations,
        cached_tokens: int,
        now_s: float,
        queue: int | None,
    ) -> Option[str]:
        """What it would be for a request. cached_tokens: of the prompt. queue: see status."""
        status, turn = self.status(now_s, queue), self._turn(ask.tenant)
        if (digest := ask.digest) is None:
            return Option(self.name, status, self.costs, cached_tokens=cached_tokens, turn=turn)
        return Option(
            self.name,
            status,
            self.costs,
            locations.tier(self.name, digest),
            digest in self.streams,
            self._lost_uses(ask.work.adapter_bytes),
            cached_tokens,
            self.name in locations.coming_to(digest),
            turn,
        )

    def status(self, now_s: float, queue: int | None) -> RoutingStatus:
        """What it does now. queue: the requests there, of all gateways, if that is known."""
        new, own = self._new, self._own
        if self._update is None or now_s - self._updated_s > BLIND_S:
            running = max(self._running, (queue or 0) - own.sequences)
            return RoutingStatus(running, self._ranks, own.sequences, own.tokens, own.bytes)
        live = self._update.live
        return RoutingStatus(
            live.decoding,
            live.ranks,
            live.pending + new.sequences,
            live.pending_tokens + new.tokens,
            live.loading_bytes + new.bytes,
            live.room_bytes - new.bytes,
        )

    def _turn(self, tenant: str | None) -> float:
        """What share of all that waits there comes before one more request of this tenant.

        The engine serves the tenant next that has had the least, so of each other's queue about as
        much goes before it as waits of its own. What others sent is taken to be like what this
        gateway did.
        """
        waiting = self._own.tokens
        if not waiting:
            return 1.0
        own = self._queues[tenant]
        return sum(min(tokens, own) for tokens in self._queues.values()) / waiting

    def _lost_uses(self, adapter_bytes: int) -> float:
        if self._update is None or self._update.live.victim is None:
            return 0.0
        live, victim = self._update.live, self._update.live.victim
        free_bytes = live.free_bytes - self._new.bytes
        return lost_uses(adapter_bytes, free_bytes, victim.image_bytes, victim.uses)

    def _leave_queue(self, sent: Sent) -> None:
        self._told(sent)
        self._own.take(sent)
        self._queues[sent.ask.tenant] -= sent.tokens
        if not self._queues[sent.ask.tenant]:
            del self._queues[sent.ask.tenant]

    def _told(self, sent: Sent) -> None:
        if sent in self._unheard:
            del self._unheard[sent]
            self._new.take(sent)


@dataclass(slots=True)
class _Sums:
    """Of requests that have no token yet."""

    sequences: int = 0
    tokens: int = 0
    bytes: int = 0

    def add(self, sent: Sent) -> None:
        self.sequences += sent.ask.work.sequences
        self.tokens += sent.tokens
        self.bytes += sent.bytes

    def take(self, sent: Sent) -> None:
        self.sequences -= sent.ask.work.sequences
        self.tokens -= sent.tokens
        self.bytes -= sent.bytes
