"""Ray Serve deployments of engines, controller and gateway, wrapped around plain classes."""

import asyncio
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from ray import serve
from ray.serve.config import BackpressureConfig
from ray.serve.deployment import Application
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from lorikeet.apis.errors import TINKER
from lorikeet.batch_store import BatchStore
from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.kept_view import KeptView
from lorikeet.catalog.store.object_store import ObjectStore, open_store
from lorikeet.errors import InvalidSetting, LorikeetError, StoreError, StoreRefused
from lorikeet.file_store import FileStore
from lorikeet.gateway.app import create_app
from lorikeet.gateway.audit import AuditStream
from lorikeet.gateway.call_encoders import read_encoders
from lorikeet.gateway.http_protocol import BoundedHttpProtocol
from lorikeet.gateway.listeners import AdminListener, PublicListener
from lorikeet.gateway.services import Services, read_base_models
from lorikeet.gateway.vllm.requests import PATHS as VLLM_PATHS
from lorikeet.logs import log_to_stderr
from lorikeet.metrics.gateway import GatewayMetrics
from lorikeet.replica.engine_settings import adapter_memory, device_of
from lorikeet.replica.replica import Replica
from lorikeet.response_store import ResponseStore
from lorikeet.retry_after import FULL_PROXY_S
from lorikeet.serving.autoscaling import autoscaling
from lorikeet.serving.controller import Controller
from lorikeet.serving.engine_client import ServeEngineClient
from lorikeet.serving.freed_memory import trim_freed_memory
from lorikeet.serving.peers import ServePeers
from lorikeet.serving.replica_calls import broadcast_all
from lorikeet.settings import Settings
from lorikeet.usage.month_usage import MonthUsage
from lorikeet_engine.adapter_format import AdapterLimits, AdapterMemory
from lorikeet_engine.errors import EngineClosed, EngineError

if TYPE_CHECKING:  # their libraries are imported only where they are switched on
    from lorikeet.gateway.oidc_tokens import OidcTokens
    from lorikeet.tracing.exporter import TraceExporter

log = logging.getLogger(__name__)

_LONGEST_GENERATION_S = 600
"""Seconds that a draining replica or gateway may take to finish its streams."""
_OTHER_REQUESTS = 256
"""Limit on a gateway's concurrent requests that are not generations.

These requests have slots of their own, so that a flood of generations does not block them.
"""
_HEALTH_CHECKS = 64
"""Number of these slots that only health checks can use, so that no flood of other requests blocks
health checks.
"""
_CONTROL_CALLS = 8
"""Limit on the concurrent control calls to a replica, such as plans and reports; streams are not
counted.
"""
_ENGINE_CPUS = 0.2  # a share, so that engines, gateway and controller fit on a laptop's two cores
_GATEWAY_CPUS = 0.2
_CONTROLLER_CPUS = 0.05
_NO_ACCESS_LOG = {"enable_access_log": False}
"""Option that turns Serve's access log off.

Serve buffers a thousand lines of it, and writing them blocks for 14 ms.
"""
_SWITCH_INTERVAL_S = 0.5e-3
"""Seconds that a thread keeps the GIL while others want it; Python's default is 5 ms.

Event loops of replicas and gateways wait that long for a busy thread. Parsing a large adapter's
header keeps a gateway's thread busy for 6 ms.
"""


def engine(settings: Settings, base_model: str) -> Application:
    """Return the deployment of one base model's engines: each replica runs one engine.

    A replica reserves `tensor_parallel` GPUs, or none on the CPU.
    """
    deployment = serve.deployment(
        name=f"engine-{base_model}",
        max_ongoing_requests=settings.max_ongoing_requests
        + _batch_lines(settings)
        + 2 * settings.gateways
        + _CONTROL_CALLS,
        ray_actor_options={"num_cpus": _ENGINE_CPUS, "num_gpus": _gpus(settings, base_model)},
        logging_config=_NO_ACCESS_LOG,
        request_router_config={
            "request_router_class": "lorikeet.serving.request_router.AdapterAffinityRouter",
            "request_routing_stats_period_s": 1,
        },
        health_check_period_s=2,
        graceful_shutdown_timeout_s=_LONGEST_GENERATION_S,
        **_replica_options(settings.replicas[base_model], settings.most_replicas(base_model)),
    )(EngineReplica)
    return deployment.bind(base_model, settings)


def reserved_resources(settings: Settings) -> dict[str, float]:
    """Return the CPUs and GPUs that all deployments reserve at the start, by Ray's names."""
    engines = sum(settings.replicas.values())
    cpus = _ENGINE_CPUS * engines + _GATEWAY_CPUS * settings.gateways + _CONTROLLER_CPUS
    gpus = sum(count * _gpus(settings, name) for name, count in settings.replicas.items())
    return {"CPU": cpus, "GPU": gpus}


