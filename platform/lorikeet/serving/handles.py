"""What Serve's handles leave to do: call every replica, and tell what losing one looks like."""

import asyncio
import logging
from typing import Any

import grpc
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

log = logging.getLogger(__name__)

LOST = (RayActorError, RayServeException, grpc.RpcError)
"""What Ray raises when a replica died, drains, or cannot be reached."""
_TIMEOUT_S = 2.0


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
        *(asyncio.wait_for(one.get_async(), _TIMEOUT_S) for one in pending),  # type: ignore[no-untyped-call]
        return_exceptions=True,
    )
    for error in answers:
        if isinstance(error, BaseException):
            log.warning("replica_silent", extra={"method": method, "error": repr(error)})
    return [answer for answer in answers if not isinstance(answer, BaseException)]


def is_own_cancelling() -> bool:
    """Whether this task is being cancelled: a lost replica raises CancelledError too."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
