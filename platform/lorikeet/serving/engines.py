"""The gateway's way to the engines: Ray Serve handles behind the API's own protocol."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

from ray.exceptions import RayTaskError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from lorikeet.api.messages import Attempt, Call, Header, Refusal, StreamItem, Trial, TrialResult
from lorikeet.api.request_scope import log_unexpected
from lorikeet.errors import GenerationFailed, LorikeetError, Unavailable
from lorikeet.placement.report import ReplicaMap, ReplicaReport
from lorikeet.routing.fleet import HEADER_AGE_S, Fleet
from lorikeet.serving.fleets import fleet_of
from lorikeet.serving.handles import LOST, broadcast, is_own_cancelling
from lorikeet.serving.watching import Watching

log = logging.getLogger(__name__)

_ATTEMPTS = 3
_LOAD_FAILED = "adapter_load_failed"


class ServeEngines:
    """Implements api's EngineClient: one handle for each base model. Build it on the event loop."""

    def __init__(self, handles: Mapping[str, DeploymentHandle[Any]]) -> None:
        self._handles = handles
        watching = [Watching(handle, _fleet(handle)) for handle in handles.values()]
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(each.run()) for each in watching]

    async def generate(self, base_model: str, call: Call) -> AsyncGenerator[StreamItem, None]:
        """Stream a replica's answer.

        A replica that is lost before the answer's first byte is replaced by another, and one that
        cannot load the adapter by one that has it. Raises Unavailable when none answers,
        GenerationFailed when the replica's own code broke.
        """
        handle = self._handles[base_model].options(stream=True)
        fleet = _fleet(handle)
        for attempt in range(_ATTEMPTS):
            # An id of its own: a lost replica may still be at work on the attempt before.
            again = replace(call, request_id=f"{call.request_id}-{attempt}") if attempt else call
            begun = False
            fleet.expect(again.request_id)
            sent_s = time.monotonic()
            try:
                async with aclosing(_answer(handle, fleet, again)) as items:
                    async for item in items:
                        if isinstance(item, Header) and item.load_s is None:
                            yield _attempt(fleet, again.request_id, sent_s)
                        if attempt + 1 < _ATTEMPTS and _another_has_it(fleet, call, item):
                            raise Unavailable("the replica could not load the adapter")
                        if not begun and isinstance(item, bytes):
                            begun = True
                            fleet.begun(again.request_id)
                        yield item
            except LorikeetError as error:
                yield _attempt(fleet, again.request_id, sent_s, error.message)
                if begun or not isinstance(error, Unavailable):
                    raise
            else:
                return
            finally:
                fleet.ended(again.request_id)
        raise Unavailable("no replica could answer", retry_after_s=5)

    async def smoke(self, base_model: str, trial: Trial) -> TrialResult | Refusal:
        """A replica's trial. Raises Unavailable when it is lost, GenerationFailed if it broke."""
        try:
            answer = await self._handles[base_model].smoke.remote(trial)
            return cast("TrialResult | Refusal", answer)
        except (RayTaskError, *LOST) as error:
            raise _lost(error, trial.request_id) from error

    async def reports(self) -> list[ReplicaReport]:
        """What every replica of every base model holds; one that does not answer is left out."""
        reports = await asyncio.gather(*(broadcast(h, "report") for h in self._handles.values()))
        return [report for some in reports for report in some]

    async def memory_maps(self) -> list[ReplicaMap]:
        """The same for what lies where in their memory."""
        maps = await asyncio.gather(*(broadcast(h, "memory_map") for h in self._handles.values()))
        return [each for some in maps for each in some]


async def _answer(
    handle: DeploymentHandle[Any], fleet: Fleet, call: Call
) -> AsyncGenerator[StreamItem, None]:
    """One replica's answer. Raises Unavailable when it is lost or will not take the call."""
    request_id = call.request_id
    response = cast("DeploymentResponseGenerator[StreamItem]", handle.generate.remote(call))
    try:
        async for item in response:
            if isinstance(item, Refusal) and item.code == Unavailable.code:
                raise Unavailable(item.message)
            if isinstance(item, Header) and item.load_s is None:
                _learn(fleet, item)
            yield item
    except RayTaskError as error:
        raise _lost(error, request_id) from error
    except (Unavailable, *LOST) as error:
        fleet.lost(fleet.taker(request_id))
        raise _lost(error, request_id) from error
    except asyncio.CancelledError as error:
        if is_own_cancelling():
            raise
        fleet.lost(fleet.taker(request_id))
        raise Unavailable("the replica cancelled this request") from error
    finally:
        response.cancel()  # type: ignore[no-untyped-call]


def _attempt(fleet: Fleet, request_id: str, sent_s: float, failure: str | None = None) -> Attempt:
    """What is known of a call that was sent then."""
    decision, now_s = fleet.decision(request_id), time.monotonic()
    if decision is None or decision.taken_s is None:
        weighed = decision.weighed if decision else ()
        return Attempt(request_id, None, now_s - sent_s, weighed, failure)
    waited_s = decision.taken_s - sent_s
    return Attempt(request_id, decision.replica, waited_s, decision.weighed, failure)


def _another_has_it(fleet: Fleet, call: Call, item: StreamItem) -> bool:
    """Whether a replica could not load the adapter, but another need not."""
    failed = isinstance(item, Refusal) and item.code == _LOAD_FAILED
    return failed and call.adapter is not None and fleet.unfetchable(call.adapter.digest)


def _learn(fleet: Fleet, header: Header) -> None:
    """What an answer says of its replica."""
    if header.news is not None:
        fleet.heard(header.replica, header.news, HEADER_AGE_S)
    if header.digest is not None and header.residency is not None:
        fleet.found(header.replica, header.digest, header.residency)


def _fleet(handle: DeploymentHandle[Any]) -> Fleet:
    return fleet_of(handle.app_name, handle.deployment_name)


def _lost(error: Exception, request_id: str) -> LorikeetError:
    """What Ray raised, in our words."""
    if isinstance(error, Unavailable):
        return error
    if isinstance(error, RayTaskError):
        log_unexpected("replica_broke", request_id, error)
        return GenerationFailed("the replica failed this request")
    return Unavailable(f"the replica was lost ({type(error).__name__}): send the request again")
