"""An engine in a process of its own, as a replica has it, and when its tokens came."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Self

from lorikeet_engine.engine import Engine
from lorikeet_engine.errors import EngineClosed
from lorikeet_engine.process.client import EngineProcessClient
from lorikeet_engine.request import Failed, Output


class Client:
    """The engine's one client. Use as a context manager.

    came_s: time.perf_counter() at each token, by request id. ended: the ids of whole answers.
    """

    def __init__(self, build: Callable[[], Engine]) -> None:
        self._changed = threading.Condition()  # guards the three below
        self.came_s: defaultdict[str, list[float]] = defaultdict(list)
        self.ended: set[str] = set()
        self._error: Exception | None = None
        self.host = EngineProcessClient(build, self._deliver, self._fail, lambda _status: None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.host.close()

    def until(self, holds: Callable[[], object], within_s: float) -> None:
        """Return once it holds, which is looked at as tokens come; raises what went wrong."""
        with self._changed:
            held = self._changed.wait_for(lambda: holds() or self._error, within_s)
            if self._error is not None:
                raise self._error
            assert held, f"no answer within {within_s:g} s"

    def _deliver(self, outputs: list[Output]) -> None:
        now_s = time.perf_counter()
        with self._changed:
            for output in outputs:
                if isinstance(output, Failed):
                    self._error = output.error
                    continue
                self.came_s[output.request_id] += [now_s] * len(output.token_ids)
                if output.finish is not None:
                    self.ended.add(output.request_id)
            self._changed.notify_all()

    def _fail(self, error: EngineClosed) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()
