"""Dispatch of the engine's outputs to running requests."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lorikeet_engine.errors import EngineClosed, InvalidRequest, StepFailed
from lorikeet_engine.request import Failed, Output, Tokens

Receiver = Callable[[Output], object]
"""Function that takes one output of a request. It is called on the event loop and raises
nothing.
"""


class OutputDispatcher:
    """Dispatcher of the engine's outputs to running requests by id. For one event loop.

    failed_steps: number of consecutive failed steps of the engine since its last step with tokens.
    """

    def __init__(self) -> None:
        self.failed_steps = 0
        self._event_loop = asyncio.get_running_loop()
        self._receivers: dict[str, Receiver] = {}

    @contextmanager
    def receiving(
        self, request_id: str, receive: Receiver, abort: Callable[[str], object]
    ) -> Iterator[None]:
        """Give `receive` the engine's outputs for a request until the context ends.

        The caller leaves the context after the request's last output. Raises InvalidRequest if
        another running request has the id.

        abort: called with the request's id if the context ends by an exception.
        """
        if request_id in self._receivers:
            raise InvalidRequest(
                f"request_id={request_id!r} is in flight: want a new one", param="request_id"
            )
        self._receivers[request_id] = receive
        try:
            yield
        except BaseException:
            abort(request_id)  # no effect on choices that have ended
            raise
        finally:
            del self._receivers[request_id]

    def dispatch(self, outputs: list[Output]) -> None:
        """Hand the outputs of one engine step to their requests' receivers. Callable from any
        thread.
        """
        self._event_loop.call_soon_threadsafe(self._dispatch, outputs)

    def fail_all(self, error: EngineClosed) -> None:
        """Give an error to the receivers of all running requests. Callable from any thread."""
        self._event_loop.call_soon_threadsafe(self._fail_all, error)

    def _dispatch(self, outputs: list[Output]) -> None:
        for output in outputs:
            receive = self._receivers.get(output.request_id)
            if receive is not None:
                receive(output)
        if any(isinstance(output, Tokens) for output in outputs):
            self.failed_steps = 0
        elif any(isinstance(o, Failed) and isinstance(o.error, StepFailed) for o in outputs):
            self.failed_steps += 1

    def _fail_all(self, error: EngineClosed) -> None:
        for request_id, receive in self._receivers.items():
            receive(Failed(request_id, error))
