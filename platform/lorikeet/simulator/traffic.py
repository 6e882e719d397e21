"""The setup of a simulated fleet, and its requests."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lorikeet.routing.ranking import H200_LLAMA_8B, CostCoefficients
from lorikeet.simulator.workload_models import Floats, Ints

BYTES_PER_RANK = 5_242_880  # Llama-3.1-8B, all 7 linears, bf16
BASE_MODEL = -1  # among the adapters of requests


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests in order of time, [requests].

    adapters: by number, or BASE_MODEL. tenants: by number; None if all are one's.
    """

    times_s: Floats
    adapters: Ints
    prompts: Ints
    answers: Ints
    tenants: Ints | None = None

    def __len__(self) -> int:
        return len(self.times_s)


@dataclass(frozen=True, eq=False, kw_only=True)
class FleetSetup:
    """A fleet before its first request. Adapters are numbers; each disk begins full, of some.

    ranks, sizes: of each adapter, [adapters], sizes in bytes. gpu_bytes, host_bytes, disk_bytes:
    each replica's room for adapters. pins: adapter → on how many replicas it is kept on the GPU.
    gateways: routers that take turns; what each knows of replicas' status, but for what it sent
    itself, is up to status_age_s old. Nothing that comes in the first warm_up_s is counted.
    """

    replicas: int
    ranks: Ints
    sizes: Ints
    gpu_bytes: int
    host_bytes: int
    disk_bytes: int
    pins: Mapping[int, int] = field(default_factory=dict)
    gateways: int = 4
    status_age_s: float = 0.15
    warm_up_s: float = 0.0
    seed: int = 1
    costs: CostCoefficients = H200_LLAMA_8B
