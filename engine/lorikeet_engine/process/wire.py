"""What crosses the pipes between an engine's process and the client's.

Calls go one way; the other way come Replies to them, the OutputRows of each step, and each
EngineStatus. Messages that have queued up are sent as one write: at each the reader waits for its
turn with the interpreter, which the thread that steps gives up every few milliseconds only.
"""

import io
import pickle
import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from lorikeet_engine.request import Failed, Output, PromptLogprobs, Tokens

OutputRows = list[PromptLogprobs | Failed | tuple[Any, ...]]
"""One step's outputs, with Tokens as plain tuples, which are pickled ten times as fast."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a call, in the order of the calls: what it returned, or what it raised."""

    result: Any = None
    error: Exception | None = None


class MessageSender:
    """Sends messages in order from a thread of its own, so that no sender waits for the reader."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pickled: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._closed = False  # whether nothing follows
        self._thread = threading.Thread(target=self._run, name="lorikeet-sender", daemon=True)
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
            while messages := self._queued():
                try:
                    self._connection.send_bytes(b"".join(messages))
                except OSError:  # the reader is gone, as the end of its own messages says
                    return

    def _queued(self) -> list[bytes]:
        """The messages to send now, at least one; empty once it is closed and all are sent."""
        if self._closed:
            return []
        queued = [self._pickled.get()]
        while not self._pickled.empty():  # no other thread takes from it
            queued.append(self._pickled.get())
        self._closed = queued[-1] is None
        return [pickled for pickled in queued if pickled is not None]


def receive(connection: Connection) -> Iterator[Any]:
    """The messages that were sent together next. Raises EOFError when there are none to come."""
    messages = connection.recv_bytes()
    stream = io.BytesIO(messages)
    while stream.tell() < len(messages):
        yield pickle.load(stream)


def to_rows(outputs: Iterable[Output]) -> OutputRows:
    """Turn a step's outputs into rows, which from_rows turns back."""
    return [
        (o.request_id, o.choice, o.token_ids, o.finish, o.logprobs, o.timings)
        if isinstance(o, Tokens)
        else o
        for o in outputs
    ]


def from_rows(rows: OutputRows) -> list[Output]:
    """Turn the rows of a step back into its outputs."""
    return [Tokens(*row) if isinstance(row, tuple) else row for row in rows]
