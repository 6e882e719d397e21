"""Fake of the response that a Serve handle returns for a streaming call."""

import asyncio


class FakeStream:
    """Stream of the items given to `say`; exceptions among them are raised."""

    def __init__(self, replica=None):
        self.replica = replica
        self.cancelled = False
        self._said = asyncio.Queue()

    def say(self, item):
        self._said.put_nowait(item)

    def end(self):
        self.say(StopAsyncIteration())

    def __aiter__(self):
        return self

    async def __anext__(self):
        item = await self._said.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def cancel(self):
        """End the stream, as gRPC does."""
        self.cancelled = True
        self.say(asyncio.CancelledError())