def _gpus(settings: Settings, base_model: str) -> int:
    """Return the number of GPUs that a replica reserves."""
    return settings.tensor_parallel[base_model] if device_of(settings) == "cuda" else 0


def _replica_options(min_replicas: int, max_replicas: int) -> dict[str, Any]:
    if max_replicas == min_replicas:
        return {"num_replicas": min_replicas}
    return {"autoscaling_config": autoscaling(min_replicas, max_replicas)}


def controller(settings: Settings, engines: Mapping[str, Application]) -> Application:
    """Return the deployment of the controller, with one replica.

    engines: deployment of the engines of each base model.
    """
    deployment = serve.deployment(
        name="controller",
        num_replicas=1,
        ray_actor_options={"num_cpus": _CONTROLLER_CPUS},
        health_check_period_s=2,
    )(Controller)
    return deployment.bind(settings, engines)


def gateway(
    settings: Settings, engines: Mapping[str, Application], controller: Application
) -> Application:
    """Return the deployment of the HTTP gateways.

    engines: deployment of the engines of each base model.
    controller: bound so that Serve deploys the controller too; no request uses it.
    """
    deployment = serve.deployment(
        name="gateway",
        num_replicas=settings.gateways,
        max_surge_percent=100,  # start new gateways before old ones drain: there may be only one
        max_ongoing_requests=_most_requests(settings) + _HEALTH_CHECKS,
        # A proxy queues as many requests as all gateways take: a burst passes, a flood is refused.
        max_queued_requests=_most_generations(settings) * settings.gateways,
        backpressure_config=BackpressureConfig(retry_after_s=FULL_PROXY_S),
        ray_actor_options={"num_cpus": _GATEWAY_CPUS},
        logging_config=_NO_ACCESS_LOG,
        graceful_shutdown_timeout_s=_LONGEST_GENERATION_S,
    )(serve.ingress()(Gateway))
    return deployment.bind(settings, adapter_memory(settings), engines, controller)


class EngineReplica(Replica):
    """Replica named by Serve. It ends its process when its engine is broken.

    Ending the process sends waiting requests to other replicas at once; Serve would leave them
    waiting.
    """

    def __init__(self, base_model: str, settings: Settings) -> None:
        log_to_stderr()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        name = serve.get_replica_context().replica_id.unique_id
        with _failure_logged("engine", base_model):
            super().__init__(name, base_model, settings)
        log.info("engine_ready", extra={"replica": name, "base_model": base_model})

    def check_health(self) -> None:
        """End the process if the engine is broken."""
        try:
            super().check_health()
        except RuntimeError as error:
            self._exit(error)

    def engine_ended(self, error: EngineClosed) -> None:
        """End the process; gateways then fail the answers that have begun, and send the other calls
        to other replicas.
        """
        self._exit(error)

    def __del__(self) -> None:
        """Close the replica; Serve calls this in an orderly shutdown."""
        if hasattr(self, "_metering"):  # __init__ succeeded
            self.close()

    def _exit(self, error: Exception) -> NoReturn:
        log.critical("replica_ends", extra={"replica": self.name, "error": str(error)})
        os._exit(1)


class Gateway:
    """Gateway replica: builds the services that the HTTP API uses."""

    def __init__(
        self,
        settings: Settings,
        adapter_memory: AdapterMemory,
        engines: Mapping[str, DeploymentHandle[Any]],
        controller: DeploymentHandle[Any],
    ) -> None:
        log_to_stderr()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        here = serve.get_replica_context()
        name = here.replica_id.unique_id
        self._most_requests = _most_requests(settings)
        self._peers = ServePeers(here.app_name, here.deployment, name)
        with _failure_logged("gateway", settings.catalog):
            store = open_store(settings.catalog)
            kept_view = KeptView(settings.cache_dir, store.url)
            self._services = Services(
                catalog=_open_catalog(store, kept_view),
                base_models=read_base_models(settings),
                limits=AdapterLimits(
                    settings.max_rank, settings.max_adapter_bytes, settings.max_added_tokens
                ),
                engines=ServeEngineClient(engines, name),
                encoders=read_encoders(settings),
                gateways=settings.gateways,
                max_open_requests=_most_generations(settings),
                adapter_memory=adapter_memory,
                name=name,
                peers=self._peers,
                recorded_usage=MonthUsage(store),
                prices=settings.prices,
                usage_flush_s=settings.usage_flush_s,
                max_queue_s=settings.max_queue_s,
                max_running=_max_running(settings),
                traces=_traces(settings, name),
                metrics=GatewayMetrics(settings.gateways),
                kept_view=kept_view,
                push_folder=settings.cache_dir / "pushes",
                metrics_pages=partial(broadcast_all, [*engines.values(), controller], "metrics"),
                responses=_responses(settings, store),
                audit=_audit(settings, name),
                oidc=_oidc(settings),
                files=_files(settings, store),
                batches=_batches(settings, store),
                load_from=settings.load_from,
                tinker=settings.tinker,
            )
            self._trim = asyncio.create_task(trim_freed_memory())
            BoundedHttpProtocol.limit_connections(settings.max_connections)
            self._admin_listener = AdminListener(settings.admin_address)

    async def answer_peer(self, asker: str, question: str, *arguments: Any) -> list[Any]:
        """Return the answer to another gateway's question in a list; [] if this gateway asked.

        asker: name of the gateway that asks.
        question: name under which the question's handler is registered.
        arguments: arguments of the handler.
        """
        return await self._peers.answer_peer(asker, question, *arguments)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        app = create_app(self._services)
        self._admin_listener.open_with(app)
        paths = frozenset() if self._services.load_from is None else VLLM_PATHS
        below = (TINKER,) if self._services.tinker else ()
        return PublicListener(app, self._most_requests, paths, below)


