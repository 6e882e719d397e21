"""Batches of tenants, in the shape of OpenAI's API: /v1/batches."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Query, Request
from pydantic import Field

from lorikeet.apis.body import Body
from lorikeet.apis.fields import Metadata
from lorikeet.batch_store import WINDOW_S, BatchRecord, BatchStore
from lorikeet.catalog.records import TenantRecord
from lorikeet.errors import (
    Forbidden,
    InvalidInput,
    NotFound,
    RateLimited,
    UnknownKey,
    UnsupportedParameter,
)
from lorikeet.file_store import LIFETIME_S, SHORTEST_S, FileStore, sortable_id
from lorikeet.gateway.auth import RequestAuthenticator
from lorikeet.gateway.batches.runner import BatchRunner
from lorikeet.gateway.body import read_json
from lorikeet.gateway.generate import BATCH_ENDPOINTS
from lorikeet.gateway.reads import TenantReads
from lorikeet.gateway.routes.files import StoredFiles, list_json

T = TypeVar("T")
Json = dict[str, Any]

_READS = 5
"""Number of reads that a request for a batch costs, for the requests to the store."""
_BATCHES_OF_READ = 4
"""Number of listed batches that cost one more read."""
_FULL_S = 60.0


class ExpiresAfter(Body):
    """Lifetime of a batch's output file, from the file's creation.

    anchor: start of the lifetime; only the file's creation is supported.
    """

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=SHORTEST_S, le=LIFETIME_S)]


class BatchRequest(Body):
    """Request of POST /v1/batches.

    input_file_id: uploaded file with the requests, one a line.
    endpoint: path of the API that answers all requests, such as /v1/chat/completions.
    completion_window: time after which unanswered requests expire.
    metadata: the client's own key-value pairs, shown with the batch.
    output_expires_after: lifetime of the output file; None: the longest.
    """

    input_file_id: Annotated[str, Field(max_length=256)]
    endpoint: Annotated[str, Field(max_length=256)]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


def batch_routes(
    authenticator: RequestAuthenticator,
    reads: TenantReads,
    files: StoredFiles,
    runner: BatchRunner | None,
) -> APIRouter:
    """Return the routes of batches. Each call counts as several reads.

    reads: check of each request's key and of its tenant's limit on reads.
    runner: loop that runs batches in this gateway; None: files and batches are off, and each call
        says so.
    """
    router = APIRouter(prefix="/v1/batches")

    async def call(ask: Callable[[BatchRunner], T]) -> T:
        """Return the result of `ask`, called with the runner on a thread.

        Raises NotFound if batches are off.
        """

        def with_runner(_: FileStore) -> T:
            assert runner is not None, "files are on"
            return ask(runner)

        return await files.call(with_runner)

    def wake() -> None:
        if runner is not None:
            runner.wake()

    @router.post("")
    async def create_batch(request: Request) -> Json:
        async with reads.admitted(request, _READS) as caller:
            tenant, key_id = caller.tenant, caller.key.id
            try:
                await authenticator.caller_of_batch(key_id)
            except UnknownKey:
                raise Forbidden("a token ends before a batch does: make it with a key") from None
            body = await read_json(request, BatchRequest)
            made = await call(lambda run: _create(run.batches, run.files, tenant, key_id, body))
        wake()
        return made

    @router.get("")
    async def list_batches(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        after: str | None = None,
    ) -> Json:
        async with reads.admitted(request, _READS + limit / _BATCHES_OF_READ) as caller:
            tenant = caller.tenant.name
            page, more = await call(lambda run: run.batches.page(tenant, limit, after))
            return list_json(page, more)

    @router.get("/{batch_id}")
    async def get_batch(request: Request, batch_id: str) -> Json:
        async with reads.admitted(request, _READS) as caller:
            return await call(lambda run: run.batches.json(caller.tenant.name, batch_id))

    @router.post("/{batch_id}/cancel")
    async def cancel_batch(request: Request, batch_id: str) -> Json:
        async with reads.admitted(request, _READS) as caller:
            shown = await call(lambda run: run.batches.cancel(caller.tenant.name, batch_id))
        wake()
        return shown

    return router


def _create(
    batches: BatchStore, files: FileStore, tenant: TenantRecord, key_id: str, body: BatchRequest
) -> Json:
    """Save a new batch and return its JSON.

    Raises UnsupportedParameter for another endpoint, NotFound without such a file, InvalidInput for
    another file than an upload, RateLimited for too many open batches, InsufficientQuota if the
    tenant's files, output included, are beyond its limits, StoreError if the store fails.
    """
    if body.endpoint not in BATCH_ENDPOINTS:
        problem = f"endpoint: want one of {', '.join(BATCH_ENDPOINTS)}"
        raise UnsupportedParameter(problem, param="endpoint")
    try:
        if files.get(tenant.name, body.input_file_id).purpose != "batch":
            raise InvalidInput("input_file_id: want a file of purpose batch", param="input_file_id")
    except NotFound as error:
        raise NotFound(f"input_file_id: {error.message}", param="input_file_id") from None
    files.check_quota(tenant)
    now, after = batches.clock(), body.output_expires_after
    batch = BatchRecord(
        f"batch_{sortable_id(now)}",
        tenant.name,
        key_id,
        body.endpoint,
        body.input_file_id,
        int(now),
        int(now) + WINDOW_S,
        body.metadata,
        LIFETIME_S if after is None else after.seconds,
    )
    with batches.creating:
        _check_open(batches, tenant)
        batches.create(batch)
    return batches.json(tenant.name, batch.id)


def _check_open(batches: BatchStore, tenant: TenantRecord) -> None:
    """Raise RateLimited if a tenant has as many batches that have not ended as it may have."""
    open_now, most = len(batches.open_batches(tenant.name)), batches.max_open(tenant)
    if open_now >= most:
        raise RateLimited(
            f"{open_now} batches of this tenant have not ended, and it may have {most}: wait for "
            "one to end, cancel one, or have your admin raise the limit",
            retry_after_s=_FULL_S,
        )
