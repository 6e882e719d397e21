"""What the other processes measure, as a gateway asks for it when it is scraped."""

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from lorikeet.metrics.page import Page
from lorikeet.serving.handles import LOST, broadcast

log = logging.getLogger(__name__)


class ServePages:
    """Calls `metrics` on every replica of some deployments; who does not answer is left out."""

    def __init__(self, deployments: Iterable[DeploymentHandle[Any]]) -> None:
        self._deployments = list(deployments)

    async def __call__(self) -> list[Page]:
        """A page of each replica."""
        answers = await asyncio.gather(*map(_pages, self._deployments))
        return [page for pages in answers for page in pages]


async def _pages(deployment: DeploymentHandle[Any]) -> list[Page]:
    try:
        return await broadcast(deployment, "metrics")
    except (RayError, *LOST) as error:
        log.warning("metrics_silent", extra={"error": repr(error)})
        return []
