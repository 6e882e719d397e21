"""Service of one replica with many adapters, and realistic requests for the adapters.

Shared by bench_goodput and bench_overload: arguments, settings, a service whose adapters have all
been requested once, and Poisson arrivals with lengths of the Azure conversation trace and adapters
chosen by Zipf's law.
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
    """Distribution of requests over adapters and lengths.

    order: adapters, the most popular first.
    context: maximum number of tokens of a prompt plus its answer.
    temperature: sampling temperature of each answer.
    lengths: size of a fixed set of lengths, independent of the seed, that is dealt round, so that
        runs request equal numbers of tokens; None: lengths are drawn for each request.
    """

    order: Ints
    context: int
    temperature: float = 0.0
    lengths: int | None = None

    def sessions(
        self, rate_per_s: float, seconds: float, seed: int, more_at_s: Floats = _NONE
    ) -> list[Session]:
        """Draw requests that arrive at a rate; each seed gives different requests.

        seconds: length of the run.
        more_at_s: arrival times of further requests, in seconds from the start.
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
        """Return one request for each adapter, the most popular last."""
        requests = [LoadRequest(model_name(int(a)), 8, 2, int(a)) for a in reversed(self.order)]
        return [Session(0.0, tuple(requests[at::_WARM_STREAMS])) for at in range(_WARM_STREAMS)]


def add_traffic_arguments(parser: argparse.ArgumentParser, adapters: int, seconds: float) -> None:
    """Add the arguments that `settings_of_traffic` and `warm_service` read.

    adapters, seconds: defaults of the arguments of these names.
    """
    add_model_arguments(parser, kv="40GiB")
    add = parser.add_argument
    add("--adapters", type=int, default=adapters, help=f"number of adapters; default {adapters}")
    add(
        "--ranks",
        type=int,
        nargs="+",
        default=list(RANKS),
        help="ranks, dealt round over the adapters",
    )
    add("--linears", nargs="+", choices=LINEARS, default=list(LINEARS[:4]), metavar="LINEAR")
    add(
        "--context",
        type=int,
        default=2048,
        help="most tokens of a prompt and its answer; default 2048",
    )
    add("--temperature", type=float, default=0.0, help="sampling temperature; 0: greedy")
    add("--seconds", type=float, default=seconds, help=f"seconds of arrivals; default {seconds:g}")
    add("--gateways", type=int, default=4, help="number of gateways; default 4")
    add("--clients", type=int, default=4, help="client processes; default 4")
    add("--proxy", choices=PROXIES, default="HAProxy")
    add("--gpu", default="12GiB", help="memory for adapters on the GPU; default 12GiB")
    add("--host", default="24GiB", help="memory for adapters on the host; default 24GiB")
    add("--disk", default="48GiB", help="space for adapters on the disk; default 48GiB")


def settings_of_traffic(given: argparse.Namespace, own: str, **others: object) -> dict[str, str]:
    """Return the LORIKEET_ variables for the options of `add_traffic_arguments` and of the model.

    given: options of the command line.
    own, others: as in `settings_of_model`.
    """
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
    """Run a service with these settings, after one request for every adapter."""
    ranks = deal_ranks(given.adapters, given.ranks).tolist()
    stock = fill_catalog(Settings.from_env(variables), ranks, AdapterWeights(given.linears))
    order = np.random.default_rng(0).permutation(given.adapters)
    traffic = Traffic(order, given.context, given.temperature)
    with service(variables, given.proxy) as running:
        server = Server(running.url, stock.key, SHAPES[given.shape]["vocab_size"])
        all_whole(run_sessions(server, traffic.warm_up(), given.clients))
        yield server, traffic
