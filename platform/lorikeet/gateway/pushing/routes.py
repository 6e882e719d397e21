"""PUT /v1/adapters/{name}/versions/{digest}: push a version; GET: show the state of its push."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple
from weakref import WeakValueDictionary

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect

from lorikeet.apis.body import ValueBudget
from lorikeet.catalog.names import check_alias, check_digest, check_name, check_selector
from lorikeet.catalog.records import AdapterRecord, BlobFacts, VersionRecord
from lorikeet.errors import InvalidAdapter, InvalidInput, NotFound, Unavailable
from lorikeet.gateway.admin.blob_validation import MAX_BYTES, check_base_model
from lorikeet.gateway.admin.registration import Registration, RegistrationRequest
from lorikeet.gateway.admin.serializers import Json
from lorikeet.gateway.auth import Caller, RequestAuthenticator, check_may_push
from lorikeet.gateway.body import (
    MAX_JSON_BYTES,
    bounded_parts,
    declared_bytes,
    split_parts,
    timed_parts,
)
from lorikeet.gateway.catalog_view import GatewayCatalogView
from lorikeet.gateway.client_connection import wait_for_disconnect
from lorikeet.gateway.error_responses import ACCEPTED, CREATED, OK
from lorikeet.gateway.parity import Nats, bounds_of, check_parity, parity_json
from lorikeet.gateway.pushing.push_folders import BLOB, PushFolder
from lorikeet.gateway.pushing.push_pipeline import MOST_OF_TENANT, Push, PushPipeline
from lorikeet.gateway.pushing.pushed_versions import PushedVersion
from lorikeet.gateway.received_file import receive_file
from lorikeet.gateway.services import Services
from lorikeet.parity.figures import Parity
from lorikeet.parity.probes import MAX_VALUES, parse_probes
from lorikeet.request_log.record import RequestTrace
from lorikeet.request_log.request_log import RequestLog
from lorikeet.tenancy.rate_limiter import RateLimiter, RateLimitHold
from lorikeet.tenancy.read_limiter import ReadLimiter
from lorikeet.usage.ledger import UsageAccount, UsageCounts
from lorikeet_engine.adapter_format import ValueScan

log = logging.getLogger(__name__)

Wait = Literal["none", "ready", "durable"]
"""State of a push that the response to its request waits for.

