"""Store of tenants' batches, in the catalog's store. Every object is written once.

batches/TENANT/ID              the batch as its client made it
open_batches/TENANT/ID         mark of a batch that has not ended
batch_runs/TENANT/ID/lease-E   lease of run E, which its gateway touches while it runs the batch
batch_runs/TENANT/ID/part-E-N-COMPLETED-FAILED   N-th part of the results of run E
batch_runs/TENANT/ID/validated, cancelling, finalizing, ended   the batch's states, with their times

A line counts as done once a part has it. If two runs overlap, since the gateway of the first was
taken for dead, a line may be in two parts: the first part in the order of keys counts.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from threading import Lock
from typing import Any, NamedTuple

from lorikeet.catalog.records import TenantRecord
from lorikeet.catalog.store.object_store import ObjectStore, StoredObject, in_parallel
from lorikeet.errors import Conflict, NotFound, ObjectExists, ObjectNotFound
from lorikeet.file_store import PAGE, Order, page_of

BATCHES, OPEN, RUNS = "batches/", "open_batches/", "batch_runs/"
LIFETIME_S = 60 * 86_400
"""Seconds for which an ended batch can be looked up, until `lorikeet gc` deletes it."""
WINDOW_S = 86_400
"""Seconds from a batch's creation until it expires: completion_window, always 24h."""

VALIDATED, CANCELLING, FINALIZING, ENDED = "validated", "cancelling", "finalizing", "ended"
_STATES = {VALIDATED: "in_progress", FINALIZING: "finalizing", CANCELLING: "cancelling"}
"""Status of a batch that has not ended, by mark. Of the marks that are set, the last one counts."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """Batch as its client made it.

    created_at: Unix seconds.
    expires_at: Unix seconds.
    metadata: the client's own key-value pairs.
    key_id: id of the key whose rights the batch has.
    output_lifetime_s: seconds for which the output is kept.
    """

    id: str
    tenant: str
    key_id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    metadata: Mapping[str, str] | None
    output_lifetime_s: int


class LineTokens(NamedTuple):
    """Tokens of an answer; cached ones are part of the input, reasoning ones of the output."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def json(self) -> Json:
        """Return the numbers as OpenAI's usage of a batch."""
        return {
            "input_tokens": self.input,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.output,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.input + self.output,
        }


class Result(NamedTuple):
    """Result of one line.

    number: place of the line among the requests of the input, from 0.
    ok: whether the line belongs to the output file; False: it belongs to the error file.
    line: JSON of the result, without a newline.
    """

    number: int
    ok: bool
    line: bytes
    tokens: LineTokens = LineTokens()


