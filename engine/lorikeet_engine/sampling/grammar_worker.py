"""Thread that compiles grammars, which may take long; tenants take turns."""

import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar
from weakref import WeakSet

from lorikeet_engine.errors import EngineClosed, EngineOverloaded
from lorikeet_engine.malloc_trim import trim_malloc

# A compiled JSON schema takes 90 KiB, and 70 to 120 bytes, mostly 85, for each character.
_GRAMMAR_BYTES = 90 << 10
_CHARACTER_BYTES = 85
_KEPT_BYTES = 128 << 20
_TENANT_KEPT_BYTES = _KEPT_BYTES // 4  # 4 JSON schemas of 93 KB, or 120 of 2 KB
_TENANT_MOST_BYTES = 256 << 20
_UNUSED_S = 60.0
_MAX_WAITING = 32
_MIN_RETRY_AFTER_S = 1.0
_NICENESS = 5
"""Niceness of the worker thread, so that compiling schemas delays no step.

If all cores are busy, the worker gets a third of the CPU time that a step gets.
"""

Result = TypeVar("Result")


class _Work(Future[Result]):
    """Future of one grammar's result, which cannot be cancelled.

    tenant: the tenant that was the first to ask for the grammar's result.
    """

    def __init__(self, grammar: str, tenant: str) -> None:
        super().__init__()
        self.grammar, self.tenant = grammar, tenant
        self.bytes = _GRAMMAR_BYTES + _CHARACTER_BYTES * len(grammar)
        self.used_s = time.monotonic()
        self.set_running_or_notify_cancel()


class GrammarWorker(Generic[Result]):
    """Worker thread that computes a result for each grammar, and caches the latest. Thread-safe.

    A result is what `work` makes of a grammar's text, such as the compiled grammar.

    Tenants take turns, each with a limited queue: a tenant with many or costly grammars delays only
    itself. The cache is bounded by the results' expected memory, for each tenant and for all. If a
    bound is exceeded, the tenant with the most memory loses its oldest result; results unused for a
    minute are dropped.

    `work` must release the GIL while it computes, so that no thread of the engine waits for it.
    """

    def __init__(self, work: Callable[[str], Result]) -> None:
        """Create the worker; its thread starts when the first result is asked for.

        work: computes a grammar's result; called on the worker's thread. Its errors are not cached.
        """
        self._work = work
        self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
        self._changed = threading.Condition()  # guards all below
        self._kept: dict[str, _Work[Result]] = {}  # by grammar, the last used last
        # By tenant and grammar; the tenant that is next comes first.
        self._waiting: dict[str, dict[str, _Work[Result]]] = {}
        self._living = WeakSet[_Work[Result]]()  # cached, waiting, or held by a caller
        self._usual_s = 0.0  # moving average of the time of one grammar
        self._closed = False

    def result(self, grammar: str, tenant: str) -> "Future[Result]":
        """Return a future of a grammar's result; the future is done if the result is cached.

        The future cannot be cancelled. Keep it as long as the result is in use: until the last
        reference to the future is dropped, the grammar counts towards the limits of the tenant that
        asked first. Raises EngineOverloaded if too many of the tenant's grammars wait or are in
        use, and EngineClosed after `close`.
        """
        with self._changed:
            if self._closed:
                raise _closed()
            kept = self._kept.pop(grammar, None)
            if kept is not None:
                kept.used_s = time.monotonic()
                self._kept[grammar] = kept
                return kept
            queue = self._waiting.get(tenant, {})
            if grammar not in queue:
                work = _Work[Result](grammar, tenant)
                self._check_bounds(work, len(queue))
                self._living.add(work)
                self._waiting.setdefault(tenant, queue)[grammar] = work
                if self._thread.ident is None:
                    self._thread.start()
                self._changed.notify()
            return queue[grammar]

    def close(self) -> None:
        """Finish the grammar that `work` is computing; fail waiting ones with EngineClosed."""
        with self._changed:
            self._closed = True
            waiting, self._waiting = self._waiting, {}
            self._changed.notify()
        for queue in waiting.values():
            for work in queue.values():
                work.set_exception(_closed())
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        if sys.platform == "linux":  # elsewhere niceness is the whole process's
            os.nice(_NICENESS)  # of this thread, and of processes that it starts
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed, self._used_for_s())
            self._drop_unused()
            self._work_on_next()

    def _used_for_s(self) -> float | None:
        """Return the seconds until the least recently used result expires; None without results."""
        for kept in self._kept.values():
            return max(0.0, kept.used_s + _UNUSED_S - time.monotonic())
        return None

    def _drop_unused(self) -> None:
        with self._changed:
            before = len(self._kept)
            while self._used_for_s() == 0:
                del self._kept[next(iter(self._kept))]
            dropped = len(self._kept) < before
        if dropped:
            trim_malloc()

    def _work_on_next(self) -> None:
        with self._changed:
            if not self._waiting:
                return
            tenant, queue = next(iter(self._waiting.items()))
            work = queue.pop(next(iter(queue)))
            del self._waiting[tenant]
            if queue:
                self._waiting[tenant] = queue  # behind the others
            kept = self._kept.get(work.grammar)  # meanwhile cached for another tenant
        if kept is not None:
            work.set_result(kept.result())
            return
        began_s = time.monotonic()
        try:
            result = self._work(work.grammar)
        except BaseException as error:
            with self._changed:
                self._living.discard(work)  # the traceback would keep it alive
            work.set_exception(error)
        else:
            self._keep(work)
            work.set_result(result)
        with self._changed:
            self._usual_s += 0.2 * (time.monotonic() - began_s - self._usual_s)

    def _keep(self, work: _Work[Result]) -> None:
        with self._changed:
            work.used_s = time.monotonic()
            self._kept[work.grammar] = work
            held = Counter[str]()
            for kept in self._kept.values():
                held[kept.tenant] += kept.bytes
            while True:
                ((most, most_bytes),) = held.most_common(1)
                if most_bytes <= _TENANT_KEPT_BYTES and held.total() <= _KEPT_BYTES:
                    return
                oldest = next(kept for kept in self._kept.values() if kept.tenant == most)
                held[most] -= oldest.bytes
                del self._kept[oldest.grammar]

    def _check_bounds(self, new: _Work[Result], waiting: int) -> None:
        if waiting == _MAX_WAITING:
            # One of the tenant's grammars is taken in each round of the waiting tenants.
            round_s = len(self._waiting) * self._usual_s
            raise _refusal(f"{_MAX_WAITING} other JSON schemas wait to be compiled", round_s)
        living = sum(work.bytes for work in self._living if work.tenant == new.tenant)
        if living + new.bytes > _TENANT_MOST_BYTES:
            raise _refusal(f"the JSON schemas in use take {living >> 20} MiB compiled", 0.0)


def _refusal(reason: str, free_s: float) -> EngineOverloaded:
    retry_after_s = max(_MIN_RETRY_AFTER_S, free_s)
    return EngineOverloaded(
        f"{reason} of this tenant: send the request again in {math.ceil(retry_after_s)} s, or use "
        "fewer or smaller schemas at once",
        retry_after_s=retry_after_s,
        code="rate_limit_exceeded",
    )


def _closed() -> EngineClosed:
    return EngineClosed("the engine was closed: send the request again")
