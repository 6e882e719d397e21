"""Requests for samples that run in the background, and their outcomes.

A sample, which is one request with all its choices, runs on the gateway that accepted it. Once it
has ended, that gateway sends the outcome to the others, so that any gateway can answer its client.
"""

import asyncio
from collections import OrderedDict
from contextlib import suppress
from typing import Any

from starlette.types import Message, Receive

from lorikeet.errors import Expired, LorikeetError, Unavailable
from lorikeet.gateway.client_connection import result_before_disconnect
from lorikeet.gateway.replica_response import Headers, ReplicaResponse
from lorikeet.logs import log_unexpected
from lorikeet.protocol.messages import AnswerHeader, Refusal, StreamItem
from lorikeet.protocol.peers import Peers, Poll

ABANDONED_S = 120.0
"""Seconds after which a sample is cancelled if its client has not asked for it."""
LIFETIME_S = 600.0
"""Seconds for which an outcome is kept."""
TENANT_BYTES = 64 * 2**20
GATEWAY_BYTES = 512 * 2**20
"""Limits on the bytes of outcomes that one gateway keeps, for one tenant and for all."""
_WAIT_S = 25.0  # for an outcome; the client hangs up after 45 s
_OUTCOME_BYTES = 2**10  # of an outcome beside its message
_CLOSING_S = 5.0
_RUNNING = "running"
_FIND, _ENDED, _CANCEL = "tinker_find", "tinker_ended", "tinker_cancel"
_GONE = "this sample was cancelled, is no longer kept, or was lost with its gateway: send it again"

Outcome = bytes | Refusal
"""A sample's message for its client, or the error that ended the sample."""


class SampleFutures:
    """Running samples of this gateway, and outcomes (answers or errors) of all gateways' samples.
    For use in one event loop.

    An outcome is kept for LIFETIME_S, or until newer ones need the memory. Clients can get it more
    than once.
    """

    def __init__(self, peers: Peers, gateways: int) -> None:
        """Register the answers to other gateways' questions about samples.

        peers: means to ask the other gateways, and to answer them.
        gateways: number of gateways of the service.
        """
        self._peers, self._alone = peers, gateways == 1
        self._running: dict[tuple[str, str], _Sample] = {}
        self._ended: dict[str, OrderedDict[str, Outcome]] = {}  # by tenant and id, oldest first
        self._bytes: dict[str, int] = {}  # by tenant
        self._waiting: dict[tuple[str, str], asyncio.Event] = {}
        peers.register(_FIND, self._find)
        peers.register(_ENDED, self._add)
        peers.register(_CANCEL, self._cancel)

    async def begin(self, response: ReplicaResponse, receive: Receive) -> None:
        """Run a call in the background; return once a replica has taken it.

        receive: source of the ASGI messages of the request.

        Raises LorikeetError if the call is refused before a replica takes it; ClientDisconnect,
        after cancelling the call, if the client disconnects before.
        """
        sample = _Sample(response)
        key = response.call.tenant, response.call.request_id
        self._running[key] = sample
        sample.task = asyncio.create_task(self._run(key, sample))
        try:
            await result_before_disconnect(receive, _result(sample.taken))
        except BaseException:
            sample.leave()
            raise

    async def outcome(self, tenant: str, request_id: str) -> Outcome | None:
        """Wait for a sample's outcome for at most _WAIT_S and return it; None if there is none yet.

        Of several waits for one sample only the last goes on; earlier ones return None at once.

        Raises Expired if all gateways answer and none knows the sample.
        """
        key = tenant, request_id
        found = await self._find(*key)
        if found is None:
            poll = await self._ask(_FIND, *key)
            known = [answer for answer in poll.answers if answer is not None]
            if not known and poll.silent == 0 and not self._has_ended(*key):
                raise Expired(_GONE)
            found = next((answer for answer in known if answer != _RUNNING), _RUNNING)
        if found == _RUNNING:
            await self._wait(key)
            found = await self._find(*key)
        return found if isinstance(found, Outcome) else None

    async def cancel(self, tenant: str, request_id: str) -> None:
        """Cancel a sample on the gateway that runs it. Does nothing if the sample has ended."""
        if not await self._cancel(tenant, request_id):
            await self._ask(_CANCEL, tenant, request_id)

    async def close(self) -> None:
        """Cancel all samples."""
        tasks = [sample.task for sample in self._running.values() if sample.task is not None]
        for sample in self._running.values():
            sample.leave()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSING_S)

    async def _run(self, key: tuple[str, str], sample: "_Sample") -> None:
        """Run a sample; keep its outcome, and send it to the other gateways.

        The error of a sample that no replica took is an exception of `sample.taken`, which `begin`
        raises, and no outcome.
        """
        outcome: Outcome = Refusal(Expired.code, _GONE)
        try:
            if message := await sample.message():
                outcome = message
        except LorikeetError as error:
            sample.fail(error)
            outcome = Refusal(error.code, error.message, error.param)
        except Exception as error:
            log_unexpected("sample_failed", key[1], error)
            sample.fail(error)
            outcome = Refusal(LorikeetError.code, "the service failed: send it again")
        finally:
            sample.ended()
            del self._running[key]
        if sample.was_taken:
            await self._add(*key, outcome)
            if not self._alone:
                await self._ask(_ENDED, *key, outcome)

    async def _find(self, tenant: str, request_id: str) -> Outcome | str | None:
        """Return a sample's outcome; _RUNNING if the sample still runs here, after noting that its
        client asked for it; None if this gateway does not know the sample.
        """
        if (sample := self._running.get((tenant, request_id))) is not None:
            sample.touch()
            return _RUNNING
        return self._outcomes(tenant).get(request_id)

    async def _cancel(self, tenant: str, request_id: str) -> bool:
        """Cancel a sample if it runs here; return whether it did."""
        sample = self._running.get((tenant, request_id))
        if sample is not None:
            sample.leave()
        return sample is not None

    async def _add(self, tenant: str, request_id: str, outcome: Outcome) -> None:
        """Keep an outcome, and drop the oldest ones beyond the limits."""
        if self._has_ended(tenant, request_id):
            return
        self._ended.setdefault(tenant, OrderedDict())[request_id] = outcome
        self._bytes[tenant] = self._bytes.get(tenant, 0) + _size(outcome)
        while self._bytes.get(tenant, 0) > TENANT_BYTES:
            self._drop(tenant, next(iter(self._ended[tenant])))
        while sum(self._bytes.values()) > GATEWAY_BYTES:
            largest = max(self._bytes, key=self._bytes.__getitem__)
            self._drop(largest, next(iter(self._ended[largest])))
        asyncio.get_running_loop().call_later(LIFETIME_S, self._drop, tenant, request_id)
        if (waiting := self._waiting.get((tenant, request_id))) is not None:
            waiting.set()

    def _drop(self, tenant: str, request_id: str) -> None:
        outcomes = self._outcomes(tenant)
        if (outcome := outcomes.pop(request_id, None)) is None:
            return
        self._bytes[tenant] -= _size(outcome)
        if not outcomes:
            del self._ended[tenant], self._bytes[tenant]

    async def _wait(self, key: tuple[str, str]) -> None:
        """Wait until a sample has ended, another question for it comes, or _WAIT_S have passed."""
        if (earlier := self._waiting.get(key)) is not None:
            earlier.set()
        if self._has_ended(*key):  # while another gateway was asked
            return
        event = self._waiting[key] = asyncio.Event()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_WAIT_S):
                    await event.wait()
        finally:
            if self._waiting.get(key) is event:
                del self._waiting[key]

    async def _ask(self, question: str, *arguments: Any) -> Poll:
        """Return the other gateways' answers; none, with `silent` None, if they cannot be asked."""
        try:
            return Poll((), 0) if self._alone else await self._peers.poll(question, *arguments)
        except Unavailable:
            return Poll((), None)

    def _outcomes(self, tenant: str) -> OrderedDict[str, Outcome]:
        return self._ended.get(tenant, OrderedDict())

    def _has_ended(self, tenant: str, request_id: str) -> bool:
        return request_id in self._outcomes(tenant)


