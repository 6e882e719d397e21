"""The thread that tells an engine's news."""

import logging
import threading
from collections.abc import Callable

from lorikeet_engine.engine import Engine
from lorikeet_engine.news import EngineNews

log = logging.getLogger(__name__)

# Between two news, while things change.
_APART_S = 0.1
# Waits and the uses of what is not used change by themselves.
_LOOK_S = 1.0


class Reporter:
    """Tells what has changed: at once after a quiet time, then a tenth of a second's changes each.

    `tell` is called on this thread, only with what has changed; the first news has everything that
    is nearer than remote. It must not block.
    """

    def __init__(self, engine: Engine, tell: Callable[[EngineNews], None]) -> None:
        self._engine, self._tell = engine, tell
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lorikeet-reporter", daemon=True)

    def start(self) -> None:
        """Begin to tell."""
        self._thread.start()

    def close(self) -> None:
        """Tell no more."""
        self._closing.set()
        self._engine.changed.set()
        self._thread.join()

    def _run(self) -> None:
        self._say()
        while not self._closing.wait(_APART_S):
            self._engine.changed.wait(_LOOK_S)
            self._engine.changed.clear()
            self._say()

    def _say(self) -> None:
        try:
            news = self._engine.news()
            if news is not None:
                self._tell(news)
        except Exception:
            log.exception("news_not_told")
