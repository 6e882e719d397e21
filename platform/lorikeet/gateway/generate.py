"""Endpoints that generate, such as /v1/chat/completions: a request's steps through the gateway."""

import re
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from lorikeet.apis.answer import token_count_body
from lorikeet.apis.chat.request import ChatRequest
from lorikeet.apis.completions.request import CompletionRequest
from lorikeet.apis.errors import MESSAGES
from lorikeet.apis.messages.request import CountTokensRequest, MessagesRequest
from lorikeet.apis.pooling.request import (
    ClassifyRequest,
    EmbeddingsRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    with_pooling,
)
from lorikeet.apis.request import ApiRequest, CallContext
from lorikeet.apis.responses.items import StoredItems
from lorikeet.apis.responses.request import InputTokensRequest, ResponsesRequest
from lorikeet.errors import InvalidInput
from lorikeet.gateway.auth import Caller, RequestAuthenticator
from lorikeet.gateway.body import LargeBodies, read_body
from lorikeet.gateway.replica_response import (
    Headers,
    ReplicaResponse,
    RequestObserver,
    ignored_header,
)
from lorikeet.gateway.services import Services
from lorikeet.gateway.stored_responses import StoredResponses
from lorikeet.gateway.usage_observer import UsageObserver
from lorikeet.prices import FREE, Price, price_of
from lorikeet.protocol.messages import (
    AnswerHeader,
    EncodedCall,
    FinalUsage,
    RunningUsage,
    StreamItem,
)
from lorikeet.request_log.record import RequestTrace
from lorikeet.request_log.request_log import RequestLog
from lorikeet.tenancy.rate_limiter import RateLimiter, RateLimitHold, limit_headers
from lorikeet.tenancy.read_limiter import ReadLimiter
from lorikeet_engine.request import SchedulingParams

UNVERSIONED: Mapping[str, type[ApiRequest]] = {
    "/classify": ClassifyRequest,
    "/score": ScoreRequest,
    "/pooling": PoolingRequest,
    "/rerank": RerankRequest,
    "/v2/rerank": RerankRequest,
}
"""Request schema of tenants' paths outside `/v1`, which vLLM's clients and Cohere's use."""
SCHEMAS: Mapping[str, type[ApiRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": InputTokensRequest,
    MESSAGES: MessagesRequest,
    f"{MESSAGES}/count_tokens": CountTokensRequest,
    "/v1/classify": ClassifyRequest,
    "/v1/score": ScoreRequest,
    "/v1/pooling": PoolingRequest,
    "/v1/rerank": RerankRequest,
    "/v1/embeddings": EmbeddingsRequest,
    **UNVERSIONED,
}
"""Request schema of each path that generates, counts or pools. Every request is converted to a
Call.
"""

BATCH_ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
)
"""Paths to which lines of batches may go."""

SESSION_HEADER = "x-session-id"
"""Header that names a session. If an alias splits its requests between two versions, all requests
of a session get the same version. Without the header the body's `user` names the session. A request
without a session may get either version.
"""
LOAD_HEADER = "x-lorikeet-max-adapter-wait-ms"
"""Header with the longest time, in milliseconds, that a request waits for its adapter to be
loaded.
"""
_LONGEST_LOAD_MS = 3_600_000
_TYPICAL_ANSWER_TOKENS = 256
"""Number of tokens that the rate limits reserve for each choice of a request without max_tokens."""
_BYTES_OF_READ = 16 * 2**10
"""Number of bytes that cost one read in the body of a request to count tokens. These reads count,
in addition to one for the request, in the tenant's limit of reads.
"""


def generate_routes(
    services: Services,
    authenticator: RequestAuthenticator,
    rate_limiter: RateLimiter,
    request_log: RequestLog,
    stored: StoredResponses,
    reads: ReadLimiter,
    *,
    of_batches: bool = False,
) -> list[Route]:
    """Return a Starlette route for each path that generates, bypassing FastAPI.

    of_batches: the routes are for lines of batches, which run in the background with the rights of
        the key that made the batch.

    FastAPI would resolve dependencies, though there are none, which would take a quarter of the
    gateway's time on a request.
    """
    bodies = LargeBodies()
    return [
        Route(
            path,
            GenerateEndpoint(
                schema,
                services,
                authenticator,
                rate_limiter,
                request_log,
                stored,
                reads,
                bodies,
                of_batches=of_batches,
            ),
            methods=["POST"],
        )
        for path, schema in SCHEMAS.items()
        if not of_batches or path in BATCH_ENDPOINTS
    ]


