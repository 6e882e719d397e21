"""Calls of replicas through Serve's handles: streaming, on every replica, and when one is lost."""

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

import grpc
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

log = logging.getLogger(__name__)

REPLICA_LOST = (RayActorError, RayServeException, grpc.RpcError)
"""What Ray raises when a replica died, drains, or cannot be reached."""
_TIMEOUT_S = 2.0


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

    Raises DeploymentUnavailableError when there is no replica.
    """
    response = handle.broadcast(method, *arguments)
    pending = await response._fetch_replica_results_async()
    answers = await asyncio.gather(
        *(asyncio.wait_for(one.get_async(), timeout_s) for one in pending),  # type: ignore[no-untyped-call]
        return_exceptions=True,
    )
    failures = [answer for answer in answers if isinstance(answer, BaseException)]
    return [answer for answer in answers if not isinstance(answer, BaseException)], failures


def is_being_cancelled() -> bool:
    """Whether this task is being cancelled: a lost replica raises CancelledError too."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
