"""Relay between the service and the object store, which tests can cut."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit


class StoreLink:
    """TCP relay on its own thread.

    `silent`: data stops in both directions without an error.
    `down`: open connections break, and new ones are refused.
    """

    def __init__(self, store_url: str) -> None:
        self._to = urlsplit(store_url)
        self._ends: set[asyncio.StreamWriter] = set()
        self._relays: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._open.set()
        threading.Thread(target=self._loop.run_forever, name="store-link", daemon=True).start()
        self._port = 0
        self._run(self._listen())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @contextmanager
    def silent(self) -> Iterator[None]:
        self._loop.call_soon_threadsafe(self._open.clear)
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._open.set)

    @contextmanager
    def down(self) -> Iterator[None]:
        self._run(self._close())
        try:
            yield
        finally:
            self._run(self._listen())

    def close(self) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._take, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()
        for end in self._ends:
            end.transport.abort()
        if self._relays:
            await asyncio.wait(self._relays)

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relay = self._loop.create_task(self._relay(reader, writer))
        self._relays.add(relay)
        relay.add_done_callback(self._relays.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        store_reader, store_writer = await asyncio.open_connection(self._to.hostname, self._to.port)
        ends = {writer, store_writer}
        self._ends |= ends
        try:
            await asyncio.gather(self._pump(reader, store_writer), self._pump(store_reader, writer))
        except OSError:
            pass  # when one end closes, close the other
        finally:
            self._ends -= ends
            for end in ends:
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(2**16):
            await self._open.wait()
            writer.write(piece)
            await writer.drain()
        writer.write_eof()
