"""The thread in which an engine steps, and what happens when a step fails."""

import logging
import threading
from collections.abc import Callable

from lorikeet_engine.engine import Engine
from lorikeet_engine.errors import DeviceLost, StepFailed
from lorikeet_engine.process.watchdog import Watchdog, end_process
from lorikeet_engine.request import Output

log = logging.getLogger(__name__)


class EngineLoop:
    """Steps an engine as long as there is work, and passes its outputs to `on_outputs`.

    `on_outputs` is called on this thread with every step's outputs, never with none, and once more
    by `close`, on the thread that calls that. It must not block. Where no later step could work,
    the process ends: a step takes longer than step_timeout_s, the device is lost, or the engine
    cannot begin anew after an error of its own.
    """

    def __init__(
        self, engine: Engine, on_outputs: Callable[[list[Output]], None], step_timeout_s: float
    ) -> None:
        self._engine = engine
        self._on_outputs = on_outputs
        self._watchdog = Watchdog(step_timeout_s, engine.status)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lorikeet-engine", daemon=True)

    def start(self) -> None:
        """Begin to step."""
        self._watchdog.start()
        self._thread.start()

    def close(self) -> None:
        """Finish the step at hand, fail what is in flight with EngineClosed, close the engine."""
        self._closing.set()
        self._engine.wake()
        if self._thread.is_alive():
            self._thread.join()
        self._watchdog.stop()
        self._deliver(self._engine.close())

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._engine.wait()
                with self._watchdog:
                    outputs = self._step()
                self._deliver(outputs)
        except DeviceLost as error:
            end_process("device_lost", error=error.message)
        except BaseException as error:
            end_process("engine_lost", error=repr(error))

    def _step(self) -> list[Output]:
        try:
            return self._engine.step()
        except DeviceLost:
            raise
        except Exception as error:
            # Not the forward pass but the engine's own code: its state may be wrong by now.
            log.exception("engine_state_lost")
            failure = StepFailed(f"the engine began anew after {type(error).__name__}")
            return self._engine.fail_all(failure)

    def _deliver(self, outputs: list[Output]) -> None:
        if not outputs:
            return
        try:
            self._on_outputs(outputs)
        except Exception:
            log.exception("outputs_undelivered", extra={"outputs": len(outputs)})
