"""One call while the engine works on it: outputs in, items to the gateway's stream."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from lorikeet.answer_stream.answer import Answer
from lorikeet.answer_stream.response_stream import ResponseStream
from lorikeet.answer_stream.token_meter import TokenMeter
from lorikeet.protocol.messages import AnswerHeader, Call, StreamItem
from lorikeet_engine.request import Output, Tokens

Abort = Callable[[str, int], object]
"""Takes a request's id and a choice."""


class AnswerSender:
    """Sends the gateway what the engine's outputs add to one answer, at once.

    No task waits for outputs: at thousands of deltas a second turns of the event loop would cost
    more than the work. `ended` is done when all is sent; it fails if our code does.
    """

    def __init__(
        self, call: Call, answer: Answer, meter: TokenMeter, stream: ResponseStream, abort: Abort
    ) -> None:
        self._request_id = call.request_id
        self._answer, self._meter, self._stream, self._abort = answer, meter, stream, abort
        self._header: AnswerHeader | None = None
        self._early: list[Output] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begin(self, header: AnswerHeader) -> None:
        """Send the header first, then what came before it."""
        self._header = header
        self._stream.put(self._request_id, (header,))
        for output in self._early:
            self.take(output)

    def take(self, output: Output) -> None:
        """Take an output of the engine. Raises nothing."""
        if self._header is None:
            self._early.append(output)
        elif not self.ended.done():
            try:
                self._advance(output, self._header)
            except Exception as error:
                self.ended.set_exception(error)

    def _advance(self, output: Output, header: AnswerHeader) -> None:
        items: list[StreamItem] = []
        load_s = output.timings.load_s if isinstance(output, Tokens) and output.timings else None
        if header.load_s is None and load_s is not None:
            self._header = replace(header, status=None, load_s=load_s)
            items.append(self._header)
        self._meter.on_outputs((output,))
        for item in self._answer.take((output,)):
            self._meter.on_item(item)
            items.append(item)
        for choice in self._answer.stopped:
            self._abort(self._request_id, choice)
        self._answer.stopped.clear()
        ended = self._answer.ended
        if items or ended:
            self._stream.put(self._request_id, items, ended=ended)
        if ended:
            self.ended.set_result(None)
