"""The engine's outputs, handed to the requests that they are for."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lorikeet_engine.errors import EngineClosed, InvalidRequest, StepFailed
from lorikeet_engine.request import Failed, Output, Tokens

Receiver = Callable[[Output], object]
"""Takes one request's outputs on the event loop. Raises nothing."""


class OutputDispatcher:
    """The receivers of all requests that run. Lives on one event loop.

    failed_steps: how many steps of the engine have failed since the last that gave tokens.
    """

    def __init__(self) -> None:
        self.failed_steps = 0
        self._event_loop = asyncio.get_running_loop()
        self._receivers: dict[str, Receiver] = {}

    @contextmanager
    def receiving(
        self, request_id: str, receive: Receiver, abort: Callable[[str], object]
    ) -> Iterator[None]:
        """Give `receive` the engine's outputs for a request as long as the context lasts.

        The request must be over by then; it is aborted if something was raised. Raises
        InvalidRequest if its id is in use.
        """
        if request_id in self._receivers:
            raise InvalidRequest(
                f"request_id={request_id!r} is in flight: want a new one", param="request_id"
            )
        self._receivers[request_id] = receive
        try:
            yield
        except BaseException:
            abort(request_id)  # what has ended is left alone
            raise
        finally:
            del self._receivers[request_id]

    def dispatch(self, outputs: list[Output]) -> None:
        """Take the outputs of one step. Any thread."""
        self._event_loop.call_soon_threadsafe(self._dispatch, outputs)

    def fail_all(self, error: EngineClosed) -> None:
        """Fail every request that runs. Any thread."""
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
