"""vLLM's endpoints for trainers, as routes for publish keys.

A loaded adapter is an ephemeral push (gateway/pushing/), so "loaded" means: on every replica.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from lorikeet.catalog.names import DEFAULT_ALIAS, check_name
from lorikeet.errors import (
    InvalidInput,
    NotFound,
    RequestTooLarge,
    Unavailable,
    UnsupportedParameter,
)
from lorikeet.gateway.admin.blob_validation import MAX_BYTES
from lorikeet.gateway.admin.registration import Registration
from lorikeet.gateway.auth import check_may_push
from lorikeet.gateway.body import read_json
from lorikeet.gateway.catalog_view import GatewayCatalogView
from lorikeet.gateway.pushing.push_folders import BLOB
from lorikeet.gateway.pushing.push_pipeline import MOST_OF_TENANT, Push, PushPipeline
from lorikeet.gateway.pushing.routes import (
    LONGEST_LIFE_S,
    AdmittedPusher,
    PushEndpoints,
    PushQuery,
    PushRequest,
)
from lorikeet.gateway.services import Services
from lorikeet.gateway.vllm.requests import (
    LOAD,
    NO_OPS,
    QUESTIONS,
    REFUSED,
    SKYRL_LOAD,
    UNLOAD,
    LoadRequest,
    SkyrlLoadRequest,
    UnloadRequest,
)
from lorikeet.gateway.vllm.shared_adapter import SharedAdapter
from lorikeet.retry_after import STORE_AWAY_S
from lorikeet.tenancy.read_limiter import ReadLimiter

_LOADERS = 4
_LOADED = PushQuery(
    alias=DEFAULT_ALIAS, wait="ready", timeout_s=600, lifetime_s=LONGEST_LIFE_S, keep=1
)

T = TypeVar("T")


def vllm_routes(endpoints: "VllmEndpoints") -> APIRouter:
    """Return the routes of vLLM's endpoints for trainers."""
    router = APIRouter()
    router.add_api_route(LOAD, endpoints.load, methods=["POST"])
    router.add_api_route(SKYRL_LOAD, endpoints.load_for_skyrl, methods=["POST"])
    router.add_api_route(UNLOAD, endpoints.unload, methods=["POST"])
    answers = (endpoints.server_info, endpoints.world_size, endpoints.is_paused)
    for path, answer in zip(QUESTIONS, answers, strict=True):
        router.add_api_route(path, answer, methods=["GET"])
    for path in NO_OPS:
        router.add_api_route(path, endpoints.do_nothing, methods=["POST"])
    for path in REFUSED:
        router.add_api_route(path, endpoints.refuse, methods=["POST"])
    return router


