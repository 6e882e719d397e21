"""The service as `serve_app` composes it, with paced engines and a router of choice."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ray import serve
from ray.serve.deployment import Application

from loadtest.paced_service.pacing import Pace, paced_engine
from loadtest.simulator.goals import OURS
from lorikeet.replica import replica
from lorikeet.serving.deployments import EngineReplica, controller, engine, gateway
from lorikeet.settings import Settings

ROUTERS = {
    OURS: "ScaledCosts",
    "power of two": "PowerOfTwo",
    "multiplexing": "Multiplexing",
    "bounded hashing": "BoundedHashing",
}
"""The product's router, and what serves in its place with LRU eviction and without prefetches."""


class PacedReplica(EngineReplica):
    """An EngineReplica with a paced engine."""

    def __init__(self, base_model: str, settings: Settings, pace: Pace) -> None:
        replica.build_engine = partial(paced_engine, pace)  # type: ignore[attr-defined]
        super().__init__(base_model, settings)


class UnplannedReplica(PacedReplica):
    """A PacedReplica that holds nothing but what requests ask for."""

    async def apply_plan(self, *_: Any) -> None:
        """Ignore placement decisions."""


@contextmanager
def service(
    settings: Settings, pace: Pace, router: str, options: dict[str, float]
) -> Iterator[None]:
    """Run it until the end of the block. router: a name in ROUTERS; options: what it is told."""
    (base_model,) = settings.base_models
    deployment: Any = engine(settings, base_model)._bound_deployment.options(
        func_or_class=PacedReplica if router == OURS else UnplannedReplica,
        request_router_config={
            "request_router_class": f"loadtest.paced_service.routers.{ROUTERS[router]}",
            "request_router_kwargs": options,
            "request_routing_stats_period_s": 1,
        },
        graceful_shutdown_timeout_s=1,
    )
    engines: dict[str, Application] = {base_model: deployment.bind(base_model, settings, pace)}
    serve.run(gateway(settings, engines, controller(settings, engines)))
    try:
        yield
    finally:
        serve.delete("default")
