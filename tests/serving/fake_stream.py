"""What one of Serve's handles returns for a streaming call, without Serve."""

import asyncio


class FakeStream:
    """Says what it is told to, one item after the other; an exception is raised instead."""

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
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self):
        self.cancelled = True