class VllmEndpoints:
    """vLLM's endpoints, by which trainers push adapters from a shared file system.

    Pauses and cache resets have no effect, since requests keep the version of an adapter with
    which they began, and cached prefixes belong to one version.
    """

    def __init__(
        self,
        services: Services,
        catalog_view: GatewayCatalogView,
        registration: Registration,
        pipeline: PushPipeline,
        pushes: PushEndpoints,
        reads: ReadLimiter,
        folder: Path,
    ) -> None:
        """Set up the endpoints.

        registration: knows the limits on each tenant's adapters.
        pipeline: running pushes of this gateway.
        pushes: endpoints whose checks and limits hold for these pushes, too.
        reads: tenants' limits on requests that generate nothing.
        folder: folder below which each tenant has a folder of its name.
        """
        self._services, self._catalog_view = services, catalog_view
        self._registration, self._pipeline, self._pushes = registration, pipeline, pushes
        self._reads, self._folder = reads, folder.absolute()
        # Own threads, since the shared file system may hang.
        self._loaders = ThreadPoolExecutor(_LOADERS, thread_name_prefix="load")

    async def load(self, request: Request) -> Response:
        """Load an adapter for vLLM's clients."""
        name = await self._load(request, LoadRequest)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def load_for_skyrl(self, request: Request) -> dict[str, str]:
        """Load an adapter for SkyRL."""
        return {"status": "ok", "lora_name": await self._load(request, SkyrlLoadRequest)}

    async def unload(self, request: Request) -> Response:
        """End the loaded versions of an adapter. Requests that were accepted before are
        answered.
        """
        async with self._pushes.admitted(request) as pusher:
            self._reads.count(pusher.caller.tenant.name)
            body = await read_json(request, UnloadRequest)
            name = _named(pusher, body.lora_name)
            if not await self._pipeline.end(pusher.caller.tenant.name, name):
                raise NotFound(
                    f"the lora adapter {body.lora_name!r} cannot be found among those that were "
                    "loaded; registered ones are retired by an admin",
                    param="lora_name",
                )
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def server_info(self, request: Request) -> dict[str, Any]:
        """Return those parts of vLLM's configuration that trainers read, of the first base model.

        All replicas together are shown as one, since a load reaches all of them.
        """
        async with self._asked(request) as pusher:
            limits = await self._registration.limits(pusher.caller.tenant.name)
            base_model = next(iter(self._services.base_models))
            gpus = self._gpus(base_model)
            return {
                "vllm_config": {
                    "model_config": {
                        "model": base_model,
                        "dtype": f"torch.{self._services.adapter_memory.dtype}",
                        "max_model_len": self._services.engines.max_context(base_model),
                        "logprobs_mode": "raw_logprobs",
                    },
                    "lora_config": {
                        "max_lora_rank": limits.max_rank,
                        "max_loras": MOST_OF_TENANT,
                    },
                    "parallel_config": {
                        "tensor_parallel_size": gpus,
                        "data_parallel_size": 1,
                        "world_size": gpus,
                    },
                    "weight_transfer_config": None,
                }
            }

    async def world_size(self, request: Request) -> dict[str, int]:
        """Return the number of GPUs of a replica of the first base model."""
        async with self._asked(request):
            return {"world_size": self._gpus(next(iter(self._services.base_models)))}

    async def is_paused(self, request: Request) -> dict[str, bool]:
        """Return that nothing is paused."""
        async with self._asked(request):
            return {"is_paused": False}

    async def do_nothing(self, request: Request) -> dict[str, Any]:
        """Return success, without effect."""
        async with self._asked(request):
            return {
                "success": True,
                "status": "running",
                "reason": "a request keeps the version of an adapter with which it began, and its "
                "cached prefixes, so nothing has to stop",
            }

    async def refuse(self, request: Request) -> dict[str, Any]:
        """Refuse to change or unload the base model's weights."""
        async with self._asked(request):
            raise UnsupportedParameter(
                f"{request.scope['route'].path} is not served, as all tenants share the base "
                f"model's weights: train a LoRA adapter, and load it by {LOAD}"
            )

    async def _load(self, request: Request, schema: type[LoadRequest]) -> str:
        """Push the adapter in a folder as an ephemeral version (never stored), and wait until all
        replicas have it. Return the adapter's name as the client wrote it. Repeating the request
        changes nothing.

        schema: schema of the request's body.
        """
        async with self._pushes.admitted(request) as pusher:
            self._reads.count(pusher.caller.tenant.name)
            body = await read_json(request, schema)
            name = _named(pusher, body.lora_name)
            if not body.load_inplace:
                await self._check_free(pusher, name)
            push = await self._push(pusher, name, body.lora_path)
            await self._pushes.wait(request, push, _LOADED)
            push.note_stages(pusher.trace)
            if not push.ready.is_set():
                raise Unavailable(
                    f"{body.lora_name} is not on every replica yet: send it again",
                    retry_after_s=STORE_AWAY_S,
                )
        return body.lora_name

    @asynccontextmanager
    async def _asked(self, request: Request) -> AsyncGenerator[AdmittedPusher, None]:
        """Check a request's key and limits and record the request; yield its publisher. The body,
        which has no effect, is not read.
        """
        async with self._pushes.admitted(request) as pusher:
            pusher.hold.body_is_here()
            with self._reads.reading(pusher.caller.tenant.name):
                yield pusher

    def _gpus(self, base_model: str) -> int:
        return self._services.adapter_memory.gpus.get(base_model, 1)

    async def _check_free(self, pusher: AdmittedPusher, name: str) -> None:
        """Raise InvalidInput if an adapter has this name, except one that the same key loaded.

        So a trainer that starts again can load adapters under the names of its earlier run.
        """
        tenant, key = pusher.caller
        record = await self._catalog_view.ask(lambda state: state.find(tenant.name, name))
        pushed = self._pipeline.pushed.of(tenant.name, name)
        if (record and not record.retired) or any(each.expires is None for each in pushed):
            who = "as a registered adapter"
        elif any(each.actor != key.id for each in pushed):
            who = "by another key"
        else:
            return
        raise InvalidInput(
            f"the lora adapter {name!r} has already been loaded, {who}: choose another name, "
            "unload it, or set load_inplace to true",
            param="lora_name",
        )

    async def _push(self, pusher: AdmittedPusher, name: str, path: str) -> Push:
        """Make an adapter's blob from its folder, and begin its push.

        path: path of the folder, as the client wrote it.
        """
        tenant = pusher.caller.tenant.name
        limits = await self._registration.limits(tenant)
        with closing(
            await self._run(lambda: SharedAdapter(self._folder / tenant, path))
        ) as adapter:
            if adapter.size_bytes > limits.max_bytes:
                raise RequestTooLarge(
                    f"the adapter's files have {adapter.size_bytes} bytes, more than "
                    f"{limits.max_bytes}, {MAX_BYTES}",
                    param="lora_path",
                )
            pusher.hold.take_bytes(adapter.size_bytes)
            folder = self._pipeline.folders.make()
            async with AsyncExitStack() as refused:
                refused.push_async_callback(asyncio.to_thread, folder.cleanup)
                scratch, blob = Path(folder.name) / "copy", Path(folder.name) / BLOB
                async with self._pipeline.space.claimed(tenant, 2 * adapter.size_bytes):
                    digest = await self._run(lambda: adapter.write_blob(scratch, blob))
                pusher.trace.end_stage("receive")
                pusher.trace.set_model(f"{tenant}/{name}@{digest}")
                with self._pipeline.receiving((tenant, name, digest)):
                    push = await self._pushes.begin(
                        PushRequest(pusher, name, digest, _LOADED), folder
                    )
                if push.folder is folder:
                    refused.pop_all()  # from here on the pipeline removes the folder
        return push

    async def _run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which a thread computes.

        A cancelled call ends only when the thread has: until then it uses open files.
        """
        working = asyncio.get_running_loop().run_in_executor(self._loaders, work)
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.wait((working,))
            raise


def _named(pusher: AdmittedPusher, lora_name: str) -> str:
    """Return an adapter's name without its tenant, and record it.

    Raises Forbidden if the key may not push the name, InvalidInput if the name is not valid.
    """
    tenant, key = pusher.caller
    pusher.hold.body_is_here()
    name = lora_name.removeprefix(f"{tenant.name}/")
    check_may_push(key, name)
    pusher.trace.set_model(f"{tenant.name}/{name}")
    return check_name(name, "lora_name")
