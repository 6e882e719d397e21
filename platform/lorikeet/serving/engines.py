"""The gateway's way to the engines: Ray Serve handles behind the API's own protocol."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

import grpc
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from lorikeet.api.messages import Call, Refusal, StreamItem, Trial, TrialResult
from lorikeet.api.request_scope import log_unexpected
from lorikeet.errors import GenerationFailed, LorikeetError, Unavailable
from lorikeet.placement.report import ReplicaReport

log = logging.getLogger(__name__)

_ATTEMPTS = 3
_BROADCAST_TIMEOUT_S = 2.0
_LOST = (RayActorError, RayServeException, grpc.RpcError)
"""What Ray raises when a replica died, drains, or cannot be reached."""


async def broadcast(handle: DeploymentHandle[Any], method: str, *arguments: Any) -> list[Any]:
    """Call a method on every replica; the answers of those that give one in time.

    Serve's own `results_async` loses every answer when one replica is late.
    """
    response = handle.broadcast(method, *arguments)
    try:
        pending = await response._fetch_replica_results_async()
    except DeploymentUnavailableError:  # no replica is ready yet
        return []
    answers = await asyncio.gather(
        *(asyncio.wait_for(one.get_async(), _BROADCAST_TIMEOUT_S) for one in pending),  # type: ignore[no-untyped-call]
        return_exceptions=True,
    )
    for error in answers:
        if isinstance(error, BaseException):
            log.warning("replica_silent", extra={"method": method, "error": repr(error)})
    return [answer for answer in answers if not isinstance(answer, BaseException)]


class ServeEngines:
    """Implements api's EngineClient: one handle for each base model."""

    def __init__(self, handles: Mapping[str, DeploymentHandle[Any]]) -> None:
        self._handles = handles

    async def generate(self, base_model: str, call: Call) -> AsyncGenerator[StreamItem, None]:
        """Stream a replica's answer.

        A replica that is lost before the answer's first byte is replaced by another. Raises
        Unavailable when none answers, GenerationFailed when the replica's own code broke.
        """
        handle = self._handles[base_model].options(
            stream=True, multiplexed_model_id=call.adapter.digest if call.adapter else ""
        )
        for attempt in range(_ATTEMPTS):
            # An id of its own: a lost replica may still be at work on the attempt before.
            again = replace(call, request_id=f"{call.request_id}-{attempt}") if attempt else call
            begun = False
            try:
                async with aclosing(_answer(handle, again)) as items:
                    async for item in items:
                        begun = begun or isinstance(item, bytes)
                        yield item
            except Unavailable:
                if begun:
                    raise
            else:
                return
        raise Unavailable("no replica could answer", retry_after_s=5)

    async def smoke(self, base_model: str, trial: Trial) -> TrialResult | Refusal:
        """A replica's trial. Raises Unavailable when it is lost, GenerationFailed if it broke."""
        handle = self._handles[base_model].options(multiplexed_model_id=trial.adapter.digest)
        try:
            return cast("TrialResult | Refusal", await handle.smoke.remote(trial))
        except (RayTaskError, *_LOST) as error:
            raise _lost(error, trial.request_id) from error

    async def reports(self) -> list[ReplicaReport]:
        """What every replica of every base model holds; one that does not answer is left out."""
        reports = await asyncio.gather(*(broadcast(h, "report") for h in self._handles.values()))
        return [report for some in reports for report in some]


async def _answer(handle: DeploymentHandle[Any], call: Call) -> AsyncGenerator[StreamItem, None]:
    """One replica's answer. Raises Unavailable when it is lost or will not take the call."""
    response = cast("DeploymentResponseGenerator[StreamItem]", handle.generate.remote(call))
    try:
        async for item in response:
            if isinstance(item, Refusal) and item.code == Unavailable.code:
                raise Unavailable(item.message)
            yield item
    except (RayTaskError, *_LOST) as error:
        raise _lost(error, call.request_id) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Unavailable("the replica cancelled this request") from error
    finally:
        response.cancel()  # type: ignore[no-untyped-call]


def _lost(error: Exception, request_id: str) -> LorikeetError:
    """What Ray raised, in our words."""
    if isinstance(error, RayTaskError):
        log_unexpected("replica_broke", request_id, error)
        return GenerationFailed("the replica failed this request")
    return Unavailable(f"the replica was lost ({type(error).__name__}): send the request again")