class _Sample:
    """Running call of a sample, and the observer that notes when a replica takes the call.

    taken: future that is done once a replica has taken the call or the call has ended; has the
        exception of a call that failed before a replica took it.
    was_taken: whether a replica has taken the call.
    """

    def __init__(self, response: ReplicaResponse) -> None:
        loop = asyncio.get_running_loop()
        self._response, self._left = response, asyncio.Event()
        self.taken: asyncio.Future[None] = loop.create_future()
        self.was_taken = False
        self.task: asyncio.Task[None] | None = None
        self._timer = loop.call_later(ABANDONED_S, self.leave)
        response.observers.append(self)

    async def message(self) -> bytes:
        """Run the call; return its answer, b"" if it was cancelled.

        Raises LorikeetError if the call fails.
        """
        parts = list[bytes]()

        async def receive() -> Message:
            await self._left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            parts.append(message.get("body", b""))

        await self._response({}, receive, send)
        return b"".join(parts)

    def leave(self) -> None:
        """Cancel the call, as if its client had hung up."""
        self._left.set()

    def touch(self) -> None:
        """Restart the timer that cancels the call, as the client has asked for the sample."""
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(ABANDONED_S, self.leave)

    def fail(self, error: Exception) -> None:
        """Give `taken` an exception, unless it is done."""
        if not self.taken.done():
            self.taken.set_exception(error)

    def ended(self) -> None:
        """Stop the timer that would cancel the call; end the wait for `taken`."""
        self._timer.cancel()
        if not self.taken.done():
            self.taken.set_result(None)

    def on_item(self, item: StreamItem) -> None:
        """Note that a replica has taken the call, if the item is its first."""
        if isinstance(item, AnswerHeader):
            self.was_taken = True
            if not self.taken.done():
                self.taken.set_result(None)

    def on_first_bytes(self) -> None:
        """Do nothing."""

    def headers(self) -> Headers:
        """Return no headers: the client does not get this answer's."""
        return ()

    def __enter__(self) -> "_Sample":
        """Do nothing."""
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


async def _result(future: asyncio.Future[None]) -> None:
    await future


def _size(outcome: Outcome) -> int:
    return _OUTCOME_BYTES + (len(outcome) if isinstance(outcome, bytes) else 0)
