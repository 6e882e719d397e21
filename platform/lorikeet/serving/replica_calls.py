"""Calls of replicas through Serve's handles: of one, of all, and a stream kept open from each."""

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
"""What Ray raises when a replica died, drains, or cannot be reached."""
_TIMEOUT_S = 2.0
_POLL_S = 0.05
"""How soon a new replica's stream is opened, and that of one that Serve removes is closed."""
_REOPEN_DELAYS_S = (0.1, 0.5, 2.0)  # before one that failed is opened again
_CALLS = set[asyncio.Task[Any]]()
"""Tasks that call all replicas: the loop itself would not keep them."""


def streaming_handle(handle: DeploymentHandle[Any]) -> DeploymentHandle[Any]:
    """A handle for methods that stream.

    What goes through it is pickled plainly: Serve's default, cloudpickle, takes twice the time, and
    is for classes and functions that the other side cannot import. Build it once: Serve makes a new
    handle, with all its options, each time.
    """
    return handle.options(
        stream=True, request_serialization="pickle", response_serialization="pickle"
    )


async def broadcast(handle: DeploymentHandle[Any], method: str, *arguments: Any) -> list[Any]:
    """Call a method on every replica; the answers of those that give one in time.

    Serve's own `results_async` loses every answer when one replica is late.
    """
    try:
        answers, failures = await broadcast_with_failures(handle, method, *arguments)
    except DeploymentUnavailableError:  # no replica is ready yet
        return []
    for error in failures:
        log.warning("replica_silent", extra={"method": method, "error": repr(error)})
    return answers


async def broadcast_all(handles: Iterable[DeploymentHandle[Any]], method: str) -> list[Any]:
    """Call a method on every replica of several deployments; those that do not answer are left out.

    A deployment whose replicas Serve cannot name is left out, too.
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
    """Call a method on every replica: the answers, and the errors of those that gave none in time.

    The calls go on where the caller is cancelled: grpc.aio keeps a kilobyte of each call that is
    cancelled, and with it 64 more of what was read beside. Raises DeploymentUnavailableError when
    there is no replica.
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
        calls.exception()  # which nobody asks for who was cancelled


def is_being_cancelled() -> bool:
    """Whether this task is being cancelled: a lost replica raises CancelledError too."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _is_too_large(error: BaseException) -> bool:
    """Whether gRPC has ended a stream for a message that is too large: its replica lives on."""
    return (
        isinstance(error, grpc.aio.AioRpcError)
        and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    )


@dataclass(frozen=True, slots=True)
class ReplicaStreams:
    """Keeps one stream from each replica open.

    open_stream: calls a replica, by its name. on_item: takes its name and each item. silence_s: a
    stream without an item for so long is opened anew; None: never. still_needed: whether to keep
    the stream of a replica that takes no more calls; Serve waits for it to be closed. on_too_large:
    takes the name of a replica whose stream ended because of an item that gRPC does not take.
    """

    fleet: Fleet
    open_stream: Callable[[str], DeploymentResponseGenerator[Any]]
    on_item: Callable[[str, Any], None]
    silence_s: float | None
    still_needed: Callable[[str], bool]
    on_too_large: Callable[[str], None] = lambda _: None

    async def run(self) -> NoReturn:
        """Open and read streams until cancelled."""
        listening: dict[str, asyncio.Task[NoReturn]] = {}
        try:
            while True:
                exist = set(self.fleet.replicas)
                for gone in [
                    name for name in listening.keys() - exist if not self.still_needed(name)
                ]:
                    listening.pop(gone).cancel()
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
            except (Exception, asyncio.CancelledError) as error:
                if is_being_cancelled():
                    raise
                if _is_too_large(error):
                    self.on_too_large(replica)
                elif isinstance(error, REPLICA_LOST):
                    self.fleet.on_replica_lost(replica)
                log.info("stream_broken", extra={"replica": replica, "error": repr(error)})
                await asyncio.sleep(_REOPEN_DELAYS_S[min(failures, len(_REOPEN_DELAYS_S) - 1)])
                failures += 1

    async def _listen_once(self, replica: str) -> None:
        """Read one stream to its end."""
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
