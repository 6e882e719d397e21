"""Messages on the pipes between an engine's process and its client.

Calls go through one pipe. Through the other come back a Reply to each call, the OutputRows of each
step, and each EngineStatus. All queued messages are sent as one write, since the reader must get
Python's interpreter lock for each.
"""

import io
import pickle
import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from lorikeet_engine.request import Failed, Output, Pooled, PromptLogprobs, Tokens

OutputRows = list[PromptLogprobs | Pooled | Failed | tuple[Any, ...]]
"""Outputs of one step; Tokens are converted to plain tuples, which are pickled fast."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to a call: its result or its error. Replies come in the order of the calls."""

    result: Any = None
    error: Exception | None = None


class MessageSender:
    """Thread that sends messages through a pipe in order, so that `send` never blocks."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pickled: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._closed = False  # whether the last message has been taken from the queue
        self._thread = threading.Thread(target=self._run, name="lorikeet-sender", daemon=True)
        self._thread.start()

    def send(self, message: object) -> None:
        """Queue a message; any thread may call this.

        Raises pickle's error if it cannot be pickled.
        """
        self._pickled.put(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def close(self) -> None:
        """Send the queued messages, then close the pipe."""
        self._pickled.put(None)
        self._thread.join()

    def _run(self) -> None:
        with self._connection:
            while messages := self._queued():
                try:
                    self._connection.send_bytes(b"".join(messages))
                except OSError:  # the reader is gone; the end of its own messages tells that
                    return

    def _queued(self) -> list[bytes]:
        """Wait for queued messages and return them; return [] once all are sent after `close`."""
        if self._closed:
            return []
        queued = [self._pickled.get()]
        while not self._pickled.empty():  # no other thread takes from the queue
            queued.append(self._pickled.get())
        self._closed = queued[-1] is None
        return [pickled for pickled in queued if pickled is not None]


def receive(connection: Connection) -> Iterator[Any]:
    """Receive the messages that a MessageSender sent in one write, and yield them.

    Raises EOFError once the sender has closed the pipe.
    """
    messages = connection.recv_bytes()
    stream = io.BytesIO(messages)
    while stream.tell() < len(messages):
        yield pickle.load(stream)


def to_rows(outputs: Iterable[Output]) -> OutputRows:
    """Convert a step's outputs into rows that are pickled fast; from_rows converts them back."""
    return [
        (o.request_id, o.choice, o.token_ids, o.finish, o.logprobs, o.timings)
        if isinstance(o, Tokens)
        else o
        for o in outputs
    ]


def from_rows(rows: OutputRows) -> list[Output]:
    """Convert the rows that to_rows made of a step's outputs back into outputs."""
    return [Tokens(*row) if isinstance(row, tuple) else row for row in rows]
