"""Stored responses by their ids: GET and DELETE /v1/responses/{id}, GET …/input_items."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request

from lorikeet.errors import InvalidInput, UnsupportedParameter
from lorikeet.gateway.auth import RequestAuthenticator
from lorikeet.gateway.stored_responses import StoredResponses
from lorikeet.request_log.request_log import RequestLog
from lorikeet.response_store import Json
from lorikeet.tenancy.rate_limiter import RateLimiter
from lorikeet.tenancy.read_limiter import ReadLimiter

Order = Literal["asc", "desc"]
Limit = Annotated[int, Query(ge=1, le=100)]


def response_routes(
    authenticator: RequestAuthenticator,
    rate_limiter: RateLimiter,
    request_log: RequestLog,
    stored: StoredResponses,
    reads: ReadLimiter,
) -> APIRouter:
    """Return the routes of stored responses.

    Each call counts in the rate limits as a request without tokens, and as a read.
    """
    router = APIRouter(prefix="/v1/responses")

    admitted = partial(_admitted, authenticator, rate_limiter, request_log, reads)

    @router.get("/{response_id}")
    async def get_response(request: Request, response_id: str, stream: bool = False) -> Json:
        async with admitted(request) as tenant:
            if stream:
                problem = "not supported here: stream: a stored response is sent whole"
                raise UnsupportedParameter(problem, param="stream")
            return (await stored.get(tenant, response_id)).response

    @router.delete("/{response_id}")
    async def delete_response(request: Request, response_id: str) -> Json:
        async with admitted(request) as tenant:
            await stored.delete(tenant, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.get("/{response_id}/input_items")
    async def list_input_items(
        request: Request,
        response_id: str,
        limit: Limit = 20,
        after: str | None = None,
        order: Order = "desc",
    ) -> Json:
        async with admitted(request) as tenant:
            items = (await stored.get(tenant, response_id)).input_items
            return page(items if order == "asc" else items[::-1], limit, after)

    return router


@asynccontextmanager
async def _admitted(
    authenticator: RequestAuthenticator,
    rate_limiter: RateLimiter,
    request_log: RequestLog,
    reads: ReadLimiter,
    request: Request,
) -> AsyncGenerator[str, None]:
    """Check a request's key and limits and record the request; yield the tenant's name.

    Raises LorikeetError if the key or a limit forbids the request.
    """
    route, traceparent = request.scope["route"].path, request.headers.get("traceparent")
    trace = request_log.trace(request.state.request_id, route, traceparent, request.method)
    with trace.answering():
        caller = await authenticator.caller(request)
        trace.set_caller(caller.tenant.name, caller.key.id)
        hold = rate_limiter.check(caller.tenant, caller.key)
        try:
            hold.body_is_here()
            with reads.reading(caller.tenant.name):
                yield caller.tenant.name
        finally:
            hold.release()


def page(items: Sequence[Json], limit: int, after: str | None) -> dict[str, Any]:
    """Return a page of at most `limit` items.

    after: id of the last item of the previous page; None: the first page.

    Raises InvalidInput if no item has the id `after`.
    """
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise InvalidInput("after: want the id of one of these items", param="after")
    start = 0 if after is None else ids.index(after) + 1
    shown = items[start : start + limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": start + limit < len(items),
    }
