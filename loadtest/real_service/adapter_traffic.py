"""One replica with many adapters, and requests that ask for them as a service's users do.

What the programs do alike that measure goodput, overload and a busy host: arguments, settings, a
service whose adapters have all been asked for, and requests as a Poisson process, whose lengths are
the Azure conversation trace's and whose adapters fall by Zipf's law.
"""

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from loadtest.client import Server, Session, run_sessions
from loadtest.cluster import PROXIES
from loadtest.real_service.adapters import AdapterWeights, fill_catalog, model_name
from loadtest.real_service.random_models import (
    LINEARS,
    SHAPES,
    add_model_arguments,
    settings_of_model,
)
from loadtest.real_service.service import service
from loadtest.report import all_whole
from loadtest.streamed_answer import LoadRequest
from lorikeet.settings import Settings
from lorikeet.simulator.workload_models import (
    AZURE_CONV,
    RANKS,
    Floats,
    Ints,
    Zipf,
    cut_to_context,
    deal_ranks,
    poisson,
)

_WARM_STREAMS = 64
_NONE: Floats = np.zeros(0)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Who asks for what. order: adapters, the most popular first. temperature: of each answer.

    lengths: how many, the same whatever the seed, are dealt round, so that as many tokens are asked
    for in one run as in another; None: each request has its own.
    """

    order: Ints
    context: int
    temperature: float = 0.0
    lengths: int | None = None

    def sessions(
        self, rate_per_s: float, seconds: float, seed: int, more_at_s: Floats = _NONE
    ) -> list[Session]:
        """Requests that arrive at this rate; other ones for each seed.

        more_at_s: when others arrive beside them, seconds from the start.
        """
        rng = np.random.default_rng(seed)
        times_s = np.sort(np.concatenate([poisson(rate_per_s).times(rng, seconds), more_at_s]))
        inputs, outputs = self._lengths(rng, len(times_s))
        ranks = Zipf(1.0).draw(rng, len(self.order), len(times_s))
        seeds = rng.integers(0, 2**62, len(times_s)).tolist()
        requests = [
            LoadRequest(
                model_name(int(self.order[rank])), int(prompt), int(answer), each, self.temperature
            )
            for rank, prompt, answer, each in zip(ranks, inputs, outputs, seeds, strict=True)
        ]
        return [
            Session(float(at_s), (request,))
            for at_s, request in zip(times_s, requests, strict=True)
        ]

    def _lengths(self, rng: np.random.Generator, requests: int) -> tuple[Ints, Ints]:
        if self.lengths is None:
            return cut_to_context(*AZURE_CONV.draw(rng, requests), self.context)
        drawn = AZURE_CONV.draw(np.random.default_rng(0), self.lengths)
        inputs, outputs = cut_to_context(*drawn, self.context)
        return np.resize(inputs, requests), np.resize(outputs, requests)

    def warm_up(self) -> list[Session]:
        """Every adapter once, the most popular ones last."""
        requests = [LoadRequest(model_name(int(a)), 8, 2, int(a)) for a in reversed(self.order)]
        return [Session(0.0, tuple(requests[at::_WARM_STREAMS])) for at in range(_WARM_STREAMS)]


def add_traffic_arguments(parser: argparse.ArgumentParser, adapters: int, seconds: float) -> None:
    """Ask for what settings_of_traffic and warm_service take. adapters, seconds: the defaults."""
    add_model_arguments(parser, kv="40GiB")
    add = parser.add_argument
    add("--adapters", type=int, default=adapters, help=f"default {adapters}")
    add("--ranks", type=int, nargs="+", default=list(RANKS), help="dealt round")
    add("--linears", nargs="+", choices=LINEARS, default=list(LINEARS[:4]), metavar="LINEAR")
    add("--context", type=int, default=2048, help="most tokens of prompt and answer; 2048")
    add("--temperature", type=float, default=0.0, help="at which answers are sampled; 0: greedy")
    add("--seconds", type=float, default=seconds, help=f"of arrivals each time; {seconds:g}")
    add("--gateways", type=int, default=4, help="default 4")
    add("--clients", type=int, default=4, help="processes that ask; default 4")
    add("--proxy", choices=PROXIES, default="HAProxy")
    add("--gpu", default="12GiB", help="memory for adapters on the GPU; default 12GiB")
    add("--host", default="24GiB", help="and on the host; default 24GiB")
    add("--disk", default="48GiB", help="and on the disk; default 48GiB")


def settings_of_traffic(given: argparse.Namespace, own: str, **others: object) -> dict[str, str]:
    """settings_of_model's, with what add_traffic_arguments asked for."""
    return settings_of_model(
        given,
        own,
        replicas=1,
        gateways=given.gateways,
        max_context=given.context,
        adapter_gpu_memory=given.gpu,
        adapter_host_memory=given.host,
        adapter_disk=given.disk,
        **others,
    )


@contextmanager
def warm_service(
    given: argparse.Namespace, variables: Mapping[str, str]
) -> Iterator[tuple[Server, Traffic]]:
    """Run a service with these settings, all of whose adapters have been asked for once."""
    ranks = deal_ranks(given.adapters, given.ranks).tolist()
    stock = fill_catalog(Settings.from_env(variables), ranks, AdapterWeights(given.linears))
    order = np.random.default_rng(0).permutation(given.adapters)
    traffic = Traffic(order, given.context, given.temperature)
    with service(variables, given.proxy) as running:
        server = Server(running.url, stock.key, SHAPES[given.shape]["vocab_size"])
        all_whole(run_sessions(server, traffic.warm_up(), given.clients))
        yield server, traffic
