"""Work on grammars, which may take long: on a thread of its own, in turns of the tenants."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, NamedTuple, TypeVar

from lorikeet_engine.errors import EngineClosed, EngineOverloaded

_KEPT = 64  # of JSON schemas of 2 KB, say: 20 MB; of 100 KB: 450 MB
_MAX_WAITING = 32
_MIN_RETRY_AFTER_S = 1.0

Result = TypeVar("Result")


class _Kept(NamedTuple, Generic[Result]):
    """What came of a grammar, and the tenant in whose turn."""

    tenant: str
    result: Result


class GrammarWorker(Generic[Result]):
    """Works on each grammar once and keeps what came of the last ones. Thread-safe.

    Tenants take turns, and of each so many grammars may wait: one with many, or with costly ones,
    delays itself. Where too many are kept, the tenant that has most of them loses its oldest. A
    replica tries grammars with one of these and its engine compiles them with another: both keep
    the same number.
    """

    def __init__(self, work: Callable[[str], Result]) -> None:
        """work: called on the worker's thread; what raises is not kept."""
        self._work = work
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._lock = threading.Lock()  # guards all below
        self._kept: dict[str, _Kept[Result]] = {}  # by grammar, the last used last
        # By tenant and grammar; the tenant whose turn is next comes first.
        self._waiting: dict[str, dict[str, Future[Result]]] = {}
        self._usual_s = 0.0  # a moving average
        self._closed = False

    def result(self, grammar: str, tenant: str) -> "Future[Result]":
        """What comes of a grammar: there already if it is kept. The future cannot be cancelled.

        Raises EngineOverloaded if too many of the tenant's wait, and EngineClosed.
        """
        with self._lock:
            if self._closed:
                raise _closed()
            kept = self._kept.pop(grammar, None)
            if kept is not None:
                self._kept[grammar] = kept
                done = Future[Result]()
                done.set_result(kept.result)
                return done
            queue = self._waiting.setdefault(tenant, {})
            if grammar not in queue:
                if len(queue) == _MAX_WAITING:
                    raise self._refusal()
                queue[grammar] = Future()
                queue[grammar].set_running_or_notify_cancel()
                self._thread.submit(self._work_on_next)
            return queue[grammar]

    def close(self) -> None:
        """Finish the work at hand and fail the rest with EngineClosed. Safe to call twice."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, {}
        for queue in waiting.values():
            for future in queue.values():
                future.set_exception(_closed())
        self._thread.shutdown(cancel_futures=True)

    def _work_on_next(self) -> None:
        with self._lock:
            if self._closed:
                return
            tenant, queue = next(iter(self._waiting.items()))
            grammar, future = next(iter(queue.items()))
            del self._waiting[tenant], queue[grammar]
            if queue:
                self._waiting[tenant] = queue  # behind the others
            kept = self._kept.get(grammar)  # another tenant's, meanwhile
        if kept is not None:
            future.set_result(kept.result)
            return
        began_s = time.monotonic()
        try:
            result = self._work(grammar)
        except BaseException as error:
            future.set_exception(error)
        else:
            self._keep(grammar, _Kept(tenant, result))
            future.set_result(result)
        with self._lock:
            self._usual_s += 0.2 * (time.monotonic() - began_s - self._usual_s)

    def _keep(self, grammar: str, new: _Kept[Result]) -> None:
        with self._lock:
            if len(self._kept) == _KEPT:
                ((most, _),) = Counter(kept.tenant for kept in self._kept.values()).most_common(1)
                del self._kept[next(g for g, kept in self._kept.items() if kept.tenant == most)]
            self._kept[grammar] = new

    def _refusal(self) -> EngineOverloaded:
        # One of the tenant's is taken in each round of those that wait.
        retry_after_s = max(_MIN_RETRY_AFTER_S, len(self._waiting) * self._usual_s)
        return EngineOverloaded(
            f"{_MAX_WAITING} other JSON schemas of this tenant wait to be compiled: send the "
            f"request again in {retry_after_s:.0f} s, or use fewer schemas at once",
            retry_after_s=retry_after_s,
            code="rate_limit_exceeded",
        )


def _closed() -> EngineClosed:
    return EngineClosed("the engine was closed: send the request again")
