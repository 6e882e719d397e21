"""PUT /v1/adapters/{name}/versions/{digest}: push a version of an adapter; GET: how far it is."""

import asyncio
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

from fastapi import APIRouter, Request, Response

from lorikeet.catalog.names import check_alias, check_digest, check_name
from lorikeet.catalog.records import AdapterRecord, VersionRecord
from lorikeet.errors import InvalidAdapter, InvalidInput, NotFound
from lorikeet.gateway.admin.registration import Registration, RegistrationRequest
from lorikeet.gateway.admin.serializers import Json
from lorikeet.gateway.auth import Caller, RequestAuthenticator
from lorikeet.gateway.body import in_time, limited
from lorikeet.gateway.catalog_view import GatewayCatalogView
from lorikeet.gateway.error_responses import CREATED, OK
from lorikeet.gateway.received_file import receive_file
from lorikeet.gateway.services import Services
from lorikeet.request_log.request_log import RequestLog
from lorikeet.tenancy.rate_limiter import RateLimiter, RateLimitHold


class Pusher(NamedTuple):
    """Who pushes, and the request's way through the limits."""

    caller: Caller
    hold: RateLimitHold


class FoundVersion(NamedTuple):
    """A usable version and its adapter."""

    adapter: AdapterRecord
    version: VersionRecord


def push_routes(endpoints: "PushEndpoints") -> APIRouter:
    """The two routes of one version."""
    router = APIRouter()
    path = "/v1/adapters/{name}/versions/{digest}"
    router.add_api_route(path, endpoints.push, methods=["PUT"])
    router.add_api_route(path, endpoints.show, methods=["GET"])
    return router


class PushEndpoints:
    """What publish keys can ask. A tenant's pushes are checked and recorded one after another."""

    def __init__(
        self,
        services: Services,
        authenticator: RequestAuthenticator,
        rate_limiter: RateLimiter,
        request_log: RequestLog,
        catalog_view: GatewayCatalogView,
        registration: Registration,
    ) -> None:
        self._services, self._authenticator = services, authenticator
        self._rate_limiter, self._request_log = rate_limiter, request_log
        self._catalog_view, self._registration = catalog_view, registration
        self._turns = WeakValueDictionary[str, asyncio.Lock]()

    async def push(
        self,
        request: Request,
        response: Response,
        name: str,
        digest: str,
        alias: str | None = None,
        base_model: str | None = None,
    ) -> Json:
        """Take the body, a blob with this SHA-256, as a version. The same again changes nothing."""
        async with self._limited(request, name, digest) as pusher:
            tenant, key = pusher.caller
            check_name(name, "name")
            check_digest(digest)
            alias = alias and check_alias(alias)
            order = RegistrationRequest(
                tenant.name, name, key.id, base_model=base_model, alias=alias
            )
            limits = await self._registration.check(tenant.name, base_model)
            size = _content_length(request)
            body = in_time(limited(request, limits.max_bytes))
            pusher.hold.take_bytes(size)
            with tempfile.TemporaryDirectory(prefix="lorikeet-push-") as folder:
                blob = Path(folder) / "adapter.safetensors"
                found = await receive_file(body, blob, self._registration.workers)
                pusher.hold.body_is_here()
                if found != digest:
                    raise InvalidAdapter(
                        f"the body has the digest {found} and not the address's: send it again",
                        param="digest",
                    )
                async with self._turns.setdefault(tenant.name, asyncio.Lock()):
                    facts = await self._registration.validate(order, blob)
                    made = await self._registration.record(order, blob, facts)
        response.status_code = CREATED if made.is_new else OK
        return _version_json(await self._found(tenant.name, name, digest))

    async def show(self, request: Request, name: str, digest: str) -> Json:
        """Tell how far a pushed version is."""
        async with self._limited(request, name, digest) as pusher:
            pusher.hold.body_is_here()
            tenant = pusher.caller.tenant.name
            await self._catalog_view.refresh()
            return _version_json(await self._found(tenant, name, digest))

    @asynccontextmanager
    async def _limited(
        self, request: Request, name: str, digest: str
    ) -> AsyncGenerator[Pusher, None]:
        """Hold a request to its limits, and note it. Raises LorikeetError."""
        route, traceparent = request.scope["route"].path, request.headers.get("traceparent")
        request_id = request.state.request_id
        trace = self._request_log.trace(request_id, route, traceparent, request.method)
        with trace.answering():
            caller = await self._authenticator.publisher(request, name)
            trace.set_caller(caller.tenant.name, caller.key.id)
            trace.set_model(f"{caller.tenant.name}/{name}@{digest}")
            hold = self._rate_limiter.check(caller.tenant, caller.key)
            try:
                yield Pusher(caller, hold)
            finally:
                hold.release()

    async def _found(self, tenant: str, name: str, digest: str) -> FoundVersion:
        """Return the usable version with this digest. Raises NotFound."""
        record = await self._catalog_view.ask(lambda state: state.find(tenant, name))
        version = record.with_digest(digest) if record else None
        if record is None or version is None:
            raise NotFound(
                f"there is no version {digest} of {tenant}/{name}: push it", param="digest"
            )
        return FoundVersion(record, version)


def _content_length(request: Request) -> int:
    """Return the size of the body. Raises InvalidInput."""
    declared = request.headers.get("content-length", "")
    if not declared.isdecimal():
        raise InvalidInput("send Content-Length, the size of the body", param="content-length")
    return int(declared)


def _version_json(found: FoundVersion) -> Json:
    record, version = found
    return {
        "object": "adapter.version",
        "model": f"{record.label}@{version.digest}",
        "adapter": record.label,
        "digest": version.digest,
        "version": version.version,
        "durable": True,
        "aliases": list(record.aliases_of(version.version)),
        "base_model": version.base_model,
        "size_bytes": version.size_bytes,
        "max_rank": version.max_rank,
        "gpu_bytes": version.gpu_bytes,
        "created": version.created,
    }