none: do not wait. ready: all replicas hold the version and all gateways know it. durable: the
store has it.
"""

LONGEST_LIFE_S = 86400
_DELIVER_AGAIN_S = 0.25
_LARGE_BYTES = 2**22
"""Smallest size in bytes of blobs that are announced to replicas before they have arrived. An
announcement of a smaller blob would come too late.
"""
_MOST_WAITING = 16
"""Maximum number of requests of one tenant that wait for a push's state at once on one gateway,
because each occupies one of the requests that the gateway runs at once.
"""


class PushQuery(BaseModel):
    """Query parameters of a push. Unknown parameters are refused.

    alias: alias to move to the version.
    base_model: base model that the adapter was trained on; None: the one that the blob names.
    wait: state that the response waits for, at most timeout_s seconds.
    lifetime_s: seconds until the version expires. A version with a lifetime never becomes durable:
        the catalog's log never has it.
    keep: number of the adapter's expiring versions to keep, newest first; only with lifetime_s.
    defaults_of: alias or number of the adapter's version whose own request defaults the version
        gets; None: the base model's.
    probes_bytes: size of the probes, the trainer's log-probabilities as JSON, which precede the
        blob in the body; None: no probes.
    warn_above, refuse_above: bounds on the mean difference from the trainer's log-probabilities, in
        nats, above which the parity proof warns or refuses; None: the defaults.
    """

    model_config = ConfigDict(extra="forbid")
    alias: str | None = None
    base_model: str | None = None
    wait: Wait = "ready"
    timeout_s: Annotated[float, Field(ge=0, le=600)] = 60.0
    lifetime_s: Annotated[float, Field(ge=1, le=LONGEST_LIFE_S)] | None = None
    keep: Annotated[int, Field(ge=1, le=MOST_OF_TENANT - 1)] | None = None
    defaults_of: str | None = None
    probes_bytes: Annotated[int, Field(ge=1, le=MAX_JSON_BYTES)] | None = None
    warn_above: Nats | None = None
    refuse_above: Nats | None = None

    def check(self) -> None:
        """Raise InvalidInput if the alias is invalid or two of the query's fields exclude each
        other.
        """
        if self.alias is not None:
            check_alias(self.alias)
        if self.defaults_of is not None:
            check_selector(self.defaults_of)
        if self.keep is not None and self.lifetime_s is None:
            raise InvalidInput("keep: is for versions with a lifetime_s", param="keep")
        if self.wait == "durable" and self.lifetime_s is not None:
            raise InvalidInput("wait: a version with a lifetime_s is never durable", param="wait")
        bounds_of(self.warn_above, self.refuse_above)


class AdmittedPusher(NamedTuple):
    """Publisher whose request passed the checks of key and limits.

    caller: tenant and key.
    hold: the request's place in the rate limits of tenant and key.
    trace: record of the request.
    """

    caller: Caller
    hold: RateLimitHold
    trace: RequestTrace


class PushRequest(NamedTuple):
    """Request to push a version.

    name: name of the adapter.
    digest: SHA-256 that the blob must have.
    like: version whose own request defaults the version gets; None: the base model's.
    probes: the probes, the trainer's log-probabilities as JSON; empty without probes.
    """

    pusher: AdmittedPusher
    name: str
    digest: str
    query: PushQuery
    like: VersionRecord | None = None
    probes: bytes = b""

    def registration(self) -> RegistrationRequest:
        """Return the RegistrationRequest used to check the pushed blob."""
        tenant, key = self.pusher.caller
        base_model = self.query.base_model
        return RegistrationRequest(tenant.name, self.name, key.id, base_model=base_model)

    def version(self, facts: BlobFacts) -> PushedVersion:
        """Return the version to push.

        facts: facts about the version's blob, from the check of the blob.

        Raises InvalidAdapter if `like` has another base model.
        """
        like = self.like
        if like is not None and like.base_model != facts.base_model:
            raise InvalidAdapter(
                f"defaults_of: version {like.version} is of {like.base_model}, and this one of "
                f"{facts.base_model}: leave defaults_of out",
                param="defaults_of",
            )
        (owner, key), now, query = self.pusher.caller, time.time(), self.query
        expires = None if query.lifetime_s is None else now + query.lifetime_s
        return PushedVersion(
            *(owner.name, self.name, facts, query.alias, now),
            expires=expires,
            keep=query.keep,
            left_s=query.lifetime_s,
            actor=key.id,
            defaults=None if like is None else like.defaults,
        )


class Progress(NamedTuple):
    """State of a pushed version that requests can already name as their model.

    number: version number in the catalog's log; None until the log has the version.
    ready: whether all replicas have the version.
    expires: end of the version's lifetime, Unix seconds; None: never.
    """

    adapter: AdapterRecord
    version: VersionRecord
    number: int | None
    ready: bool
    expires: float | None

    def reached(self, wanted: Wait) -> bool:
        """Return whether the version has reached the state that a client waits for."""
        states = {"none": True, "ready": self.ready, "durable": self.number is not None}
        return states[wanted]


def progress_json(progress: Progress) -> Json:
    """Return as JSON the state of a pushed version that requests can already name as their
    model.
    """
    record, version = progress.adapter, progress.version
    aliases = record.aliases_of(version.version)
    return _version_json(
        record.label,
        version,
        version.created,
        aliases,
        version=progress.number,
        ready=progress.ready,
        expires=progress.expires,
    )


def taken_json(version: PushedVersion) -> Json:
    """Return as JSON the state of an accepted version that requests cannot name as their
    model yet.
    """
    label = f"{version.tenant}/{version.name}"
    reached = version.facts, version.created, ()
    return _version_json(label, *reached, version=None, ready=False, expires=version.expires)


def _version_json(
    label: str,
    facts: BlobFacts,
    created: float,
    aliases: Sequence[str],
    *,
    version: int | None,
    ready: bool,
    expires: float | None,
) -> Json:
    return {
        "object": "adapter.version",
        "model": f"{label}@{facts.digest}",
        "adapter": label,
        "digest": facts.digest,
        "version": version,
        "ready": ready,
        "durable": version is not None,
        "aliases": list(aliases),
        "base_model": facts.base_model,
        "size_bytes": facts.size_bytes,
        "max_rank": facts.max_rank,
        "gpu_bytes": facts.gpu_bytes,
        "created": created,
        "expires": expires,
        "parity": parity_json(facts.parity),
    }


def push_routes(endpoints: "PushEndpoints") -> APIRouter:
    """Return the two routes that push a version and show the state of its push."""
    router = APIRouter()
    path = "/v1/adapters/{name}/versions/{digest}"
    router.add_api_route(path, endpoints.push, methods=["PUT"])
    router.add_api_route(path, endpoints.show, methods=["GET"])
    return router


class PushEndpoints:
    """Endpoints that push a version and show the state of its push, for publish keys.

    A tenant's pushes are checked one after another.

    registration: validator of blobs.
    reads: tenants' limits on requests that generate nothing, in which pushes count, too.
    """

    def __init__(
        self,
        services: Services,
        authenticator: RequestAuthenticator,
        rate_limiter: RateLimiter,
        request_log: RequestLog,
        catalog_view: GatewayCatalogView,
        registration: Registration,
        pipeline: PushPipeline,
        reads: ReadLimiter,
    ) -> None:
        self._services, self._authenticator = services, authenticator
        self._rate_limiter, self._request_log = rate_limiter, request_log
        self._catalog_view, self._registration = catalog_view, registration
        self._pipeline, self._reads = pipeline, reads
        self._check_locks = WeakValueDictionary[str, asyncio.Lock]()
        self._waiting = Counter[str]()  # by tenant

    async def push(
        self,
        request: Request,
        response: Response,
        name: str,
        digest: str,
        query: Annotated[PushQuery, Query()],
    ) -> Json:
        """Push the request's body, a blob, as a version of an adapter.

        Repeating the request has no further effect (idempotent).

        name: name of the adapter.
        digest: SHA-256 that the body must have.
        """
        async with self.admitted(request, name, digest) as pusher:
            self._reads.count(pusher.caller.tenant.name)
            check_name(name, "name")
            check_digest(digest)
            query.check()
            like = await self._like(pusher.caller.tenant.name, name, query.defaults_of)
            push_request = PushRequest(pusher, name, digest, query, like)
            key = pusher.caller.tenant.name, name, digest
            is_new = await self._progress(*key) is None
            with self._pipeline.receiving(key):
                push = await self._take(request, push_request)
            await self.wait(request, push, query)
            push.note_stages(pusher.trace)
            progress = await self._progress(*key)
        late = query.wait == "durable" and not push.ended.is_set()  # its alias has not moved yet
        if progress is None or late or not progress.reached(query.wait):
            response.status_code = ACCEPTED
        else:
            response.status_code = CREATED if is_new else OK
        shown = taken_json(push.version) if progress is None else progress_json(progress)
        if (parity := push.version.facts.parity) is not None:  # newer than a recorded version's
            shown["parity"] = parity_json(parity)
        return shown

    async def show(self, request: Request, name: str, digest: str) -> Json:
        """Show the state of a pushed version."""
        async with self.admitted(request, name, digest) as pusher:
            pusher.hold.body_is_here()
            tenant = pusher.caller.tenant.name
            with self._reads.reading(tenant):
                progress = await self._progress(tenant, name, digest)
            if progress is None:
                raise NotFound(
                    f"there is no version {digest[:64]} of {tenant}/{name}, or it was lost before "
                    "it was durable: push it",
                    param="digest",
                )
            return progress_json(progress)

    async def _like(self, tenant: str, name: str, selector: str | None) -> VersionRecord | None:
        """Return the version of an adapter that a selector names; None without a selector.

        selector: alias or number of the version.

        Raises InvalidInput if there is no such version.
        """
        if selector is None:
            return None
        record = await self._catalog_view.ask(
            lambda state: self._pipeline.pushed.applied_to(state, tenant).find(tenant, name)
        )
        version = None if record is None else record.select(selector)
        if version is None:
            raise InvalidInput(
                f"defaults_of: {tenant}/{name}@{selector} is no usable version",
                param="defaults_of",
            )
        return version

    async def _take(self, request: Request, push_request: PushRequest) -> Push:
        """Receive and check a blob, and begin its push. Raises LorikeetError if the blob is
        refused.
        """
        tenant, hold = push_request.pusher.caller.tenant, push_request.pusher.hold
        if push_request.query.base_model:
            check_base_model(push_request.query.base_model, self._services.base_models)
        limits = await self._registration.limits(tenant.name)
        probes_bytes = push_request.query.probes_bytes or 0
        max_bytes = limits.max_bytes + probes_bytes
        body_bytes = declared_bytes(request, max_bytes, MAX_BYTES)
        if body_bytes is None:
            raise InvalidInput("send Content-Length, the size of the body", param="content-length")
        size_bytes = body_bytes - probes_bytes
        if size_bytes < 0:
            raise InvalidInput(
                f"probes_bytes={probes_bytes} of a body of {body_bytes} bytes: want the probes "
                "before the blob",
                param="probes_bytes",
            )
        hold.take_bytes(body_bytes)
        folder = self._pipeline.folders.make()
        async with AsyncExitStack() as refused:
            refused.push_async_callback(asyncio.to_thread, folder.cleanup)
            blob = Path(folder.name) / BLOB
            parts = timed_parts(bounded_parts(request, max_bytes))
            probes, parts = await split_parts(parts, probes_bytes)
            push_request = push_request._replace(probes=probes)
            scan, workers = ValueScan(size_bytes), self._registration.workers
            blob.touch()
            expecting = asyncio.create_task(self._expect(push_request, blob, size_bytes))
            try:
                async with self._pipeline.space.claimed(tenant.name, size_bytes) as body:
                    found = await receive_file(body.counted(parts), blob, workers, scan)
            finally:
                expecting.cancel()
            hold.body_is_here()
            push_request.pusher.trace.end_stage("receive")
            if found != push_request.digest:
                raise InvalidAdapter(
                    f"the body's digest is {found}, not the one in the address: send it again",
                    param="digest",
                )
            push = await self.begin(push_request, folder, scan)
            if push.folder is folder:
                refused.pop_all()  # from here on the pipeline removes the folder
        return push

    async def begin(
        self, push_request: PushRequest, folder: PushFolder, scan: ValueScan | None = None
    ) -> Push:
        """Check a blob and begin its push, or join a running push of the same blob.

        folder: folder of the blob, whose digest `push_request` has.
        scan: scan of the tensors' values, if already made.

        Raises LorikeetError if the blob is refused.
        """
        pusher, blob = push_request.pusher, Path(folder.name) / BLOB
        tenant, key = pusher.caller
        async with self._check_locks.setdefault(tenant.name, asyncio.Lock()):
            facts = await self._registration.validate(
                push_request.registration(), blob, push_request.digest, scan
            )
            version = push_request.version(facts)
            await self._pipeline.check_quota(version)
            pusher.trace.end_stage("check")
            if push_request.probes:
                parity = await self._prove(push_request, version, blob)
                version = replace(version, facts=replace(facts, parity=parity))
                pusher.trace.end_stage("parity")
            push = self._pipeline.begin(version, folder)
        self._count(push.version)
        if version.expires is not None:
            _note_ephemeral(version, key.id, pusher.trace.request_id)
        return push

    async def _prove(self, push_request: PushRequest, version: PushedVersion, blob: Path) -> Parity:
        """Deliver a blob to all replicas and have one of them compare the adapter's
        log-probabilities with the trainer's (parity proof).

        Raises InvalidInput for malformed probes, Unavailable if not all replicas take the adapter
        in time, InvalidAdapter if the proof is refused. After an error replicas may evict the
        adapter.
        """
        ValueBudget(MAX_VALUES).spend(push_request.probes)
        probes = await self._registration.run(parse_probes, push_request.probes)
        services, query, base_model = self._services, push_request.query, version.facts.base_model
        ref = await self._registration.next_ref(push_request.registration(), version.facts)
        bounds = bounds_of(query.warn_above, query.refuse_above)
        try:
            async with asyncio.timeout(services.first_item_timeout_s):
                while not await services.engines.deliver(base_model, ref, blob):
                    await asyncio.sleep(_DELIVER_AGAIN_S)
            proof_id = push_request.pusher.trace.request_id
            about = base_model, ref, proof_id, probes, bounds, version.defaults
            return await check_parity(services, *about)
        except BaseException as error:
            await services.engines.release(base_model, ref.digest)
            if isinstance(error, TimeoutError):
                raise Unavailable(
                    f"not all replicas of {base_model} took the adapter to score its probes: see "
                    "`lorikeet status`, then push it again"
                ) from error
            raise

    def _count(self, version: PushedVersion) -> None:
        size_bytes = version.facts.size_bytes
        self._services.metrics.pushes.taken(size_bytes)
        adapter = f"{version.tenant}/{version.name}"
        account = UsageAccount(version.tenant, version.facts.base_model, adapter)
        self._services.usage.add(account, UsageCounts(pushes=1, pushed_bytes=size_bytes))

    async def _expect(self, push_request: PushRequest, blob: Path, size_bytes: int) -> None:
        """Announce a large blob to replicas while it arrives, if its base model is already known.

        blob: file to which the blob is being written.
        """
        base_models = self._services.base_models
        name = push_request.query.base_model or next(iter(base_models))
        if size_bytes >= _LARGE_BYTES and (push_request.query.base_model or len(base_models) == 1):
            await self._services.engines.expect(name, push_request.digest, blob, size_bytes)

    async def wait(self, request: Request, push: Push, query: PushQuery) -> None:
        """Wait until a push has the state that its client asks for, or until its timeout.

        Returns at once if the client asks for no state, or if _MOST_WAITING requests of the tenant
        wait already. Raises the error that ended the push, and ClientDisconnect if the client
        disconnects meanwhile.
        """
        tenant = push.version.tenant
        if query.wait == "none" or self._waiting[tenant] >= _MOST_WAITING:
            return
        self._waiting[tenant] += 1
        wanted = push.ready if query.wait == "ready" else push.ended
        waiting = asyncio.create_task(push.wait_for(wanted, query.timeout_s))
        leaving = asyncio.create_task(wait_for_disconnect(request.receive))
        try:
            await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise ClientDisconnect
            waiting.result()
        finally:
            waiting.cancel()
            leaving.cancel()
            self._waiting[tenant] -= 1

    @asynccontextmanager
    async def admitted(
        self, request: Request, name: str | None = None, digest: str = ""
    ) -> AsyncGenerator[AdmittedPusher, None]:
        """Check a request's key and limits and record the request; yield its publisher.

        name: name of the adapter, which the key must allow; None: not yet known.
        digest: SHA-256 of the blob, for the record.

        Raises LorikeetError if the key or a limit forbids the request.
        """
        route, traceparent = request.scope["route"].path, request.headers.get("traceparent")
        request_id = request.state.request_id
        trace = self._request_log.trace(request_id, route, traceparent, request.method)
        with trace.answering():
            caller = await self._authenticator.publisher(request)
            if name is not None:
                check_may_push(caller.key, name)
                trace.set_model(f"{caller.tenant.name}/{name}@{digest}")
            trace.set_caller(caller.tenant.name, caller.key.id)
            hold = self._rate_limiter.check(caller.tenant, caller.key, takes_tokens=False)
            try:
                yield AdmittedPusher(caller, hold, trace)
            finally:
                hold.release()

    async def _progress(self, tenant: str, name: str, digest: str) -> Progress | None:
        """Return the state of a pushed version; None if requests cannot name it as their model."""
        view = self._catalog_view
        known = await view.ask(
            lambda state: self._pipeline.pushed.applied_to(state, tenant).find(tenant, name)
        )
        pushed = self._pipeline.pushed.get((tenant, name, digest))
        if known is None:
            return None
        if pushed is None:
            version = known.with_digest(digest)
        else:
            version = known.registered(digest, pushed.defaults)
        if version is None:
            return None
        recorded = await view.ask(lambda state: state.find(tenant, name))
        numbered = recorded.registered(digest, version.defaults) if recorded else None
        ready = await self._pipeline.is_ready((tenant, name, digest), version.base_model)
        expires = pushed.expires if pushed else None
        return Progress(known, version, numbered.version if numbered else None, ready, expires)


def _note_ephemeral(version: PushedVersion, key_id: str, request_id: str) -> None:
    """Log a push with a lifetime to the gateway's own log, since the catalog's log never records
    it.
    """
    about = {
        "adapter": f"{version.tenant}/{version.name}",
        "digest": version.facts.digest,
        "alias": version.alias,
        "expires": version.expires,
        "key": key_id,
        "request_id": request_id,
    }
    log.info("ephemeral_push", extra=about)