class GenerateEndpoint:
    """ASGI endpoint for requests of one schema that generate.

    stored: stored responses, which requests of /v1/responses read and add to.
    reads: tenants' limits on requests that generate nothing.
    bodies: parser of the requests' bodies.
    of_batches: the requests are lines of batches. They run in the background, without a limit on
        their queue time, with the rights of the key whose id is in their state. Of the limits on
        requests only the month's budget applies.
    """

    def __init__(
        self,
        schema: type[ApiRequest],
        services: Services,
        authenticator: RequestAuthenticator,
        rate_limiter: RateLimiter,
        request_log: RequestLog,
        stored: StoredResponses,
        reads: ReadLimiter,
        bodies: LargeBodies,
        *,
        of_batches: bool = False,
    ) -> None:
        self._schema, self._services, self._stored = schema, services, stored
        self._reads, self._bodies, self._of_batches = reads, bodies, of_batches
        self._authenticator, self._rate_limiter, self._request_log = (
            authenticator,
            rate_limiter,
            request_log,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request as an ASGI application."""
        response = await self.answer(Request(scope, receive))
        await response(scope, receive, send)

    async def answer(self, request: Request) -> Response:
        """Read and check a request; return a response: one that calls a replica when it is sent, or
        one with the number of the prompt's tokens.

        RequestMiddleware (app.py) has set the request's id. Raises LorikeetError if the request is
        refused.
        """
        traceparent = request.headers.get("traceparent")
        trace = self._request_log.trace(
            request.state.request_id, request.scope["path"], traceparent
        )
        with trace.validating():
            return await self._begin_call(request, trace)

    async def _begin_call(self, request: Request, trace: RequestTrace) -> Response:
        """Return the response to a request. Each line below may refuse the request.

        Key and model are looked up in the catalog's state in memory (catalog/state.py).
        tenancy/rate_limiter.py checks request limits in this method; RateLimitObserver checks token
        limits and queue time when the response is sent. Nothing is sent to a replica before
        ReplicaResponse iterates over `stream_answer` (serving/engine_client.py).
        """
        if self._of_batches:
            caller = await self._authenticator.caller_of_batch(request.state.batch_key)
        else:
            caller = await self._authenticator.caller(request)
        trace.set_caller(caller.tenant.name, caller.key.id)
        hold = self._rate_limiter.check(caller.tenant, caller.key, in_batch=self._of_batches)
        with ExitStack() as refused:
            refused.callback(hold.release)
            response = await self._respond(request, trace, caller, hold)
            if isinstance(response, ReplicaResponse):
                refused.pop_all()  # from here on the response's observer releases the hold
            return response

    async def _respond(
        self, request: Request, trace: RequestTrace, caller: Caller, hold: RateLimitHold
    ) -> Response:
        """Read the request's body; return a response: one that calls a replica when it is sent,
        or one with the number of the prompt's tokens.

        caller: tenant and key of the request.
        hold: the request's place in the rate limits that admitted it.

        Only requests of /v1/responses read or save stored responses.
        """
        scheduling = self._scheduling(request, caller)  # first: a bad header costs no parse
        received = await read_body(request)
        if self._schema in (CountTokensRequest, InputTokensRequest):
            self._reads.count(caller.tenant.name, 1 + len(received) / _BYTES_OF_READ)
        hold.body_is_here()  # before a large body waits for its tenant's parse lock
        body = await self._bodies.parse_json(request, received, self._schema, caller.tenant.name)
        trace.set_model(body.model)
        if self._of_batches:
            scheduling = replace(scheduling, background=True, max_queue_s=None)
        elif body.is_flex:
            scheduling = replace(scheduling, background=True)
        request_id: str = request.state.request_id
        session = request.headers.get(SESSION_HEADER) or body.session() or request_id
        response = body if isinstance(body, ResponsesRequest) else None
        items = StoredItems()
        if response is not None:
            items = await self._stored.items(response, caller.tenant.name)
        named = body.named_adapters(self._services.base_models)
        if named is None:
            model = await self._authenticator.resolve_model(body.model, caller, session)
        else:
            model = await self._authenticator.resolve_composition(
                body.model, named, caller, session
            )
        # No await from here until `using` is entered: a version that ends now is kept.
        base_model, served = model.base_model, self._services.base_models[model.base_model]
        stores = response is not None and self._stored.stores(response)
        defaults = served.sampling_of(model.defaults)
        body = body.with_sampling_defaults(defaults) if defaults else body
        context = CallContext(
            request_id,
            int(time.time()),
            caller.tenant.name,
            caller.max_context,
            scheduling,
            model,
            items,
            stores,
            defaults,
        )
        call = with_pooling(
            body.to_call(context), served.head, served.embedder, served.shape.hidden
        )
        trace.set_call(call, base_model, served.quantization, model.trained_on)
        max_context = self._services.engines.max_context(base_model)
        with self._services.uses.using(call.adapter):
            encoded = await self._services.encoders.encode(
                base_model, call, max_context, request.receive
            )
        trace.set_prompts(encoded.prompts)
        price = price_of(
            self._services.prices,
            base_model,
            call.adapter,
            background=call.scheduling.background,
        )
        counted = UsageObserver(self._services.usage, call, base_model, price)
        request.state.usage = counted  # for the line of a batch
        before_end = None if response is None else self._stored.saver(response, context, call)
        # Nor from here until the response enters it again.
        if call.endpoint.counts:
            with trace.answering():
                return _token_count(encoded, hold)
        return ReplicaResponse(
            call,
            self._services.engines.stream_answer(base_model, encoded),
            [trace, RateLimitObserver(hold, encoded, base_model, max_context, price), counted],
            self._services.first_item_timeout_s,
            before_end or body.before_end(),
            self._services.uses.using(call.adapter),
        )

    def _scheduling(self, request: Request, caller: Caller) -> SchedulingParams:
        """Return a request's parameters for the engine's scheduler.

        Raises InvalidInput if the header LOAD_HEADER is invalid.
        """
        tenant, max_queue_s = caller.tenant, self._services.max_queue_s
        max_load_s = _max_load_s(request.headers.get(LOAD_HEADER))
        return SchedulingParams(
            tenant.name, tenant.weight, caller.key.priority, max_queue_s, max_load_s
        )


class RateLimitObserver(RequestObserver):
    """Observer that reserves a call's tokens in the rate limits of its tenant and key, and at its
    end charges the tokens used: counts these in the limits, instead of the reserved ones.

    Complete answer: the tokens of FinalUsage are charged. Failure, or end of the gateway, before
    the first bytes: no tokens are charged. Client disconnected or replica lost during the answer:
    the larger of two numbers is charged, the reserved tokens, or the prompt's tokens plus the
    tokens of the last RunningUsage.
    """

    def __init__(
        self,
        hold: RateLimitHold,
        encoded: EncodedCall,
        base_model: str,
        max_context: int | None,
        price: Price = FREE,
    ) -> None:
        """Compute the tokens to reserve; nothing is reserved yet.

        hold: what the request has taken of its tenant's and key's rate limits.
        max_context: longest sequence that replicas take, tokens; None if unknown.
        price: price of the call's tokens.
        """
        self._hold = hold
        self._base_model, self._price = base_model, price
        self._reserved = _expected_tokens(encoded, max_context)
        self._background = encoded.call.scheduling.background
        self._taken = self._prompt_tokens = encoded.work.prompt_tokens
        self._answered = self._settled = False

    def __enter__(self) -> None:
        """Reserve the call's tokens.

        Raises RateLimited or Overloaded, after releasing the call's place in the limits.
        """
        try:
            self._hold.reserve(self._reserved, self._base_model, background=self._background)
        except BaseException:
            self._hold.release()
            raise

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        """Release the reserved tokens that the call did not use, and its place in the limit on
        concurrent requests.
        """
        if not self._settled:
            failed = error is not None and not self._answered
            tokens = 0 if failed else max(self._reserved, self._taken)
            prompt = min(self._prompt_tokens, tokens)
            self._hold.settle(tokens, self._price.cost(prompt, 0, tokens - prompt))
        self._hold.release()

    def on_item(self, item: StreamItem) -> None:
        """Record running usage and the time of the first token; charge the tokens of the final
        usage.
        """
        match item:
            case RunningUsage():
                self._taken = self._prompt_tokens + item.completion_tokens
            case AnswerHeader() if not item.is_first:
                self._hold.first_token()
            case FinalUsage():
                self._settled = True
                used = item.prompt_tokens, item.cached_tokens, item.completion_tokens
                tokens = item.prompt_tokens + item.completion_tokens
                self._hold.settle(tokens, self._price.cost(*used))

    def on_first_bytes(self) -> None:
        """Record the time of the first token; from now on a failure is charged."""
        self._answered = True
        self._hold.first_token()

    def headers(self) -> Headers:
        """Return the state of the tenant's and key's rate limits as response headers."""
        return _limit_headers(self._hold)


def _token_count(encoded: EncodedCall, hold: RateLimitHold) -> Response:
    """Return the response to a request to count tokens.

    hold: the request's place in the limits; the request uses no tokens of them.
    """
    tokens = sum(map(len, encoded.prompts))
    body = token_count_body(encoded.call.endpoint, tokens)
    response = Response(body, media_type="application/json")
    response.raw_headers += [*ignored_header(encoded.ignored), *_limit_headers(hold)]
    return response


def _limit_headers(hold: RateLimitHold) -> Headers:
    headers = limit_headers(hold.limit_statuses())
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def _max_load_s(header: str | None) -> float | None:
    """Return the seconds in LOAD_HEADER's value; None without the header.

    Raises InvalidInput unless the value is an integer from 0 to _LONGEST_LOAD_MS.
    """
    if header is None:
        return None
    if not re.fullmatch("[0-9]{1,9}", header) or int(header) > _LONGEST_LOAD_MS:
        raise InvalidInput(
            f"{LOAD_HEADER}: want milliseconds, an integer from 0 to {_LONGEST_LOAD_MS}",
            param=LOAD_HEADER,
        )
    return int(header) / 1000


def _expected_tokens(encoded: EncodedCall, max_context: int | None) -> int:
    """Return the number of tokens to reserve for a call, of its prompts and its answers.

    The number is an upper bound, or an estimate if the call sets no limit on its answers.

    max_context: longest sequence that replicas take, tokens; None if unknown.
    """
    call, work = encoded.call, encoded.work
    answer = _TYPICAL_ANSWER_TOKENS if call.max_tokens is None else call.max_tokens
    for limit in (call.max_context, max_context):
        if limit is not None:
            answer = min(answer, limit - max(map(len, encoded.prompts)))
    return work.prompt_tokens + work.sequences * answer
