"""Pipeline of pushed versions: delivered to all replicas first, then written to the store.

A push becomes *ready* once all replicas of its base model hold the adapter and all gateways know
the version. A push becomes *durable* once blob and log entry are in the store; an unreachable store
is retried without end. A push with a lifetime never becomes durable: it stays in the pipeline until
it expires or newer versions replace it. A version that ends without being durable is kept on the
replicas until the requests that any gateway accepted for it have ended.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn
from weakref import WeakValueDictionary

from lorikeet.catalog.rules.adapters import register
from lorikeet.catalog.state import PartitionsNotRead
from lorikeet.errors import Conflict, LorikeetError, Overloaded, StoreError, Unavailable
from lorikeet.gateway.catalog_view import GatewayCatalogView
from lorikeet.gateway.pushing.body_space import BodySpace
from lorikeet.gateway.pushing.push_folders import BLOB, PushFolder, PushFolders
from lorikeet.gateway.pushing.pushed_versions import Key, PushedVersion, PushedVersions
from lorikeet.gateway.services import Services
from lorikeet.request_log.record import RequestTrace
from lorikeet.retry_after import STORE_AWAY_S
from lorikeet_engine.adapter import AdapterRef

log = logging.getLogger(__name__)

_QUESTION, _USES_QUESTION, _END_QUESTION = "pushed", "uses_pushed", "end_pushed"
MOST_OF_TENANT = 16
"""Maximum number of one tenant's pushes in a gateway at once. Each blob lies on the gateway's disk
and on all hosts.
"""
MOST_ENDED = 16
"""Maximum number of one tenant's ended versions that are kept for requests in a gateway at once."""
_KEEP_S, _AGAIN_S = 2.0, 0.25
_PATIENCE_S = 10.0
"""Seconds after which a version is written to the store even if some replicas do not have it
yet.
"""
_CLOSING_S = 20.0
_STORERS = 4
_FAULT = "the version could not be recorded, due to a fault of the service: send it again"


class Push:
    """Push of one version, in the pipeline of the gateway that received it.

    version: the pushed version; replaced when the same blob is pushed again.
    folder: folder of the blob; removed after the push has ended and, if the store lacks the
        version, requests no longer use it.
    ready: set when all replicas have the adapter and all gateways know the version.
    ended: set when the push has left the pipeline.
    ends_s: end of the version's lifetime, in seconds of time.monotonic(); None: no end.
    failure: error that ended the push; None if none did.
    """

    def __init__(self, version: PushedVersion, folder: PushFolder) -> None:
        self.version, self.folder = version, folder
        self.blob = Path(folder.name) / BLOB
        self.ready, self.ended = asyncio.Event(), asyncio.Event()
        self.failure: LorikeetError | None = None
        self.begun_s = time.monotonic()
        self.set_lifetime(version.left_s)
        self.delivered_s: float | None = None
        self.ready_s: float | None = None

    def set_lifetime(self, left_s: float | None) -> None:
        """Set the end of the version's lifetime, on the monotonic clock, which is never adjusted.

        left_s: seconds from now; None: no end.
        """
        self.ends_s = None if left_s is None else time.monotonic() + left_s

    def note_stages(self, trace: RequestTrace) -> None:
        """Record the completed stages of the push, called deliver and announce, in a request's
        trace.
        """
        for name, at_s in (("deliver", self.delivered_s), ("announce", self.ready_s)):
            if at_s is not None:
                trace.end_stage(name, at_s)

    async def wait_for(self, event: asyncio.Event, timeout_s: float) -> None:
        """Wait until `event` is set or the push has ended, at most `timeout_s` seconds.

        Raises the error that ended the push, if any.
        """
        waits = {asyncio.create_task(each.wait()) for each in (event, self.ended)}
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self.failure is not None:
            raise self.failure


