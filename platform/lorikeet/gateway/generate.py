"""What generates (/v1/chat/completions and its like): a request's walk through its gateway."""

import re
import time
from collections.abc import Mapping
from contextlib import ExitStack

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from lorikeet.dialects import MESSAGES
from lorikeet.errors import InvalidInput
from lorikeet.gateway.apis.anthropic_request import CountTokensRequest, MessagesRequest
from lorikeet.gateway.apis.api_request import ApiRequest, CallContext
from lorikeet.gateway.apis.chat_request import ChatRequest
from lorikeet.gateway.apis.completion_request import CompletionRequest
from lorikeet.gateway.apis.responses_request import ResponsesRequest
from lorikeet.gateway.auth import Caller, RequestAuthenticator
from lorikeet.gateway.body import read_body
from lorikeet.gateway.large_bodies import LargeBodies
from lorikeet.gateway.replica_response import Headers, ReplicaResponse, RequestObserver
from lorikeet.gateway.services import Services
from lorikeet.gateway.stored_responses import StoredResponses
from lorikeet.protocol.messages import (
    AnswerHeader,
    Call,
    Endpoint,
    FinalUsage,
    RunningUsage,
    StreamItem,
)
from lorikeet.request_log.record import RequestTrace
from lorikeet.request_log.request_log import RequestLog
from lorikeet.tenancy.rate_limiter import RateLimiter, RateLimitHold, limit_headers
from lorikeet_engine.request import SchedulingParams

