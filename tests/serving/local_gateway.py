"""Gateway's end of calls to a replica in the same process, without Ray Serve."""

import asyncio
from contextlib import aclosing, asynccontextmanager
from itertools import count

from lorikeet.protocol.response_stream import ResponseBuffers
from lorikeet.text.prompts import encode_call

_numbers = count()
_CONTEXT = 2**20  # as a gateway that no replica has told its own


class LocalGateway:
    """Client of one replica."""

    def __init__(self, replica, name):
        self._replica, self._name = replica, name
        self._buffers = ResponseBuffers()

    async def listen(self):
        """Receive answers until cancelled."""
        responses = self._replica.response_stream(self._replica.name, self._name)
        async with aclosing(responses) as groups:
            async for some in groups:
                self._buffers.deliver(self._replica.name, some)

    async def stream_answer(self, call):
        """Stream an answer's items. Closing the stream cancels the call and waits for its end."""
        encoded = encode_call(call, self._replica._encoder, _CONTEXT)
        async with aclosing(self.stream_encoded(encoded)) as items:
            async for item in items:
                yield item

    async def stream_encoded(self, encoded, log=None):
        """Stream an encoded call's items.

        log: to which the log of the items is appended.
        """
        log = bytearray() if log is None else log
        with self._buffers.opened(encoded.attempt_id, log) as buffer:
            asking = asyncio.create_task(self._ask(encoded, buffer))
            try:
                while items := await buffer.take():
                    for item in items:
                        yield item
                await asking
            finally:
                asking.cancel()
                await asyncio.wait([asking])

    async def _ask(self, call, buffer):
        try:
            async with aclosing(self._replica.run_call(call, self._name)) as refusals:
                async for refusal in refusals:
                    if refusal is not None:
                        buffer.put((refusal,), ended=True)
        except Exception as error:
            buffer.fail(error)


@asynccontextmanager
async def local_gateway(replica, name="g0"):
    """Yield a gateway that receives answers."""
    gateway = LocalGateway(replica, name)
    listening = asyncio.create_task(gateway.listen())
    try:
        yield gateway
    finally:
        listening.cancel()
        await asyncio.wait([listening])


async def answer_of(replica, call):
    """Stream the items of one call, through a gateway of its own."""
    async with (
        local_gateway(replica, f"gateway {next(_numbers)}") as gateway,
        aclosing(gateway.stream_answer(call)) as items,
    ):
        async for item in items:
            yield item
