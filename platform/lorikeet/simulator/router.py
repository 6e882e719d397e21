"""The product's choice of a replica, as each gateway makes it with what it knows."""

from random import Random

from lorikeet.routing.choice import Load, Option, Work, choose
from lorikeet.routing.handful import Homes, handful
from lorikeet.simulator.fleet import Fleet
from lorikeet.simulator.replica import Replica


class LeastCost:
    """The product's: the least expected cost among a handful, as each gateway sees it."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._replicas: list[Replica] = []
        self._named: dict[str, Replica] = {}
        self._homes = Homes(())
        self._gateways: list[Gateway] = []

    def route(self, fleet: Fleet, request: int, now_s: float) -> Replica:
        """See Router."""
        setup, replicas = fleet.setup, fleet.replicas
        if self._replicas is not replicas:
            self._replicas = replicas
            self._named = {str(one.number): one for one in replicas}
            self._homes = Homes(tuple(self._named))
            self._gateways = [Gateway(setup.news_s) for _ in range(setup.gateways)]
        gateway = self._gateways[request % setup.gateways]
        adapter, prompt = fleet.adapter_of[request], fleet.prompts[request]
        if adapter < 0:
            work = Work(prompt)
            few = handful((), (), replicas, self._rng)
            options = [Option(one, gateway.load(one, now_s)) for one in few]
        else:
            work = Work(prompt, fleet.ranks[adapter], fleet.sizes[adapter])
            residents = fleet.on_gpu[adapter]
            near = fleet.on_host[adapter] or fleet.on_disk[adapter]
            if not residents and not near:
                near = [self._named[home] for home in self._homes.of(fleet.names[adapter])]
            few = handful(residents, near, replicas, self._rng)
            options = [_option(one, adapter, gateway.load(one, now_s), now_s) for one in few]
        chosen = choose(work, options, setup.costs)
        load = gateway.load(chosen, now_s)
        load.waiting += 1
        load.waiting_tokens += prompt
        return chosen


class Gateway:
    """What one gateway knows: loads as they were up to news_s ago, and what it sent since."""

    def __init__(self, news_s: float) -> None:
        self._news_s = news_s
        self._seen: dict[int, tuple[float, Load]] = {}

    def load(self, replica: Replica, now_s: float) -> Load:
        """Of the replica; the caller adds what it sends there."""
        seen = self._seen.get(replica.number)
        if seen is None or now_s >= seen[0] + self._news_s:
            now = replica.load
            copied = Load(
                now.running,
                now.ranks,
                now.waiting,
                now.waiting_tokens,
                now.loading_bytes,
                now.room_bytes,
            )
            self._seen[replica.number] = seen = now_s, copied
        return seen[1]


def _option(replica: Replica, adapter: int, load: Load, now_s: float) -> Option[Replica]:
    """Where adapters are is pushed when it changes, so a gateway knows it."""
    arriving, lost = replica.awaits(adapter), 0.0
    if not arriving and adapter not in replica.arena.residents:
        lost = replica.arena.lost_uses(adapter, now_s)
    running = adapter in replica.decoding
    return Option(replica, load, replica.tier(adapter), running, lost, arriving=arriving)
