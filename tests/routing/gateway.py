"""Gateway's view of four replicas, on a clock that tests move."""

from dataclasses import replace
from itertools import count
from random import Random

from lorikeet.protocol.messages import Work
from lorikeet.protocol.status_update import StatusUpdate
from lorikeet.routing.fleet import Fleet
from lorikeet.routing.ranking import RoutingRequest
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.telemetry.status import LiveStats

MB = 1 << 20
REF = AdapterRef("acme", "support", 1, "d" * 64)
OTHER = replace(REF, digest="e" * 64)
ASK = RoutingRequest(Work(prompt_tokens=500, rank=16, adapter_bytes=80 * MB), REF)
BASE = RoutingRequest(Work(prompt_tokens=500))
IDLE = LiveStats(free_bytes=1000 * MB, room_bytes=1000 * MB)
BUSY = replace(IDLE, decoding=60, ranks=600, waiting=40, pending_tokens=40_000)
NAMES = ("r0", "r1", "r2", "r3")


class Gateway:
    """Fleet with a clock that tests move, and replicas that number their status updates."""

    def __init__(self, names=NAMES, seed=1):
        self.now_s = 100.0
        self.fleet = Fleet(clock=lambda: self.now_s, rng=Random(seed))
        self.fleet.set_replicas(names)
        self._seq, self._requests = count(1), count()

    def receive(self, replica, live=IDLE, **rest):
        self.fleet.on_status_update(replica, StatusUpdate(next(self._seq), live, **rest))

    def receive_all(self, load=IDLE):
        for name in self.fleet.replicas:
            self.receive(name, load)

    def order(self, ask=ASK, *queue):
        return [candidate.replica for candidate in self.fleet.rank_replicas(ask, *queue)]

    def first(self, ask=ASK):
        return self.order(ask)[0]

    def firsts(self, ask=ASK, times=40):
        return {self.first(ask) for _ in range(times)}

    def send(self, replica, ask=ASK):
        request_id = f"request {next(self._requests)}"
        self.fleet.on_begun(request_id)
        self.fleet.assign(request_id, replica, ask)
        self.fleet.on_accepted(request_id, replica)
        return request_id
