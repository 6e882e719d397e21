"""Tinker's endpoints for sampling, for keys that may infer.

The server keeps no sessions: a sampling session's id is the name of its model. A request for
samples is checked, limited, counted and explained as those of other endpoints, but runs in the
background (sample_futures.py).
"""

import re
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from lorikeet.apis.request import ResolvedModel, adapters_in
from lorikeet.errors import (
    Expired,
    InvalidInput,
    StillRunning,
    UnknownModel,
    UnsupportedParameter,
    status_of,
)
from lorikeet.gateway.admin.blob_validation import matching_names
from lorikeet.gateway.auth import Caller, RequestAuthenticator
from lorikeet.gateway.body import read_json
from lorikeet.gateway.client_connection import result_before_disconnect
from lorikeet.gateway.generate import GenerateEndpoint
from lorikeet.gateway.reads import TenantReads
from lorikeet.gateway.replica_response import ReplicaResponse
from lorikeet.gateway.services import Services
from lorikeet.gateway.tinker.requests import (
    CANCEL,
    CAPABILITIES,
    CONFIG,
    CREATE_SAMPLING_SESSION,
    CREATE_SESSION,
    DYNAMIC_CONFIG,
    FINISH_SESSION,
    HEALTH,
    HEARTBEAT,
    RETRIEVE,
    SAMPLE,
    SAMPLER,
    TELEMETRY,
    TRAINING,
    WEIGHTS_INFO,
    FutureRequest,
    SamplingSessionRequest,
    WeightsInfoRequest,
    model_of_session,
    sampling_session_id,
)
from lorikeet.gateway.tinker.sample_futures import SampleFutures

_POLL_READS = 0.2
"""Cost in reads of a request to retrieve samples: a fifth of others', since clients send many."""
_PROTOBUF = "application/x-protobuf"


def tinker_routes(
    services: Services,
    authenticator: RequestAuthenticator,
    reads: TenantReads,
    generate: GenerateEndpoint,
    futures: SampleFutures,
) -> APIRouter:
    """Return the routes of Tinker's API for sampling.

    reads: check of each request's key and of its tenant's limit on reads.
    generate: endpoint for requests of the schema SampleRequest.
    futures: running samples, and outcomes of ended ones.
    """
    router, endpoints = APIRouter(), _Endpoints(services, authenticator, reads, generate, futures)
    posts: Sequence[tuple[str, Callable[..., Any]]] = (
        (CONFIG, endpoints.config),
        (DYNAMIC_CONFIG, endpoints.dynamic_config),
        (CREATE_SESSION, endpoints.create_session),
        (HEARTBEAT, endpoints.heartbeat),
        (FINISH_SESSION, endpoints.finish_session),
        (TELEMETRY, endpoints.drop_telemetry),
        (CREATE_SAMPLING_SESSION, endpoints.create_sampling_session),
        (WEIGHTS_INFO, endpoints.weights_info),
        (SAMPLE, endpoints.sample),
        (RETRIEVE, endpoints.retrieve),
        (CANCEL, endpoints.cancel),
        *((path, endpoints.refuse_training) for path in TRAINING),
    )
    for path, answer in posts:
        router.add_api_route(path, answer, methods=["POST"], response_model=None)
    for path, shown in (
        (SAMPLER, endpoints.sampler),
        (CAPABILITIES, endpoints.capabilities),
        (HEALTH, endpoints.health),
    ):
        router.add_api_route(path, shown, methods=["GET"])
    return router


