"""Stored responses in a gateway: read to continue a conversation, saved before an answer's end.

Store requests run in threads of their own. If the store fails, the client still gets the answer,
which then says `store: false`.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lorikeet.apis.body import ValueBudget
from lorikeet.apis.request import CallContext
from lorikeet.apis.responses.items import REFERENCE, InputItem, StoredItems, turn_of
from lorikeet.apis.responses.request import InputTokensRequest, ResponsesRequest
from lorikeet.errors import (
    InvalidInput,
    NotFound,
    StoreError,
    UnknownPreviousResponse,
    UnsupportedParameter,
)
from lorikeet.gateway.replica_response import BeforeEnd
from lorikeet.metrics.gateway import GatewayMetrics
from lorikeet.protocol.messages import Call
from lorikeet.response_store import (
    MAX_STORED_BYTES,
    Json,
    ResponseStore,
    StoredResponse,
    too_large,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

SAVE_S = 5.0
"""Maximum seconds by which saving a response may delay the client's last event."""
_READ_S = 15.0
_AT_ONCE = 16
_OFF = "this service stores no responses: its operator can set LORIKEET_RESPONSES_LIFETIME_H"
_PREVIOUS = "previous_response_id"


class StoredResponses:
    """Access of a gateway to stored responses. For use in one event loop.

    store: store of responses; None: storing is off.
    """

    def __init__(self, store: ResponseStore | None, metrics: GatewayMetrics) -> None:
        self._store, self._metrics = store, metrics
        self._readers = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="read-responses")
        self._savers = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="save-responses")

    def stores(self, body: ResponsesRequest) -> bool:
        """Return whether the answer to a request will be stored."""
        if self._store is None:
            return False
        return body.store is not False and not isinstance(body, InputTokensRequest)

    async def items(self, body: ResponsesRequest, tenant: str) -> StoredItems:
        """Return the stored items that a tenant's request refers to.

        Raises UnsupportedParameter if storing is off and the request refers to any item;
        UnknownPreviousResponse or NotFound if the previous response or an item is not stored;
        InvalidInput if the request refers to items of too many responses or to one item twice;
        StoreError if the store fails.
        """
        previous = body.previous_response_id
        references = [str(item.id) for item in body.input if item.type == REFERENCE]
        if previous is None and not references:
            return StoredItems()
        store = self._store
        if store is None:
            raise _off(_PREVIOUS, _PREVIOUS) if previous else _off("input", f"an {REFERENCE}")
        if len(set(references)) < len(references):  # an item can be as large as a whole response
            raise InvalidInput(f"input: an item has several {REFERENCE}s: want one", param="input")
        budget = ValueBudget(body.max_values)

        def parsed(turn: Json) -> InputItem:
            return InputItem.model_validate(turn, context=budget)

        def read() -> StoredItems:
            past = _turns_before(store, tenant, previous)
            items = _referenced(store, tenant, references)
            referenced = {item_id: parsed(item) for item_id, item in items.items()}
            return StoredItems([*map(parsed, past)], referenced)

        return await self._read(read)

    def saver(
        self, request: ResponsesRequest, context: CallContext, call: Call
    ) -> BeforeEnd | None:
        """Return a function that gets the last bytes of a call's answer, stores the answer before
        they are sent, and returns them; with `store: false` in them if storing fails.

        None: the answer is not to be stored.
        """
        store = self._store
        if store is None or not context.stores:
            return None
        kept_in = store

        def save(last: bytes) -> None:
            kept_in.save(call.tenant, _stored(request, context, call, last))

        async def before_end(last: bytes) -> bytes:
            try:
                async with asyncio.timeout(SAVE_S):
                    await _in_thread(self._savers, lambda: save(last))
            except Exception as error:
                self._metrics.count_not_stored()
                facts = {"request_id": call.request_id, "error": repr(error)}
                log.warning("response_not_stored", extra=facts)
                fields = request.repeated(stored=False, flex=call.scheduling.background)
                return last.replace(call.request_fields, fields)
            return last

        return before_end

    async def get(self, tenant: str, response_id: str) -> StoredResponse:
        """Return a tenant's stored response.

        Raises NotFound if there is none or storing is off; StoreError if the store fails.
        """
        store = self._needed()
        return await self._read(lambda: store.get(tenant, response_id))

    async def delete(self, tenant: str, response_id: str) -> None:
        """Delete a tenant's stored response.

        Raises NotFound if there is none or storing is off; StoreError if the store fails.
        """
        store = self._needed()
        await self._read(lambda: store.delete(tenant, response_id))

    def _needed(self) -> ResponseStore:
        if self._store is None:
            raise NotFound(_OFF)
        return self._store

    async def _read(self, ask: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(_READ_S):
                return await _in_thread(self._readers, ask)
        except TimeoutError:
            raise StoreError(f"the stored responses did not come within {_READ_S:g} s") from None


def _off(param: str, what: str) -> UnsupportedParameter:
    problem = f"not supported here: {what}: {_OFF}, or you can send the earlier turns in full"
    return UnsupportedParameter(problem, param=param)


def _turns_before(store: ResponseStore, tenant: str, previous: str | None) -> Sequence[Json]:
    try:
        return () if previous is None else store.get(tenant, previous).turns
    except NotFound as error:
        raise UnknownPreviousResponse(error.message, param=_PREVIOUS) from None


def _referenced(store: ResponseStore, tenant: str, item_ids: Sequence[str]) -> dict[str, Json]:
    try:
        return store.items(tenant, item_ids)
    except NotFound as error:
        message = f"input: an {REFERENCE} names no stored item: {error.message}"
        raise NotFound(message, param="input") from None


async def _in_thread(threads: ThreadPoolExecutor, ask: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, ask)


def _stored(
    request: ResponsesRequest, context: CallContext, call: Call, last: bytes
) -> StoredResponse:
    """Return the response to store for a call. Raises StoreError if it is too large.

    last: the answer's whole body, or the events that end its stream.
    """
    text = last.rstrip().rpartition(b"\ndata: ")[2]
    if len(text) > MAX_STORED_BYTES:  # parsing it would block the gateway for long
        raise too_large()
    answer = json.loads(text)
    response = answer["response"] if call.stream else answer
    new = "in_" + response["id"].removeprefix("resp_")
    items = [
        *((item, str(item.id)) for item in context.stored_items.past),
        *(
            (
                context.stored_items.resolve(item),
                item.id if item.type == REFERENCE else f"{new}_{index}",
            )
            for index, item in enumerate(request.input)
        ),
        *((InputItem.model_validate(item), item["id"]) for item in response["output"]),
    ]
    return StoredResponse(call.created, response, [turn_of(item, name) for item, name in items])