class BatchStore:
    """Store that saves, lists and follows batches. Thread-safe.

    A gateway runs a batch under a lease, which it renews; if the gateway is gone, another gateway
    begins a new run. A run stores its results in parts. Marks (validated, cancelling, finalizing,
    ended) record when a batch reached a state.

    max_open: limit on one tenant's batches that have not ended, if the tenant has none of its own.
    clock: function that returns the time in Unix seconds.
    creating: lock to hold while open batches are counted and one is created.
    """

    def __init__(self, store: ObjectStore, max_open: int, clock: Callable[[], float]) -> None:
        self.store, self._max_open, self.clock = store, max_open, clock
        self.creating = Lock()

    def max_open(self, tenant: TenantRecord) -> int:
        """Return the limit on a tenant's batches that have not ended."""
        return self._max_open if tenant.open_batches is None else tenant.open_batches

    def create(self, batch: BatchRecord) -> None:
        """Save a new batch. Raises StoreError."""
        content = json.dumps(asdict(batch)).encode()
        self._put(_key(batch.tenant, batch.id), content)
        self._put(f"{OPEN}{batch.tenant}/{batch.id}", b"{}")

    def open_batches(self, tenant: str = "") -> list[tuple[str, str]]:
        """Return tenant and id of each batch that has not ended, oldest first for each tenant.

        tenant: the only tenant; "": all.
        """
        prefix = f"{OPEN}{tenant}/" if tenant else OPEN
        return [(key.split("/")[1], key.split("/")[2]) for key in self.store.list(prefix)]

    def batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """Return a tenant's batch. Raises StoreError, and NotFound without distinguishing an
        unknown id and another tenant's batch.
        """
        try:
            return BatchRecord(**json.loads(self.store.get(_key(tenant, batch_id))))
        except ObjectNotFound:
            raise _not_found() from None

    def json(self, tenant: str, batch_id: str) -> Json:
        """Return a tenant's batch as OpenAI's batch object. Raises NotFound, StoreError."""
        batch = self.batch(tenant, batch_id)
        runs = _runs(tenant, batch_id)
        while True:
            names = [key.removeprefix(runs) for key in self.store.list(runs)]
            found = {name: self.mark(batch, name) for name in (*_STATES, ENDED) if name in names}
            marks = {name: mark for name, mark in found.items() if mark is not None}
            if len(marks) == len(found):  # else the batch ends just now
                break
        parts = [name.split("-") for name in names if name.startswith("part-")]
        done = sum(int(part[3]) for part in parts), sum(int(part[4]) for part in parts)
        return _batch_json(batch, marks, done)

    def page(
        self, tenant: str, limit: int, after: str | None, order: Order = "desc"
    ) -> tuple[list[Json], bool]:
        """Return at most `limit` (and PAGE) of a tenant's batches as JSON, and whether more follow.

        after: id of the last batch of the previous page; None: the first page.

        Raises InvalidInput if `after` is no batch's id; StoreError.
        """
        ids = (key.rpartition("/")[2] for key in self.store.list(f"{BATCHES}{tenant}/"))
        shown, more = page_of(ids, min(limit, PAGE), after, order)
        return in_parallel(lambda one: self.json(tenant, one), shown), more

    def cancel(self, tenant: str, batch_id: str) -> Json:
        """Mark a tenant's batch to be cancelled; a batch that no gateway runs ends at once.

        Return the batch as JSON. Raises NotFound, StoreError, and Conflict if the batch has ended.
        """
        batch = self.batch(tenant, batch_id)
        if (ended := self.mark(batch, ENDED)) is not None:
            raise Conflict(f"this batch has ended as {ended['status']}: it cannot be cancelled")
        self.set_mark(batch, CANCELLING)
        if self.last_lease(tenant, batch_id) is None:
            self.end(batch, "cancelled")
        return self.json(tenant, batch_id)

    def mark(self, batch: BatchRecord, name: str) -> Json | None:
        """Return the content of the mark that a batch has reached a state; None if it is not set.

        name: name of the state: VALIDATED, CANCELLING, FINALIZING or ENDED.
        """
        try:
            mark: Json = json.loads(self.store.get(_runs(batch.tenant, batch.id) + name))
        except ObjectNotFound:
            return None
        return mark

    def set_mark(self, batch: BatchRecord, name: str, **said: Any) -> Json:
        """Record that a batch has reached a state, unless that is recorded; return the record.

        name: name of the state: VALIDATED, CANCELLING, FINALIZING or ENDED.
        said: members of the record beside the time.
        """
        mark = {"at": int(self.clock()), "ms": int(self.clock() * 1000), **said}
        try:
            self.store.put_if_absent(
                _runs(batch.tenant, batch.id) + name, json.dumps(mark).encode()
            )
        except ObjectExists:
            found = self.mark(batch, name)
            assert found is not None, "marks of open batches are not deleted"
            return found
        return mark

    def last_lease(self, tenant: str, batch_id: str) -> StoredObject | None:
        """Return the lease of a batch's last run; None if the batch was never run.

        The lease is an object that the run's gateway renews while it runs the batch.
        """
        leases = [*self.store.scan(f"{_runs(tenant, batch_id)}lease-")]
        return leases[-1] if leases else None

    def claim(self, tenant: str, batch_id: str, last: StoredObject | None) -> int | None:
        """Begin a run of a batch; of gateways that try at once, one succeeds.

        last: lease of the last run, whose gateway is gone; None: there was none.

        Return the number of the run; None if another gateway was faster.
        """
        run = 1 + (int(last.key.rpartition("-")[2]) if last else 0)
        try:
            self.store.put_if_absent(f"{_runs(tenant, batch_id)}lease-{run:06d}", b"{}")
        except ObjectExists:
            return None
        return run

    def renew(self, batch: BatchRecord, run: int) -> bool:
        """Renew a run's lease; return False if the batch has ended or a later run has begun."""
        runs = _runs(batch.tenant, batch.id)
        try:
            self.store.touch(f"{runs}lease-{run:06d}")
        except ObjectNotFound:
            return False
        return self.store.first(f"{runs}lease-", f"{runs}lease-{run:06d}") is None

    def put_part(
        self, batch: BatchRecord, run: int, number: int, results: Sequence[Result]
    ) -> None:
        """Store some results of a run as one part: from now on their lines are done.

        Raises StoreError.

        run: number of the run.
        number: number of the part in the run.
        """
        ok = sum(result.ok for result in results)
        key = f"part-{run:06d}-{number:06d}-{ok}-{len(results) - ok}"
        head = json.dumps([[each.number, each.ok, *each.tokens] for each in results]).encode()
        data = b"\n".join([head, *(result.line for result in results)])
        self._put(_runs(batch.tenant, batch.id) + key, data)

    def results(self, batch: BatchRecord) -> Iterator[Result]:
        """Yield the results of all lines that are done, each line once.

        One part is in memory at a time.
        """
        seen = set[int]()
        for key in list(self.store.list(f"{_runs(batch.tenant, batch.id)}part-")):
            head, *lines = self.store.get(key).split(b"\n")
            for (number, ok, *tokens), line in zip(json.loads(head), lines, strict=True):
                if number not in seen:
                    seen.add(number)
                    yield Result(number, ok, line, LineTokens(*tokens))

    def end(self, batch: BatchRecord, status: str, **said: Any) -> None:
        """End a batch, unless it has ended, and delete its other marks, leases and stored results.

        status: OpenAI's name of the final status, such as "completed" or "failed".
        said: further members of the batch's JSON.
        """
        marks = {name: mark for name in _STATES if (mark := self.mark(batch, name))}
        times = {f"{_STATES[name]}_at": mark["at"] for name, mark in marks.items()}
        self.set_mark(batch, ENDED, status=status, times=times, said=said)
        self.clear(batch.tenant, batch.id)

    def clear(self, tenant: str, batch_id: str) -> None:
        """Delete all marks, leases and parts (stored results) of an ended batch but the mark of its
        end.
        """
        runs = _runs(tenant, batch_id)
        for key in list(self.store.list(runs)):
            if not key.endswith(f"/{ENDED}"):
                self.store.delete(key)
        self.store.delete(f"{OPEN}{tenant}/{batch_id}")

    def _put(self, key: str, data: bytes) -> None:
        """Write an object under a key that nobody else writes. Raises StoreError."""
        with suppress(ObjectExists):  # an earlier attempt worked, but its reply was lost
            self.store.put_if_absent(key, data)


