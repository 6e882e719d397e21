"""Stored responses: one object each, under a key that names the tenant whose it is."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lorikeet.catalog.store.object_store import ObjectStore, StoredObject
from lorikeet.errors import InvalidInput, NotFound, ObjectExists, ObjectNotFound, StoreError

PREFIX = "responses/"
MAX_STORED_BYTES = 8 * 2**20
"""What a request's body may have: a conversation that is longer is not stored."""
MAX_CONVERSATIONS = 4
"""Most that are read for the items that a request names: each may hold a gateway up for 0.1 s."""
_ID = re.compile("resp_[0-9a-f]{32}(-[0-9])?")  # with a number: of a call that was sent again
_ITEM_ID = re.compile("(?:rs|msg|fc|in)_([0-9a-f]{32}(?:-[0-9])?)_[0-9]{1,4}")
"""An item's id; its group: the id of the response that it was made for, without resp_."""

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as its client got it, and the conversation up to it.

    created: Unix seconds. turns: the items of all inputs and outputs in order, those of the
    response's own output last, so that a continuation reads one object.
    """

    created: int
    response: Json
    turns: Sequence[Json]

    @property
    def input_items(self) -> Sequence[Json]:
        """The conversation that the response answers."""
        return self.turns[: len(self.turns) - len(self.response["output"])]


class ResponseStore:
    """Saves, finds and deletes responses of tenants. Safe for many threads.

    lifetime_s: seconds after which a response is not found any more. clock: Unix seconds.
    """

    def __init__(self, store: ObjectStore, lifetime_s: float, clock: Callable[[], float]) -> None:
        self._store, self._lifetime_s, self._clock = store, lifetime_s, clock

    def save(self, tenant: str, saved: StoredResponse) -> None:
        """Write a response under its id, once. Raises StoreError, also where it is too large."""
        members = {"created": saved.created, "response": saved.response, "turns": saved.turns}
        data = json.dumps(members, separators=(",", ":")).encode("ascii")
        if len(data) > MAX_STORED_BYTES:
            raise too_large()
        key = _key(tenant, saved.response["id"])
        try:
            self._store.put_if_absent(key, data)
        except ObjectExists:  # an answer of the store was lost on its way; the id is nobody else's
            return

    def get(self, tenant: str, response_id: str) -> StoredResponse:
        """Return a tenant's response.

        Raises NotFound, alike for one that never was, is another tenant's, is deleted or older than
        the lifetime; StoreError.
        """
        try:
            raw = json.loads(self._store.get(_key(tenant, response_id)))
        except ObjectNotFound:
            raise _not_found() from None
        if raw["created"] + self._lifetime_s <= self._clock():
            raise _not_found()
        return StoredResponse(raw["created"], raw["response"], raw["turns"])

    def items(self, tenant: str, item_ids: Sequence[str]) -> dict[str, Json]:
        """Return items of a tenant's responses, by their ids.

        The last one's response is read first: a conversation has in it what it went on from, so one
        is mostly enough. Raises InvalidInput where MAX_CONVERSATIONS are not; else as `get` does.
        """
        wanted, found, read = set(item_ids), dict[str, Json](), 0
        for item_id in reversed(item_ids):
            if item_id in found:
                continue
            if read == MAX_CONVERSATIONS:
                problem = f"input: items of more than {MAX_CONVERSATIONS} stored conversations"
                raise InvalidInput(f"{problem}: send some of them in full", param="input")
            turns, read = self.get(tenant, _response_of(item_id)).turns, read + 1
            found |= {turn["id"]: turn for turn in turns if turn["id"] in wanted}
            if item_id not in found:
                raise _not_found()
        return found

    def delete(self, tenant: str, response_id: str) -> None:
        """Delete a tenant's response. Raises as `get` does."""
        self.get(tenant, response_id)
        self._store.delete(_key(tenant, response_id))


def too_large() -> StoreError:
    """Return why a conversation is not stored."""
    return StoreError(f"a conversation of more than {MAX_STORED_BYTES} bytes is not stored")


def clean_up(
    store: ObjectStore, lifetime_s: float, now: float, *, dry_run: bool
) -> Iterator[StoredObject]:
    """Delete responses that were written longer ago than the lifetime, in seconds.

    now: Unix seconds. The answer is what is deleted, or would be. Raises StoreError.
    """
    for one in store.scan(PREFIX):
        if one.modified + lifetime_s <= now:
            if not dry_run:
                store.delete(one.key)
            yield one


def _key(tenant: str, response_id: str) -> str:
    if not _ID.fullmatch(response_id):
        raise _not_found()
    return f"{PREFIX}{tenant}/{response_id}"


def _response_of(item_id: str) -> str:
    known = _ITEM_ID.fullmatch(item_id)
    if known is None:
        raise _not_found()
    return f"resp_{known[1]}"


def _not_found() -> NotFound:
    return NotFound(
        "no such response is stored: it may have been deleted, have outlived its time, or been "
        "made with store: false",
        param="response_id",
    )
