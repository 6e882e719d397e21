"""vLLM's endpoints /tokenize and /detokenize, for keys that may infer."""

import time
from typing import Any, TypeVar

from fastapi import APIRouter, Request

from lorikeet.apis.body import Body
from lorikeet.apis.request import CallContext
from lorikeet.gateway.auth import Caller, RequestAuthenticator
from lorikeet.gateway.body import LargeBodies, read_body
from lorikeet.gateway.reads import TenantReads
from lorikeet.gateway.services import Services
from lorikeet.gateway.vllm.requests import (
    DETOKENIZE,
    TOKENIZE,
    DetokenizeRequest,
    TokenizeRequest,
)
from lorikeet_engine.request import SchedulingParams

_BYTES_OF_READ = 16 * 2**10
"""Number of a body's bytes that cost one read, in addition to one for the request."""

B = TypeVar("B", bound=Body)


def token_routes(
    services: Services, authenticator: RequestAuthenticator, reads: TenantReads
) -> APIRouter:
    """Return the routes that convert prompts to token ids and token ids to text.

    reads: check of each request's key and of its tenant's limit on reads.
    """
    router, bodies = APIRouter(), LargeBodies()

    async def read(request: Request, caller: Caller, schema: type[B]) -> B:
        body = await read_body(request)
        reads.limiter.count(caller.tenant.name, len(body) / _BYTES_OF_READ)
        return await bodies.parse_json(request, body, schema, caller.tenant.name)

    @router.post(TOKENIZE)
    async def tokenize(request: Request) -> dict[str, Any]:
        async with reads.admitted(request) as caller:
            body, tenant = await read(request, caller, TokenizeRequest), caller.tenant.name
            model = await authenticator.resolve_model(body.model, caller)
            max_context = services.engines.max_context(model.base_model)
            encoders = services.encoders
            if body.prompt is not None:
                ids = await encoders.encode_text(
                    model.base_model,
                    tenant,
                    body.prompt,
                    max_context,
                    model.defaults,
                    add_special_tokens=body.add_special_tokens is not False,
                )
            else:
                scheduling = SchedulingParams(tenant, max_queue_s=services.max_queue_s)
                context = CallContext(
                    request.state.request_id,
                    int(time.time()),
                    tenant,
                    caller.max_context,
                    scheduling,
                    model,
                )
                call = body.to_call(context)
                encoded = await encoders.encode(
                    model.base_model, call, max_context, request.receive
                )
                (ids,) = encoded.prompts
            texts = None
            if body.return_token_strs:
                texts = await encoders.token_strings(model.base_model, tenant, ids, model.defaults)
            counted = {"count": len(ids), "max_model_len": max_context}
            return counted | {"tokens": list(ids), "token_strs": texts}

    @router.post(DETOKENIZE)
    async def detokenize(request: Request) -> dict[str, str]:
        async with reads.admitted(request) as caller:
            body, tenant = await read(request, caller, DetokenizeRequest), caller.tenant.name
            model = await authenticator.resolve_model(body.model, caller)
            about = model.base_model, tenant, body.tokens, model.defaults
            text = await services.encoders.decode(*about)
            return {"prompt": text}

    return router