def clean_up(store: ObjectStore, now: float, *, dry_run: bool) -> Iterator[StoredObject]:
    """Delete batches made longer ago than LIFETIME_S (60 days) and yield each. Raises StoreError.

    now: Unix seconds.
    dry_run: yield without deleting.
    """
    for one in store.scan(BATCHES):
        if one.modified + LIFETIME_S <= now:
            if not dry_run:
                for key in list(store.list(RUNS + one.key.removeprefix(BATCHES) + "/")):
                    store.delete(key)
                store.delete(one.key)
            yield one


def _batch_json(batch: BatchRecord, marks: Mapping[str, Json], done: tuple[int, int]) -> Json:
    """Return OpenAI's batch object.

    marks: records of the states that the batch has reached, with their times, by state.
    done: numbers of lines that have completed and failed so far.
    """
    ended = marks.get(ENDED)
    status = "validating"
    for name, of_mark in _STATES.items():
        status = of_mark if name in marks else status
    times = {f"{_STATES[name]}_at": marks[name]["at"] for name in _STATES if name in marks}
    total = marks.get(VALIDATED, {}).get("total", 0)
    completed, failed = (min(count, total) for count in done)
    shown: Json = {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": None,
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": status,
        "output_file_id": None,
        "error_file_id": None,
        "created_at": batch.created_at,
        **dict.fromkeys(("in_progress_at", "expires_at", "finalizing_at", "completed_at")),
        **dict.fromkeys(("failed_at", "expired_at", "cancelling_at", "cancelled_at")),
        "request_counts": {"total": total, "completed": completed, "failed": failed},
        "model": marks.get(VALIDATED, {}).get("model"),
        "usage": None,
        "metadata": batch.metadata,
    }
    if ended is not None:
        shown |= {"status": ended["status"], f"{ended['status']}_at": ended["at"]}
        times = ended["times"]
        shown |= ended["said"]
    return shown | times | {"expires_at": batch.expires_at}


def _key(tenant: str, batch_id: str) -> str:
    if not batch_id.removeprefix("batch_").isalnum() or not batch_id.isascii():
        raise _not_found()
    return f"{BATCHES}{tenant}/{batch_id}"


def _runs(tenant: str, batch_id: str) -> str:
    return f"{RUNS}{tenant}/{batch_id}/"


def _not_found() -> NotFound:
    return NotFound("no such batch: ids of batches begin with batch_", param="batch_id")
