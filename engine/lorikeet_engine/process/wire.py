"""What crosses the pipes between an engine's process and its host.

Calls go one way; the other way come Replies to them, the Rows of each step, and each EngineStatus.
What has queued up goes as one delivery: at each the reader waits for its turn with the interpreter,
which the thread that steps gives up every few milliseconds only.
"""

import io
import pickle
import queue
import threading
from collections.abc import Iterable, Iterator
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
        self._last = False  # whether nothing follows
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
            while delivery := self._queued():
                try:
                    self._connection.send_bytes(b"".join(delivery))
                except OSError:  # the reader is gone, as the end of its own outbox says
                    return

    def _queued(self) -> list[bytes]:
        """At least one message, unless it is closed and all are sent."""
        if self._last:
            return []
        delivery = [self._pickled.get()]
        while not self._pickled.empty():  # nobody else takes from it
            delivery.append(self._pickled.get())
        self._last = delivery[-1] is None
        return [pickled for pickled in delivery if pickled is not None]


def receive(connection: Connection) -> Iterator[Any]:
    """The messages of the next delivery. Raises EOFError when there is none to come."""
    delivery = connection.recv_bytes()
    stream = io.BytesIO(delivery)
    while stream.tell() < len(delivery):
        yield pickle.load(stream)


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