class _Endpoints:
    """Tinker's endpoints.

    reads: check of each request's key and of its tenant's limit on reads.
    generate: endpoint for requests of the schema SampleRequest.
    futures: running samples, and outcomes of ended ones.
    """

    def __init__(
        self,
        services: Services,
        authenticator: RequestAuthenticator,
        reads: TenantReads,
        generate: GenerateEndpoint,
        futures: SampleFutures,
    ) -> None:
        self._services, self._authenticator, self._reads = services, authenticator, reads
        self._generate, self._futures = generate, futures

    async def config(self, request: Request) -> dict[str, Any]:
        """Return the client's configuration: defaults, and no exchange of keys for tokens."""
        async with self._reads.admitted(request):
            return {"pjwt_auth_enabled": False}

    async def dynamic_config(self, request: Request) -> dict[str, Any]:
        """Tell the client to cancel samples that it gives up."""
        async with self._reads.admitted(request):
            return {"sample_cancel_enabled": True}

    async def create_session(self, request: Request) -> dict[str, Any]:
        """Return a random session id. The server keeps no sessions."""
        async with self._reads.admitted(request):
            return {"type": "create_session", "session_id": uuid.uuid4().hex}

    async def heartbeat(self, request: Request) -> dict[str, Any]:
        """Return success. A heartbeat has no effect: retrieving a sample keeps it alive."""
        async with self._reads.admitted(request):
            return {"type": "session_heartbeat"}

    async def finish_session(self, request: Request, session_id: str) -> dict[str, Any]:  # noqa: ARG002
        """Return success. Nothing ends: the server keeps no sessions."""
        async with self._reads.admitted(request):
            return {}

    async def drop_telemetry(self, request: Request) -> dict[str, Any]:
        """Return success. The telemetry, which may quote prompts, is not read."""
        async with self._reads.admitted(request):
            return {"status": "accepted"}

    async def create_sampling_session(self, request: Request) -> dict[str, Any]:
        """Return the id of a sampling session, which names one version of an adapter or of each of
        several, or a base model.

        Raises UnknownModel if the caller may use no such model.
        """
        async with self._reads.admitted(request) as caller:
            body = await read_json(request, SamplingSessionRequest)
            named = body.model_path or self._base_model(body.base_model or "")
            model = _pinned(await self._resolve(named, caller))
            return {
                "type": "create_sampling_session",
                "sampling_session_id": sampling_session_id(model),
            }

    async def sampler(self, request: Request, sampler_id: str) -> dict[str, Any]:
        """Return base model and tinker:// path of a sampling session.

        sampler_id: id of the session.

        Raises InvalidInput if `sampler_id` is malformed, and UnknownModel if the caller may not
        use the session's model.
        """
        async with self._reads.admitted(request) as caller:
            try:
                model = model_of_session(sampler_id)
            except ValueError as error:
                raise InvalidInput(f"sampler_id: {error}", param="sampler_id") from None
            found = await self._resolve(model, caller)
            path = None if found.adapter is None else f"tinker://{model}"
            return {
                "sampler_id": sampler_id,
                "base_model": self._hub_name(found),
                "model_path": path,
            }

    async def weights_info(self, request: Request) -> dict[str, Any]:
        """Return an adapter's base model and rank.

        Raises UnknownModel if the caller may use no such model.
        """
        async with self._reads.admitted(request) as caller:
            body = await read_json(request, WeightsInfoRequest)
            found = await self._resolve(body.tinker_path, caller)
            return {
                "base_model": self._hub_name(found),
                "is_lora": found.adapter is not None,
                "lora_rank": found.rank or None,
            }

    async def capabilities(self, request: Request) -> dict[str, Any]:
        """Return the base models that the key may use: all, or none if the key is limited to some
        adapters.
        """
        async with self._reads.admitted(request) as caller:
            base_models = () if caller.key.adapters else self._services.base_models
            models = [
                {
                    "model_name": name,
                    "max_context_length": self._services.engines.max_context(name),
                    "trainable": False,
                    "sampleable": True,
                }
                for name in base_models
            ]
            return {"supported_models": models}

    async def health(self, request: Request) -> dict[str, str]:
        """Return success: the service runs and the key is valid."""
        async with self._reads.admitted(request):
            return {"status": "ok"}

    async def sample(self, request: Request) -> dict[str, Any]:
        """Start samples; return the id by which the client retrieves them.

        Raises LorikeetError if the request is refused.
        """
        response = await self._generate.answer(request)
        assert isinstance(response, ReplicaResponse)
        call = response.call
        with self._services.uses.using(call.adapter):  # until the sample's own task counts it
            await self._futures.begin(response, request.receive)
        return {
            "request_id": call.request_id,
            "sample_sequence_ids": [f"{call.request_id}-{index}" for index in range(call.n)],
        }

    async def retrieve(self, request: Request) -> Response:
        """Return samples as protobuf, or the error that ended them as JSON.

        Raises StillRunning if the samples have not ended, Expired if the client should send the
        request for the samples again.
        """
        caller = await self._authenticator.caller(request)
        tenant = caller.tenant.name
        self._reads.limiter.count(tenant, _POLL_READS)
        body = await read_json(request, FutureRequest)
        outcome = await result_before_disconnect(
            request.receive, self._futures.outcome(tenant, body.request_id)
        )
        if outcome is None:
            raise StillRunning("the samples are not ready: ask again")
        if isinstance(outcome, bytes):
            return Response(outcome, media_type=_PROTOBUF)
        status = status_of(outcome.code)
        if status in (410, 429, 503):
            raise Expired(f"{outcome.message} ({outcome.code})")
        return JSONResponse(
            {"error": outcome.message, "category": "user" if status < 500 else "server"}
        )

    async def cancel(self, request: Request) -> dict[str, Any]:
        """Cancel the samples of an earlier request; do nothing if they have ended."""
        async with self._reads.admitted(request) as caller:
            body = await read_json(request, FutureRequest)
            await self._futures.cancel(caller.tenant.name, body.request_id)
            return {}

    async def refuse_training(self, request: Request) -> dict[str, Any]:
        """Refuse to train: raise UnsupportedParameter."""
        async with self._reads.admitted(request):
            raise UnsupportedParameter(
                f"{request.url.path} is not served: Lorikeet samples and does not train. Train "
                "elsewhere, push or register the adapter, and sample from tinker://tenant/name"
            )

    def _base_model(self, name: str) -> str:
        """Return the served base model that has this name here or on the Hugging Face Hub.

        Raises UnknownModel if none or several have it.
        """
        base_models = self._services.base_models
        matching = [name] if name in base_models else matching_names(name, base_models)
        if len(matching) != 1:
            raise UnknownModel(
                f"the base model {name[:80]!r} is not served: want one of "
                f"{', '.join(base_models)}, or an adapter as model_path",
                param="base_model",
            )
        return matching[0]

    def _hub_name(self, found: ResolvedModel) -> str:
        """Return a base model's name on the Hugging Face Hub, by which clients load its tokenizer.
        Without one, return its name here.
        """
        served = self._services.base_models[found.base_model]
        of_hub = (alias for alias in served.aliases if re.fullmatch(r"[^/]+/[^/]+", alias))
        return next(of_hub, found.base_model)

    async def _resolve(self, model: str, caller: Caller) -> ResolvedModel:
        named = adapters_in(model, self._services.base_models)
        if named is None:
            return await self._authenticator.resolve_model(model, caller)
        return await self._authenticator.resolve_composition(model, named, caller)


def _pinned(found: ResolvedModel) -> str:
    """Return a name of the resolved model that never names another version of its adapters."""
    if found.adapter is None:
        return found.base_model
    return "+".join(
        f"{ref.tenant}/{ref.name}@{ref.version if found.is_recorded else ref.digest}"
        for ref in found.adapter.members
    )
