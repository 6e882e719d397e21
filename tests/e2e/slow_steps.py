"""Engine whose steps tests can make long; the engine's process imports no more than this."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lorikeet.settings import Settings
from tests.replica.quick_engine import quick_engine

if TYPE_CHECKING:
    from lorikeet_engine.engine import Engine

FOLDER = "TEST_FAULTS_FOLDER"
"""Environment variable with a folder's path: a file in the folder breaks the channel it names."""


def breakable_engine(settings: Settings, base_model: str) -> "Engine":
    """Build an engine whose steps wait first, for the seconds in the file `steps`."""
    engine, file = quick_engine(settings, base_model), Path(os.environ[FOLDER]) / "steps"
    step = engine.step

    def slow_step():
        if file.exists():
            time.sleep(float(file.read_text()))
        return step()

    engine.step = slow_step  # type: ignore[method-assign]
    return engine
