"""POST /v1/chat/completions and /v1/completions: a request's walk through its gateway."""

import re
import time
from collections.abc import Mapping

from starlette.requests import Request
from starlette.routing import Route

from lorikeet.errors import InvalidInput
from lorikeet.gateway.apis.openai_requests import ChatRequest, CompletionRequest, GenerateRequest
from lorikeet.gateway.auth import Caller, RequestAuthenticator
from lorikeet.gateway.body import read_json
from lorikeet.gateway.middleware import request_id_of
from lorikeet.gateway.rate_limit_observer import RateLimitObserver
from lorikeet.gateway.replica_response import ReplicaResponse
from lorikeet.gateway.services import Services
from lorikeet.request_log.request_log import RequestLog
from lorikeet.request_log.trace import RequestTrace
from lorikeet.tenancy import RateLimiter
from lorikeet_engine.request import SchedulingParams

SCHEMAS: Mapping[str, type[GenerateRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}
"""The request schema of each path; every one of them becomes a Call."""

SESSION_HEADER = "x-lorikeet-session"
"""Names a session, which keeps to one version where an alias shares its requests between two; else
the body's `user` does; a request without either may get either version."""
LOAD_HEADER = "x-lorikeet-max-adapter-wait-ms"
"""How long the caller waits for an adapter that has to be loaded."""
_LONGEST_LOAD_MS = 3_600_000


def generate_routes(
    services: Services,
    authenticator: RequestAuthenticator,
    rate_limiter: RateLimiter,
    request_log: RequestLog,
) -> list[Route]:
    """Return a route for each path, without FastAPI's dependencies.

    These routes have none, and finding that out takes a quarter of the gateway's time on a request.
    """
    return [
        Route(
            path,
            GenerateEndpoint(schema, services, authenticator, rate_limiter, request_log).answer,
            methods=["POST"],
        )
        for path, schema in SCHEMAS.items()
    ]


class GenerateEndpoint:
    """Answers generate requests of one schema: the request's walk through its gateway."""

    def __init__(
        self,
        schema: type[GenerateRequest],
        services: Services,
        authenticator: RequestAuthenticator,
        rate_limiter: RateLimiter,
        request_log: RequestLog,
    ) -> None:
        self._schema, self._services = schema, services
        self._authenticator, self._rate_limiter, self._request_log = (
            authenticator,
            rate_limiter,
            request_log,
        )

    async def answer(self, request: Request) -> ReplicaResponse:
        """Read and check a request; the response that is returned calls a replica as it is sent.

        Raises LorikeetError.
        """
        traceparent = request.headers.get("traceparent")
        trace = self._request_log.trace(request_id_of(request), request.scope["path"], traceparent)
        with trace.validating():
            return await self._begin_call(request, trace)

    async def _begin_call(self, request: Request, trace: RequestTrace) -> ReplicaResponse:
        caller = await self._authenticator.caller(request)
        trace.set_caller(caller.tenant.name, caller.key.key_id)
        hold = self._rate_limiter.check(caller.tenant, caller.key)
        scheduling = self._scheduling(request, caller)  # first: a bad header costs no parse
        body = await read_json(request, self._schema)
        trace.set_model(body.model)
        request_id = request_id_of(request)
        session = request.headers.get(SESSION_HEADER) or body.user or request_id
        model = await self._authenticator.resolve(body.model, caller.tenant.name, session)
        call = body.to_call(request_id, int(time.time()), caller, scheduling, model)
        trace.set_call(call, model.base_model)
        return ReplicaResponse(
            call,
            self._services.engines.generate(model.base_model, call),
            [trace, RateLimitObserver(hold, call, model.base_model)],
            self._services.first_item_timeout_s,
        )

    def _scheduling(self, request: Request, caller: Caller) -> SchedulingParams:
        """Return what the engine's scheduler is to know. Raises InvalidInput."""
        tenant, max_queue_s = caller.tenant, self._services.max_queue_s
        max_load_s = _max_load_s(request.headers.get(LOAD_HEADER))
        return SchedulingParams(
            tenant.name, tenant.weight, caller.key.priority, max_queue_s, max_load_s
        )


def _max_load_s(header: str | None) -> float | None:
    """Parse LOAD_HEADER. Raises InvalidInput."""
    if header is None:
        return None
    if not re.fullmatch("[0-9]{1,9}", header) or int(header) > _LONGEST_LOAD_MS:
        raise InvalidInput(
            f"{LOAD_HEADER}: want milliseconds, an integer from 0 to {_LONGEST_LOAD_MS}",
            param=LOAD_HEADER,
        )
    return int(header) / 1000
