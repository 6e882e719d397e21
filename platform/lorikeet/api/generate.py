"""POST /v1/chat/completions and /v1/completions."""

import re
import time
from dataclasses import replace

from starlette.requests import Request
from starlette.routing import Route

from lorikeet.api.body import read_json
from lorikeet.api.explain import Explanations
from lorikeet.api.gate import Gate
from lorikeet.api.generation import Generation
from lorikeet.api.openai import ChatRequest, CompletionRequest, GenerateRequest
from lorikeet.api.place import Place
from lorikeet.api.request_scope import request_id_of
from lorikeet.api.services import Services
from lorikeet.api.trace import Trace
from lorikeet.errors import InvalidInput
from lorikeet.tenancy import Admission
from lorikeet_engine.request import Terms

SESSION_HEADER = "x-lorikeet-session"
"""Whose request this is, where an alias shares its requests between two versions; else the body's
`user`; a request without either may get either version."""


LOAD_HEADER = "x-lorikeet-max-adapter-wait-ms"
"""How long the caller waits for an adapter that is not there."""
_LONGEST_LOAD_MS = 3_600_000


def generate_routes(
    services: Services, gate: Gate, admission: Admission, explanations: Explanations
) -> list[Route]:
    """One request's way: key, what limits say of it unseen, body, model, place, replica.

    Routes without FastAPI's dependencies: these have none, and to find that out at each request
    takes a quarter of the gateway's own time.
    """

    async def chat(request: Request) -> Generation:
        return await generate(request, ChatRequest)

    async def completions(request: Request) -> Generation:
        return await generate(request, CompletionRequest)

    async def generate(request: Request, schema: type[GenerateRequest]) -> Generation:
        traceparent = request.headers.get("traceparent")
        trace = explanations.trace(request_id_of(request), request.scope["path"], traceparent)
        with trace.asking():
            return await understand(request, schema, trace)

    async def understand(
        request: Request, schema: type[GenerateRequest], trace: Trace
    ) -> Generation:
        caller = await gate.caller(request)
        tenant, key = caller.tenant, caller.key
        trace.comes_from(tenant.name, key.key_id)
        visit = admission.knock(tenant, key)
        terms = Terms(
            tenant.name, tenant.weight, key.priority, services.max_queue_s, _max_load_s(request)
        )
        body = await read_json(request, schema)
        trace.asks_for(body.model)
        request_id = request_id_of(request)
        session = request.headers.get(SESSION_HEADER) or body.user or request_id
        meant = await gate.resolve(body.model, tenant.name, session)
        call = body.to_call(request_id, int(time.time()), tenant.name, meant)
        call = replace(call, terms=terms, key_id=key.key_id, max_context=caller.max_context)
        trace.becomes(call, meant.base_model)
        return Generation(
            call,
            services.engines.generate(meant.base_model, call),
            [trace, Place(visit, call, meant.base_model)],
            services.first_item_timeout_s,
        )

    return [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
    ]


def _max_load_s(request: Request) -> float | None:
    """Raises InvalidInput."""
    said = request.headers.get(LOAD_HEADER)
    if said is None:
        return None
    if not re.fullmatch("[0-9]{1,9}", said) or int(said) > _LONGEST_LOAD_MS:
        raise InvalidInput(
            f"{LOAD_HEADER}: want milliseconds, an integer from 0 to {_LONGEST_LOAD_MS}",
            param=LOAD_HEADER,
        )
    return int(said) / 1000