def _responses(settings: Settings, store: ObjectStore) -> ResponseStore | None:
    if settings.responses_lifetime_h is None:
        return None
    return ResponseStore(store, 3600.0 * settings.responses_lifetime_h, time.time)


def _audit(settings: Settings, gateway: str) -> AuditStream | None:
    if settings.audit_log is None:
        return None
    try:
        return AuditStream(settings.audit_log, gateway)
    except OSError as error:
        raise InvalidSetting(
            f"LORIKEET_AUDIT_LOG={settings.audit_log}: the file cannot be written ({error}): name "
            "one in a folder that exists, stdout, or the http:// address of a collector"
        ) from error


def _oidc(settings: Settings) -> "OidcTokens | None":
    if settings.oidc is None:
        return None
    from lorikeet.gateway.oidc_tokens import OidcTokens

    return OidcTokens(settings.oidc)


def _files(settings: Settings, store: ObjectStore) -> FileStore | None:
    if settings.files_bytes is None:
        return None
    return FileStore(store, settings.files_bytes, time.time)


def _batches(settings: Settings, store: ObjectStore) -> BatchStore | None:
    if settings.files_bytes is None:
        return None
    return BatchStore(store, settings.open_batches, time.time)


def _batch_lines(settings: Settings) -> int:
    """Return the number of batches' lines (their single requests) that a replica gets at once from
    all gateways, if all replicas get equally many; 0 without batches.
    """
    return 0 if settings.files_bytes is None else settings.max_running * settings.gateways


def _traces(settings: Settings, gateway: str) -> "TraceExporter | None":
    if settings.otlp_traces_endpoint is None:
        return None
    from lorikeet.tracing.exporter import TraceExporter

    return TraceExporter(settings.otlp_traces_endpoint, settings.traces_sampling_ratio, gateway)


def _most_generations(settings: Settings) -> int:
    """Return the maximum number of generation requests that one gateway takes at once.

    The number is the gateway's part of the requests that all engines take at their maximum number
    of replicas.
    """
    return max(1, settings.max_ongoing_requests * settings.most_engines // settings.gateways)


def _most_requests(settings: Settings) -> int:
    """Return the maximum number of requests, without health checks, that one gateway takes
    at once.
    """
    return _most_generations(settings) + _OTHER_REQUESTS - _HEALTH_CHECKS


def _max_running(settings: Settings) -> dict[str, int]:
    """Return, by base model, one gateway's part of the sequences that all replicas run at once."""
    return {
        name: max(1, settings.max_running * settings.most_replicas(name) // settings.gateways)
        for name in settings.base_models
    }


def _open_catalog(store: ObjectStore, kept_view: KeptView) -> AdapterCatalog:
    """Read the catalog; if the store is unreachable, log that and return the catalog with an empty
    view.

    Raises StoreRefused, unless this machine keeps a view of the catalog.
    """
    catalog = AdapterCatalog(store)
    try:
        catalog.reader.refresh()
    except StoreError as error:
        if isinstance(error, StoreRefused) and kept_view.read() is None:
            raise
        log.warning("catalog_unreachable", extra={"error": str(error)})
    return catalog


@contextmanager
def _failure_logged(part: str, of: str) -> Iterator[None]:
    """Log the reason of a failed start, since Serve reports only that it failed.

    part: deployment that starts ("engine", "gateway").
    of: base model or catalog address.
    """
    try:
        yield
    except (LorikeetError, EngineError) as error:
        log.critical("start_failed", extra={"part": part, "of": of, "error": str(error)})
        raise
