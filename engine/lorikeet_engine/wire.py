"""What crosses the pipes between an engine's process and its host.

Calls go one way; the other way come Replies to them, the Rows of each step, and EngineNews.
"""

import pickle
import queue
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from lorikeet_engine.request import Failed, Output, Tokens

Rows = list[Failed | tuple[Any, ...]]
"""One step's outputs. As plain tuples, Tokens are pickled ten times as fast."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a call, in the order of the calls: what it returned, or what it raised."""

    result: Any = None
    error: Exception | None = None


class Outbox:
    """Sends messages in order from a thread of its own, so that no sender waits for the reader."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pickled: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="lorikeet-outbox", daemon=True)
        self._thread.start()

    def send(self, message: object) -> None:
        """Queue a message; any thread may. Raises what pickle raises."""
        self._pickled.put(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def close(self) -> None:
        """Send what is queued, then let the reader see the end."""
        self._pickled.put(None)
        self._thread.join()

    def _run(self) -> None:
        with self._connection:
            while (pickled := self._pickled.get()) is not None:
                try:
                    self._connection.send_bytes(pickled)
                except OSError:  # the reader is gone, as the end of its own outbox says
                    return


def to_rows(outputs: Iterable[Output]) -> Rows:
    """What from_rows turns back."""
    return [
        (o.request_id, o.choice, o.token_ids, o.finish, o.logprobs, o.course)
        if isinstance(o, Tokens)
        else o
        for o in outputs
    ]


def from_rows(rows: Rows) -> list[Output]:
    """The outputs of a step."""
    return [Tokens(*row) if isinstance(row, tuple) else row for row in rows]
