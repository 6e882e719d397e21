"""Calls between the gateways of one service, through Ray Serve."""

import asyncio
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from lorikeet.errors import Unavailable
from lorikeet.protocol.peers import Peers, Poll
from lorikeet.serving.replica_calls import REPLICA_LOST, broadcast_with_failures

_TIMEOUT_S = 1.0
_START_S = 5.0
"""Seconds that Serve may take to tell a new process which gateways exist."""


class ServePeers(Peers):
    """Connection of a gateway to the service's other gateways, to ask them questions.

    It calls `answer_peer` on every replica of the gateways' deployment.

    The deployment's handle is created at the first poll.

    app: name of the Serve application.
    deployment: name of the gateways' deployment.
    name: name of this gateway. A poll reaches this gateway too, and its answer is ignored.
    """

    def __init__(self, app: str, deployment: str, name: str) -> None:
        super().__init__()
        self._app, self._deployment, self._name = app, deployment, name
        self._handle: DeploymentHandle[Any] | None = None

    async def answer_peer(self, asker: str, question: str, *arguments: Any) -> list[Any]:
        """Return this gateway's answer in a list, or an empty list if this gateway asked.

        asker: name of the gateway that asks.
        question: name under which the question's handler is registered.
        arguments: arguments of the handler.
        """
        return [] if asker == self._name else [await self.answer(question, *arguments)]

    async def poll(self, question: str, *arguments: Any) -> Poll:
        """Ask every other gateway a question; return the answers, and the number of gateways
        without one.

        Raises Unavailable if the gateways cannot be asked now.

        question: name under which each gateway has registered a handler.
        arguments: arguments of the handler.
        """
        try:
            async with asyncio.timeout(_START_S):
                if self._handle is None:  # in a thread: blocks on a call to Serve's controller
                    self._handle = await asyncio.to_thread(
                        serve.get_deployment_handle, self._deployment, self._app
                    )
                answers, failures = await broadcast_with_failures(
                    self._handle,
                    "answer_peer",
                    self._name,
                    question,
                    *arguments,
                    timeout_s=_TIMEOUT_S,
                )
        except (RayError, *REPLICA_LOST, TimeoutError) as error:
            raise Unavailable("the other gateways cannot be asked now") from error
        return Poll([each for answer in answers for each in answer], len(failures))
