"""Store of responses: one object per response in the catalog's store, under its tenant's prefix."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lorikeet.catalog.store.object_store import ObjectStore, StoredObject
from lorikeet.errors import InvalidInput, NotFound, ObjectExists, ObjectNotFound, StoreError

PREFIX = "responses/"
MAX_STORED_BYTES = 8 * 2**20
"""Size limit of a stored conversation, equal to the size limit of a request's body."""
MAX_CONVERSATIONS = 4
"""Limit on the stored conversations that one request may read to resolve its item references.

Reading a conversation may take 0.1 s.
"""
_ID = re.compile("resp_[0-9a-f]{32}(-[0-9])?")  # -N: the call was resent to another replica
_ITEM_ID = re.compile("(?:rs|msg|fc|in)_([0-9a-f]{32}(?:-[0-9])?)_[0-9]{1,4}")
"""Pattern of the id of an item in a stored response. The pattern's group is the response's id
without resp_.
"""

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """Response as its client got it, with the whole conversation up to it.

    created: Unix seconds.
    turns: items of all inputs and outputs in order, the response's own output last.
    """

    created: int
    response: Json
    turns: Sequence[Json]

    @property
    def input_items(self) -> Sequence[Json]:
        """Items of the conversation before the response's own output."""
        return self.turns[: len(self.turns) - len(self.response["output"])]


class ResponseStore:
    """Store that saves, finds and deletes tenants' responses. Thread-safe.

    lifetime_s: age in seconds at which a response can no longer be found.
    clock: function that returns the time in Unix seconds.
    """

    def __init__(self, store: ObjectStore, lifetime_s: float, clock: Callable[[], float]) -> None:
        self._store, self._lifetime_s, self._clock = store, lifetime_s, clock

    def save(self, tenant: str, saved: StoredResponse) -> None:
        """Write a tenant's response under its id, unless it is stored already.

        Raises StoreError, also for a response that is too large.
        """
        members = {"created": saved.created, "response": saved.response, "turns": saved.turns}
        data = json.dumps(members, separators=(",", ":")).encode("ascii")
        if len(data) > MAX_STORED_BYTES:
            raise too_large()
        key = _key(tenant, saved.response["id"])
        try:
            self._store.put_if_absent(key, data)
        except ObjectExists:  # an earlier attempt worked, but its reply was lost; ids are unique
            return

    def get(self, tenant: str, response_id: str) -> StoredResponse:
        """Return a tenant's response.

        Raises StoreError, and NotFound without distinguishing an unknown id, another tenant's
        response, a deleted one and one older than the lifetime.
        """
        try:
            raw = json.loads(self._store.get(_key(tenant, response_id)))
        except ObjectNotFound:
            raise _not_found() from None
        if raw["created"] + self._lifetime_s <= self._clock():
            raise _not_found()
        return StoredResponse(raw["created"], raw["response"], raw["turns"])

    def items(self, tenant: str, item_ids: Sequence[str]) -> dict[str, Json]:
        """Return items of a tenant's stored responses, by the items' ids.

        The last item's response is read first: a stored conversation contains the items before it,
        so one read is usually enough. Raises InvalidInput if more than MAX_CONVERSATIONS reads are
        needed; NotFound for an unknown item or response; StoreError.
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
        """Delete a tenant's response. Raises NotFound, StoreError."""
        self.get(tenant, response_id)
        self._store.delete(_key(tenant, response_id))


def too_large() -> StoreError:
    """Return the error for a conversation of more than MAX_STORED_BYTES."""
    return StoreError(f"a conversation of more than {MAX_STORED_BYTES} bytes is not stored")


def clean_up(
    store: ObjectStore, lifetime_s: float, now: float, *, dry_run: bool
) -> Iterator[StoredObject]:
    """Delete stored responses older than `lifetime_s` seconds, and yield each. Raises StoreError.

    now: Unix seconds.
    dry_run: yield without deleting.
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
        "no such response is stored: it may have been deleted, have expired, or been made with "
        "store: false",
        param="response_id",
    )