SCHEMAS: Mapping[str, type[ApiRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    MESSAGES: MessagesRequest,
    f"{MESSAGES}/count_tokens": CountTokensRequest,
}
"""The request schema of each path; every one of them becomes a Call."""

SESSION_HEADER = "x-session-id"
"""Names a session, which keeps to one version where an alias shares its requests between two; else
the body's `user` does; a request without either may get either version."""
LOAD_HEADER = "x-lorikeet-max-adapter-wait-ms"
"""How long the caller waits for an adapter that has to be loaded."""
_LONGEST_LOAD_MS = 3_600_000
_TYPICAL_ANSWER_TOKENS = 256
"""Tokens reserved for a choice that may fill the context."""


def generate_routes(
    services: Services,
    authenticator: RequestAuthenticator,
    rate_limiter: RateLimiter,
    request_log: RequestLog,
    stored: StoredResponses,
) -> list[Route]:
    """Return a route for each path, which calls its endpoint and knows nothing of FastAPI.

    Finding out that there are no dependencies takes a quarter of the gateway's time on a request.
    """
    bodies = LargeBodies()
    return [
        Route(
            path,
            GenerateEndpoint(
                schema, services, authenticator, rate_limiter, request_log, stored, bodies
            ),
            methods=["POST"],
        )
        for path, schema in SCHEMAS.items()
    ]


class GenerateEndpoint:
    """Answers generate requests of one schema: the request's walk through its gateway."""

    def __init__(
        self,
        schema: type[ApiRequest],
        services: Services,
        authenticator: RequestAuthenticator,
        rate_limiter: RateLimiter,
        request_log: RequestLog,
        stored: StoredResponses,
        bodies: LargeBodies,
    ) -> None:
        self._schema, self._services, self._stored = schema, services, stored
        self._bodies = bodies
        self._authenticator, self._rate_limiter, self._request_log = (
            authenticator,
            rate_limiter,
            request_log,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as an ASGI application, which needs no layers of Starlette's around it."""
        response = await self.answer(Request(scope, receive))
        await response(scope, receive, send)

    async def answer(self, request: Request) -> ReplicaResponse:
        """Read and check a request; the response that is returned calls a replica as it is sent.

        Its id was made by RequestMiddleware (app.py). Raises LorikeetError.
        """
        traceparent = request.headers.get("traceparent")
        trace = self._request_log.trace(
            request.state.request_id, request.scope["path"], traceparent
        )
        with trace.validating():
            return await self._begin_call(request, trace)

    async def _begin_call(self, request: Request, trace: RequestTrace) -> ReplicaResponse:
        """Return the response that calls a replica; each line below may refuse the request.

        The key and the model are looked up in the catalog's state in memory (catalog/state.py), the
        limits of requests checked by tenancy/rate_limiter.py; RateLimitObserver checks those of
        tokens and queue time, as the response is sent. `stream_answer` is that of
        serving/engine_client.py: nothing is sent to a replica before ReplicaResponse iterates over
        it. `trace` (request_log/) only takes note.
        """
        caller = await self._authenticator.caller(request)
        trace.set_caller(caller.tenant.name, caller.key.id)
        hold = self._rate_limiter.check(caller.tenant, caller.key)
        with ExitStack() as refused:
            refused.callback(hold.release)
            response = await self._respond(request, trace, caller, hold)
            refused.pop_all()  # from here on the response's observer releases it
            return response

    async def _respond(
        self, request: Request, trace: RequestTrace, caller: Caller, hold: RateLimitHold
    ) -> ReplicaResponse:
        """Read the body and return the response. `_stored` matters to /v1/responses alone."""
        scheduling = self._scheduling(request, caller)  # first: a bad header costs no parse
        received = await read_body(request)
        hold.body_is_here()  # before it waits for its turn to be parsed
        body = await self._bodies.parse_json(request, received, self._schema, caller.tenant.name)
        trace.set_model(body.model)
        request_id: str = request.state.request_id
        session = request.headers.get(SESSION_HEADER) or body.session() or request_id
        model = await self._authenticator.resolve_model(body.model, caller.tenant.name, session)
        items = await self._stored.items(body, caller.tenant.name)
        stores, now = self._stored.stores(body), int(time.time())
        context = CallContext(request_id, now, caller, scheduling, model, items, stores)
        call = body.to_call(context)
        quantization = self._services.base_models[model.base_model].quantization
        trace.set_call(call, model.base_model, quantization, model.trained_on)
        return ReplicaResponse(
            call,
            self._services.engines.stream_answer(model.base_model, call),
            [trace, _limits_of(hold, call, model.base_model)],
            self._services.first_item_timeout_s,
            self._stored.saver(body, context, call),
        )

    def _scheduling(self, request: Request, caller: Caller) -> SchedulingParams:
        """Return what the engine's scheduler is to know. Raises InvalidInput."""
        tenant, max_queue_s = caller.tenant, self._services.max_queue_s
        max_load_s = _max_load_s(request.headers.get(LOAD_HEADER))
        return SchedulingParams(
            tenant.name, tenant.weight, caller.key.priority, max_queue_s, max_load_s
        )


class RateLimitObserver(RequestObserver):
    """Holds a call to its limits (RateLimitHold): reserves tokens, and settles what it took.

    A complete answer's FinalUsage says what it took. A call that failed before its first bytes took
    nothing. Of any other, whose client left or whose replica was lost in mid stream, what was
    reserved counts, or, if that is more, its prompt and the tokens of the last RunningUsage.
    """

    def __init__(self, hold: RateLimitHold, call: Call, base_model: str) -> None:
        self._hold = hold
        self._base_model = base_model
        self._reserved = _expected_tokens(call)
        self._taken = self._prompt_tokens = call.work.prompt_tokens
        self._answered = self._settled = False

    def __enter__(self) -> None:
        """Reserve tokens. Raises RateLimited, Overloaded; then the call is over."""
        try:
            self._hold.reserve(self._reserved, self._base_model)
        except BaseException:
            self._hold.release()
            raise

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        """Give back the place, and tokens that were not taken."""
        if not self._settled:
            failed = isinstance(error, Exception) and not self._answered
            self._hold.settle(0 if failed else max(self._reserved, self._taken))
        self._hold.release()

    def on_item(self, item: StreamItem) -> None:
        """Note what was made and the first token, and settle the final usage."""
        match item:
            case RunningUsage():
                self._taken = self._prompt_tokens + item.completion_tokens
            case AnswerHeader() if not item.is_first:
                self._hold.first_token()
            case FinalUsage():
                self._settled = True
                self._hold.settle(item.prompt_tokens + item.completion_tokens)

    def on_first_bytes(self) -> Headers:
        """Return the limits' status as headers."""
        self._answered = True
        self._hold.first_token()
        return _limit_headers(self._hold)


class CountObserver(RequestObserver):
    """Holds a call that counts tokens to its limits: it is a request, but takes and awaits none."""

    def __init__(self, hold: RateLimitHold) -> None:
        self._hold = hold

    def __enter__(self) -> None:
        """Let it begin."""

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        """Give back the place."""
        self._hold.release()

    def on_item(self, item: StreamItem) -> None:
        """Note nothing."""

    def on_first_bytes(self) -> Headers:
        """Return the limits' status as headers."""
        return _limit_headers(self._hold)


def _limits_of(hold: RateLimitHold, call: Call, base_model: str) -> RequestObserver:
    """Return what holds a call to its limits."""
    if call.endpoint is Endpoint.COUNT_TOKENS:
        return CountObserver(hold)
    return RateLimitObserver(hold, call, base_model)


def _limit_headers(hold: RateLimitHold) -> Headers:
    headers = limit_headers(hold.limit_statuses())
    return [(name.encode(), value.encode()) for name, value in headers.items()]


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


def _expected_tokens(call: Call) -> int:
    """Return the tokens that a call takes at most, or about, if it sets no limit."""
    answer = _TYPICAL_ANSWER_TOKENS if call.max_tokens is None else call.max_tokens
    if call.max_context is not None:
        answer = min(answer, call.max_context)
    return call.work.prompt_tokens + call.work.sequences * answer