class PushPipeline:
    """Pipeline of the pushes that one gateway received, from checked blob to entry in the catalog's
    log.

    Store writes run in threads of their own, at most one per tenant, so that a store that does not
    answer never delays a push from becoming ready. For use in one event loop.

    pushed: versions that are ready, here or at another gateway, and not durable: not yet in the
        catalog's log.
    folders: temporary folders of pushed blobs.
    space: disk space for the blobs that are being received.
    """

    def __init__(self, services: Services, catalog_view: GatewayCatalogView) -> None:
        self._services, self._catalog_view = services, catalog_view
        self.pushed, self.folders = PushedVersions(), PushFolders(services.push_folder)
        self.space = BodySpace(self.folders.free_bytes)
        self._pushes: dict[Key, Push] = {}
        self._receiving = Counter[str]()  # by tenant
        self._ended_in_use: list[Push] = []  # oldest first
        self._tasks = set[asyncio.Task[None]]()
        self._storing = ThreadPoolExecutor(_STORERS, thread_name_prefix="push-store")
        self._store_locks = WeakValueDictionary[str, asyncio.Lock]()  # by tenant
        services.peers.register(_QUESTION, self._learn)
        services.peers.register(_USES_QUESTION, self._uses)
        services.peers.register(_END_QUESTION, self._end)

    @contextmanager
    def receiving(self, key: Key) -> Iterator[None]:
        """Count a blob as being received, within the context. Leave the context after calling
        `begin`.

        key: tenant, adapter's name and digest of the pushed version.

        Raises Overloaded if the tenant has MOST_OF_TENANT pushes in the pipeline or being received.
        If the pipeline has this version already, only the pushes being received count.
        """
        tenant = key[0]
        carried = 0 if key in self._pushes else sum(each[0] == tenant for each in self._pushes)
        if carried + self._receiving[tenant] >= MOST_OF_TENANT:
            raise Overloaded(
                f"{MOST_OF_TENANT} pushed versions of this tenant are not durable yet, the limit: "
                "wait until one is stored, or until one expires",
                retry_after_s=STORE_AWAY_S,
            )
        self._receiving[tenant] += 1
        try:
            yield
        finally:
            self._receiving[tenant] -= 1

    async def check_quota(self, version: PushedVersion) -> None:
        """Raise Conflict if the version exceeds the tenant's limits or its adapter was retired."""
        tenant, name, _ = version.key
        await self._catalog_view.ask(
            lambda state: register(
                self.pushed.applied_to(state, tenant),
                tenant,
                name,
                version.facts,
                defaults=version.defaults,
                since=version.seq,
            )
        )

    def begin(self, version: PushedVersion, folder: PushFolder) -> Push:
        """Start the push of a version whose blob is in `folder`, or join a running push of the same
        blob.

        A running push that is joined gets the new alias and the longer lifetime, and is ready again
        once all gateways know these.
        """
        held = self._pushes.get(version.key)
        if held is None:
            version = replace(version, seq=self._catalog_view.state.seq)
            held = self._pushes[version.key] = Push(version, folder)
            task = asyncio.create_task(self._carry(held))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return held
        now = replace(held.version, alias=self.pushed.alias_of(held.version))
        if (joined := now.joined(version)) != now:
            if joined.expires != held.version.expires:
                held.set_lifetime(version.left_s)
            held.version = joined
            held.ready.clear()
        return held

    async def is_ready(self, key: Key, base_model: str) -> bool:
        """Return whether a version is ready: all replicas of its base model have it.

        If this gateway itself pushes the version, all gateways must know it as well.
        """
        push = self._pushes.get(key)
        if push is not None:
            return push.ready.is_set()
        served = base_model in self._services.base_models
        return served and await self._services.engines.holds(base_model, key[2])

    async def end(self, tenant: str, name: str) -> bool:
        """End at once all versions of an adapter that have a lifetime, whichever gateway received
        them; return whether there were any.

        Requests that were accepted before are answered. Raises Unavailable if a gateway did not
        reply: it may know the versions for FORGOTTEN_S more seconds.
        """
        ended = False
        for _ in range(2):  # an announcement may have overtaken the first question
            poll = await self._services.peers.ask(_END_QUESTION, tenant, name)
            ended = ended or any(poll.answers)
        if poll.silent != 0:
            raise Unavailable("a gateway did not reply: send it again", retry_after_s=_KEEP_S)
        return ended

    async def close(self) -> None:
        """Wait up to _CLOSING_S seconds for pushes that are to be stored, then cancel all that
        remain.
        """
        pushes = [push for push in self._pushes.values() if push.version.expires is None]
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSING_S):
                for push in pushes:
                    await push.ended.wait()
        for task in self._tasks:
            task.cancel()
        self.folders.close()

    async def _learn(self, versions: Sequence[PushedVersion]) -> None:
        for version in versions:
            self.pushed.add(version)

    async def _uses(self, key: Key) -> bool:
        """Return whether requests on this gateway use this version, or new ones can name it."""
        with suppress(PartitionsNotRead):
            self.pushed.applied_to(self._catalog_view.state, key[0])  # forgets an expired version
        return key[2] in self._services.uses or self.pushed.get(key) is not None

    async def _end(self, tenant: str, name: str) -> bool:
        """End at once, on this gateway, an adapter's versions that have a lifetime; return whether
        it knew any.
        """
        pushes = [
            push
            for push in self._pushes.values()
            if push.version.key[:2] == (tenant, name) and push.version.expires is not None
        ]
        for push in pushes:
            push.set_lifetime(0.0)
        # A push of the same blob without a lifetime may join one meanwhile, which then stays.
        while any(push.ends_s is not None and not push.ended.is_set() for push in pushes):
            await asyncio.sleep(_AGAIN_S)
        keys = [each.key for each in self.pushed.of(tenant, name) if each.expires is not None]
        for key in keys:
            self.pushed.remove(key)
        return bool(pushes or keys)

    async def _carry(self, push: Push) -> None:
        """Run a push to its end; then remove its blob, and let replicas evict the version once no
        request uses it.
        """
        digest, base_model = push.version.facts.digest, push.version.facts.base_model
        try:
            if (ref := await self._run(push)) is not None:
                await self._keep_for_requests(push, ref)
        finally:
            await asyncio.to_thread(push.folder.cleanup)
            if all(each[2] != digest for each in self._pushes):
                await _try(partial(self._services.engines.release, base_model, digest))

    async def _run(self, push: Push) -> AdapterRef | None:
        """Deliver, announce and store a version, or keep it until its lifetime ends.

        Returns the version if replicas may hold it and the store lacks it, else None.
        """
        tenant, name, _ = key = push.version.key
        ref: AdapterRef | None = None
        keeping: asyncio.Task[None] | None = None
        self.pushed.carry(key)
        try:
            ref = push.version.facts.ref(tenant, name, await self._number(push.version))
            keeping = asyncio.create_task(self._keep(push, ref))
            await push.wait_for(push.ready, _PATIENCE_S)
            if not await self._outlives(push):
                async with self._store_locks.setdefault(tenant, asyncio.Lock()):
                    await self._store(push)
                self._services.metrics.pushes.durable(time.monotonic() - push.begun_s)
                ref = None
        except Exception as error:
            push.failure = error if isinstance(error, LorikeetError) else LorikeetError(_FAULT)
            self.pushed.remove(key)
            about = {"adapter": f"{tenant}/{name}", "error": str(error)}
            log.warning(
                "push_failed", extra=about, exc_info=None if push.failure is error else error
            )
        finally:
            if keeping is not None:
                keeping.cancel()
            del self._pushes[key]
            self.pushed.let_go(key)
            push.ended.set()
        return ref

    async def _keep_for_requests(self, push: Push, ref: AdapterRef) -> None:
        """Keep an ended version on the replicas until no gateway has requests for it.

        Stops earlier if the same blob is pushed or recorded again, or if MOST_ENDED versions of the
        tenant that ended later are being kept.
        """
        tenant, name, digest = key = push.version.key
        deliver = partial(self._services.engines.deliver, push.version.facts.base_model, ref)
        of_tenant = [each for each in self._ended_in_use if each.version.tenant == tenant]
        if len(of_tenant) >= MOST_ENDED:
            self._ended_in_use.remove(of_tenant[0])
        self._ended_in_use.append(push)
        try:
            while push in self._ended_in_use and key not in self._pushes:
                record = await self._catalog_view.ask(lambda state: state.find(tenant, name))
                poll = await self._services.peers.ask(_USES_QUESTION, key)
                unused = poll.silent == 0 and not any(poll.answers)
                if unused or (record is not None and record.with_digest(digest)):
                    return
                await _try(partial(deliver, push.blob))
                await asyncio.sleep(_KEEP_S)
        finally:
            with suppress(ValueError):
                self._ended_in_use.remove(push)

    async def _outlives(self, push: Push) -> bool:
        """Wait until a version with a lifetime is expired, retired or replaced; return True.

        Returns False for a version that is to become durable: at once if it has no lifetime, or
        when another push of the same blob removes the lifetime.
        """
        while push.ends_s is not None:
            gone = push.ready.is_set() and self.pushed.get(push.version.key) is None
            with suppress(PartitionsNotRead):
                gone = gone or push.version.retired(self._catalog_view.state)
            if gone or time.monotonic() >= push.ends_s:
                self.pushed.remove(push.version.key)
                return True
            await asyncio.sleep(_AGAIN_S)
        return False

    async def _keep(self, push: Push, ref: AdapterRef) -> None:
        """Deliver a version to all replicas and announce it to all gateways until both succeed;
        then repeat both until cancelled, so that new replicas and gateways get it.
        """
        engines, base_model = self._services.engines, push.version.facts.base_model
        deliver = partial(_try, partial(engines.deliver, base_model, ref, push.blob))
        announce = partial(_try, partial(self._announce, push))
        while not (await deliver() and await announce()):
            await asyncio.sleep(_AGAIN_S)
        push.ready_s = time.monotonic()
        self._services.metrics.pushes.ready(push.ready_s - push.begun_s)
        async with asyncio.TaskGroup() as both:  # a slow delivery must not delay announcements
            both.create_task(_repeat(deliver))
            both.create_task(_repeat(announce))

    async def _announce(self, push: Push) -> bool:
        """Announce a version, which replicas have already, to all gateways; the push is ready once
        all have replied.

        Returns False if a gateway did not reply, or if another push changed the version meanwhile.
        """
        version = push.version
        push.delivered_s = push.delivered_s or time.monotonic()
        known = self.pushed.get(version.key)  # its alias may be another's by now
        now = known.joined(version) if known else version
        now = replace(now, left_s=push.ends_s and push.ends_s - time.monotonic())
        poll = await self._services.peers.ask(_QUESTION, (now,))
        if poll.silent or push.version is not version:
            return False
        push.ready.set()
        return True

    async def _number(self, version: PushedVersion) -> int:
        record = await self._catalog_view.ask(
            lambda state: self.pushed.applied_to(state, version.tenant).find(
                version.tenant, version.name
            )
        )
        held = record and record.registered(version.facts.digest, version.defaults)
        return held.version if held else len(record.versions) + 1 if record else 1

    async def _store(self, push: Push) -> None:
        """Write a push's blob and its entry in the catalog's log, retrying until the store is
        reachable.

        Raises Conflict if the tenant's limits forbid the version.
        """
        away = False
        while True:
            version = push.version
            try:
                await asyncio.get_running_loop().run_in_executor(self._storing, self._write, push)
            except StoreError as error:
                if not away:
                    log.warning("push_waits_for_store", extra={"error": str(error)})
                away = True
            except Conflict:
                await self.check_quota(push.version)
            else:
                if push.version is version:  # else the blob was pushed again, with another alias
                    return
                continue
            await asyncio.sleep(_KEEP_S)

    def _write(self, push: Push) -> None:
        tenant, name, _ = push.version.key
        self._services.catalog.register(
            tenant,
            name,
            push.blob,
            push.version.facts,
            defaults=push.version.defaults,
            alias=self.pushed.alias_of(push.version),
            since=push.version.seq,
            actor=push.version.actor,
        )


async def _repeat(work: Callable[[], Awaitable[bool]]) -> NoReturn:
    while True:
        await asyncio.sleep(_KEEP_S)
        await work()


async def _try(work: Callable[[], Awaitable[bool | None]]) -> bool:
    """Run `work`, which returns whether it succeeded; return the same. An exception is logged and
    counts as failure.
    """
    try:
        return bool(await work())
    except Exception as error:  # a replica is lost, or the disk
        log.warning("push_delayed", extra={"error": repr(error)})
        return False
