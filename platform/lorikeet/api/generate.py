"""POST /v1/chat/completions and /v1/completions."""

import time

from fastapi import APIRouter, Request

from lorikeet.api.body import read_json
from lorikeet.api.gate import Gate
from lorikeet.api.generation import Generation
from lorikeet.api.openai import ChatRequest, CompletionRequest, GenerateRequest
from lorikeet.api.request_scope import request_id_of
from lorikeet.api.services import Services
from lorikeet.tenancy import Admission

SESSION_HEADER = "x-lorikeet-session"
"""Whose request this is, where an alias shares its requests between two versions; else the body's
`user`; a request without either may get either version."""


def generate_routes(services: Services, gate: Gate) -> APIRouter:
    """One request's way: key, body, model, admission, replica."""
    router = APIRouter(prefix="/v1")
    admission = Admission(services.gateways, services.max_generations)

    @router.post("/chat/completions", response_model=None)
    async def chat(request: Request) -> Generation:
        return await generate(request, ChatRequest)

    @router.post("/completions", response_model=None)
    async def completions(request: Request) -> Generation:
        return await generate(request, CompletionRequest)

    async def generate(request: Request, schema: type[GenerateRequest]) -> Generation:
        tenant = await gate.tenant(request)
        body = await read_json(request, schema)
        request_id = request_id_of(request)
        session = request.headers.get(SESSION_HEADER) or body.user or request_id
        meant = await gate.resolve(body.model, tenant.name, session)
        call = body.to_call(request_id, int(time.time()), tenant.name, meant)
        return Generation(
            call,
            services.engines.generate(meant.base_model, call),
            admission.admit(tenant.name, tenant.max_concurrent),
            services.first_item_timeout_s,
        )

    return router
