"""A fleet before its first request: what it has, and what it is to serve."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lorikeet.routing.costs import H200_LLAMA_8B, Costs
from lorikeet_engine.popularity import Ints


@dataclass(frozen=True, eq=False, kw_only=True)
class Setup:
    """Adapters are numbers; each disk begins full, of some.

    ranks, sizes: of each adapter, [adapters], sizes in bytes. gpu_bytes, host_bytes, disk_bytes:
    each replica's room for adapters. pins: adapter → on how many replicas it is kept on the GPU.
    gateways: routers that take turns; what each knows of replicas' loads, but for what it sent
    itself, is up to news_s old. Nothing that comes in the first warm_up_s is counted.
    """

    replicas: int
    ranks: Ints
    sizes: Ints
    gpu_bytes: int
    host_bytes: int
    disk_bytes: int
    pins: Mapping[int, int] = field(default_factory=dict)
    gateways: int = 4
    news_s: float = 0.15
    warm_up_s: float = 0.0
    seed: int = 1
    costs: Costs = H200_LLAMA_8B
