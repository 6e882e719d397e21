"""Building blocks for calls to replicas: broadcasts, and a stream kept open from each replica."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from lorikeet.routing.fleet import Fleet

log = logging.getLogger(__name__)

REPLICA_LOST = (RayActorError, RayServeException, grpc.RpcError)
"""Exceptions of Ray when a replica has died, is draining, or cannot be reached."""
_TIMEOUT_S = 2.0
_POLL_S = 0.05
"""Seconds between two checks for added replicas, whose streams to open, and for removed
replicas.
"""
_REOPEN_DELAYS_S = (0.1, 0.5, 2.0)
"""Delays in seconds before a failed stream is reopened: after its first, its second, and each later
failure.
"""
_CALLS = set[asyncio.Task[Any]]()
"""Tasks of running broadcasts, kept here because asyncio keeps only weak references to tasks."""


def streaming_handle(handle: DeploymentHandle[Any]) -> DeploymentHandle[Any]:
    """Return a handle for streaming methods, with plain pickle.

    Keep the handle: Serve builds a new one at each call.
    """
    return handle.options(
        stream=True, request_serialization="pickle", response_serialization="pickle"
    )


async def broadcast(handle: DeploymentHandle[Any], method: str, *arguments: Any) -> list[Any]:
    """Call a method on every replica; return the answers that come in time, and log failures.

    Returns an empty list if no replica is ready. Serve's own `results_async` would lose all answers
    when one replica is late.
    """
    try:
        answers, failures = await broadcast_with_failures(handle, method, *arguments)
    except DeploymentUnavailableError:
        return []
    for error in failures:
        log.warning("replica_silent", extra={"method": method, "error": repr(error)})
    return answers


async def broadcast_all(handles: Iterable[DeploymentHandle[Any]], method: str) -> list[Any]:
    """Call a method on every replica of several deployments that Serve can call; return the answers
    that come in time.
    """
    answers = await asyncio.gather(*(_broadcast_or_log(handle, method) for handle in handles))
    return [answer for some in answers for answer in some]


async def _broadcast_or_log(handle: DeploymentHandle[Any], method: str) -> list[Any]:
    try:
        return await broadcast(handle, method)
    except (RayError, *REPLICA_LOST) as error:
        log.warning("deployment_silent", extra={"method": method, "error": repr(error)})
        return []


async def broadcast_with_failures(
    handle: DeploymentHandle[Any], method: str, *arguments: Any, timeout_s: float = _TIMEOUT_S
) -> tuple[list[Any], list[BaseException]]:
    """Call a method on every replica; return the answers, and the errors of replicas without an
    answer.

    When the caller is cancelled, the calls still run to their end, since grpc.aio leaks memory for
    each cancelled call.

    timeout_s: seconds to wait for the answers; a later one counts as an error.

    Raises DeploymentUnavailableError if there is no replica.
    """
    calls = asyncio.create_task(_call_all(handle, method, arguments, timeout_s))
    _CALLS.add(calls)
    calls.add_done_callback(_drop_finished)
    return await asyncio.shield(calls)


async def _call_all(
    handle: DeploymentHandle[Any], method: str, arguments: tuple[Any, ...], timeout_s: float
) -> tuple[list[Any], list[BaseException]]:
    response = handle.broadcast(method, *arguments)
    pending = await response._fetch_replica_results_async()
    answers = await asyncio.gather(
        *(asyncio.wait_for(one.get_async(), timeout_s) for one in pending),  # type: ignore[no-untyped-call]
        return_exceptions=True,
    )
    failures = [answer for answer in answers if isinstance(answer, BaseException)]
    return [answer for answer in answers if not isinstance(answer, BaseException)], failures


def _drop_finished(calls: asyncio.Task[Any]) -> None:
    _CALLS.discard(calls)
    if not calls.cancelled():
        calls.exception()  # mark as retrieved: a cancelled caller does not retrieve it


def is_being_cancelled() -> bool:
    """Return whether the current task is being cancelled.

    Tells a real cancellation from the CancelledError that a call of a lost replica raises.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def is_too_large(error: BaseException | None) -> bool:
    """Whether gRPC ended a stream because of a too large message; the replica is then alive."""
    return (
        isinstance(error, grpc.aio.AioRpcError)
        and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    )


@dataclass(frozen=True, slots=True)
class ReplicaStreams:
    """Streams from all replicas of a fleet; one stream per replica is kept open.

    open_stream: calls the replica of a given name.
    on_item: called with a replica's name and each item of its stream.
    silence_s: seconds without an item until a stream is opened again; None: no limit.
    still_needed: returns whether to keep the stream of a replica that takes no more calls; Serve
        stops the replica only once the stream is closed.
    on_end: called with the name of a replica whose stream has ended, and its error; None without.
    """

    fleet: Fleet
    open_stream: Callable[[str], DeploymentResponseGenerator[Any]]
    on_item: Callable[[str, Any], None]
    silence_s: float | None
    still_needed: Callable[[str], bool]
    on_end: Callable[[str, BaseException | None], None] = lambda _replica, _error: None

    async def run(self) -> NoReturn:
        """Open, read and reopen streams until cancelled."""
        listening: dict[str, asyncio.Task[NoReturn]] = {}
        try:
            while True:
                exist = set(self.fleet.replicas)
                for gone in [
                    name for name in listening.keys() - exist if not self.still_needed(name)
                ]:
                    listening.pop(gone).cancel()
                    self.on_end(gone, None)
                for new in exist - listening.keys():
                    listening[new] = asyncio.create_task(self._listen(new))
                await asyncio.sleep(_POLL_S)
        finally:
            for task in listening.values():
                task.cancel()

    async def _listen(self, replica: str) -> NoReturn:
        failures = 0
        while True:
            try:
                await self._listen_once(replica)
                failures = 0
                self.on_end(replica, None)
            except (Exception, asyncio.CancelledError) as error:
                if is_being_cancelled():
                    raise
                self.on_end(replica, error)
                if isinstance(error, REPLICA_LOST) and not is_too_large(error):
                    self.fleet.on_replica_lost(replica)
                log.info("stream_broken", extra={"replica": replica, "error": repr(error)})
                await asyncio.sleep(_REOPEN_DELAYS_S[min(failures, len(_REOPEN_DELAYS_S) - 1)])
                failures += 1

    async def _listen_once(self, replica: str) -> None:
        stream = self.open_stream(replica)
        try:
            while True:
                async with asyncio.timeout(self.silence_s):
                    item = await anext(stream)
                self.on_item(replica, item)
        except StopAsyncIteration:
            return
        finally:
            stream.cancel()  # type: ignore[no-untyped-call]
