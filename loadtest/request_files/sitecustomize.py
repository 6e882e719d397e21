"""Profiler of Lorikeet's functions, which Python imports at the start of each process.

The folder must be on PYTHONPATH, and REQUEST_FILES_FOLDER must name a folder: while the folder
has a file `on`, each process appends the functions that it enters to a file named by its id.
"""

import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

_FOLDER = Path(os.environ["REQUEST_FILES_FOLDER"])
_RECORDED = ("default_worker.py", "lorikeet_engine.process.server")
"""Programs that are recorded: Ray's workers and engines. Ray's own processes start in time."""
_OURS = ("/platform/lorikeet/", "/engine/lorikeet_engine/")
_POLL_S = 0.05
_entered: dict[str, None] = {}
_is_on = False


def _enter(frame: FrameType, event: str, _: object) -> None:
    if _is_on and event == "call":
        code = frame.f_code
        if any(part in code.co_filename for part in _OURS):
            _entered[f"{code.co_filename}:{code.co_qualname}"] = None


def _write() -> None:
    global _is_on
    while True:
        time.sleep(_POLL_S)
        on = (_FOLDER / "on").exists()
        if _is_on and not on and _entered:
            (_FOLDER / str(os.getpid())).write_text("\n".join(list(_entered)))
            _entered.clear()
        _is_on = on


if any(program in Path("/proc/self/cmdline").read_text() for program in _RECORDED):
    threading.Thread(target=_write, daemon=True).start()
    threading.setprofile(_enter)
    sys.setprofile(_enter)
