"""The gateway's way to the engines: Ray Serve handles behind the API's own protocol."""

from collections.abc import AsyncGenerator, Mapping
from typing import Any, cast

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from lorikeet.api.messages import Call, StreamItem
from lorikeet.errors import Unavailable
from lorikeet.placement.report import ReplicaReport

_ATTEMPTS = 3


async def broadcast_report(handle: DeploymentHandle[Any]) -> list[ReplicaReport]:
    """Every live replica's report. A replica that dies meanwhile is left out."""
    results = await handle.broadcast("report").results_async(return_exceptions=True)
    return [result for result in results if isinstance(result, ReplicaReport)]


class ServeEngines:
    """Implements api's EngineClient: one handle for each base model."""

    def __init__(self, handles: Mapping[str, DeploymentHandle[Any]]) -> None:
        self._handles = handles

    async def generate(self, base_model: str, call: Call) -> AsyncGenerator[StreamItem, None]:
        """Stream a replica's answer.

        A replica that dies before the answer's first byte is replaced by another. Raises
        Unavailable when none answers.
        """
        handle = self._handles[base_model].options(
            stream=True, multiplexed_model_id=call.adapter.digest if call.adapter else ""
        )
        begun = False
        for _ in range(_ATTEMPTS):
            response = cast("DeploymentResponseGenerator[StreamItem]", handle.generate.remote(call))
            try:
                async for item in response:
                    begun = begun or isinstance(item, bytes)
                    yield item
            except RayActorError as error:
                if begun:
                    raise Unavailable("the replica died while answering") from error
            except BackPressureError as error:
                raise Unavailable("every replica is full", retry_after_s=1) from error
            else:
                return
            finally:
                response.cancel()  # type: ignore[no-untyped-call]
        raise Unavailable("no replica could answer", retry_after_s=5)

    async def reports(self) -> list[ReplicaReport]:
        """What every replica of every base model holds."""
        return [
            report for handle in self._handles.values() for report in await broadcast_report(handle)
        ]
