"""Ctrl-C ends `make serve` without a traceback, at every stage."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INTERRUPTED = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
RAY = """
import sys
{}
def init(**_): {}
class serve:
    start = staticmethod(lambda **_: None)
    shutdown = staticmethod(lambda: print("shut down"))
class start:  # which imports more of Ray
    refuse_bad_start = staticmethod(lambda _: None)
    def run_or_exit(*_, **__): raise KeyboardInterrupt
sys.modules["lorikeet.serving.start"] = start
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module of the demo with modules of the folder in place of others."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
        cwd=folder,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("imports", "init", "status", "said"),
    [
        (INTERRUPTED, "pass", -signal.SIGINT, ""),
        ("pass", "raise KeyboardInterrupt", 0, ""),
        ("pass", "pass", 0, "shut down\n"),
    ],
)
def test_ctrl_c_during_a_start(
    tmp_path: Path, imports: str, init: str, status: int, said: str
) -> None:
    (tmp_path / "ray.py").write_text(RAY.format(imports, init))
    (tmp_path / "serve_app.py").write_text("app = None")
    done = run(tmp_path, "demo.serve_on_port", "127.0.0.1", "9100")
    assert (done.returncode, done.stdout, done.stderr) == (status, said, "")


def test_ctrl_c_while_the_start_is_imported(tmp_path: Path) -> None:
    (tmp_path / "psutil.py").write_text(INTERRUPTED)
    done = run(tmp_path, "demo.serve")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
    assert not (tmp_path / ".lorikeet").exists()


FILLED = """
import os, signal
from demo import start
start.fill_catalog = lambda *_: os.kill(os.getpid(), signal.SIGINT)
start._answers = lambda _: False
raise SystemExit(start.main())
"""


def test_ctrl_c_while_the_catalog_is_filled(tmp_path: Path) -> None:
    (tmp_path / "filled.py").write_text(FILLED)
    done = run(tmp_path, "filled")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


STARTING = """
import os, signal, sys, threading, time
from pathlib import Path
from demo import start
DEAF = Path("deaf")
os.environ["PORT"] = "1"  # a port without a service
SERVICE = '''
import pathlib, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
pathlib.Path("deaf").touch()
time.sleep(60)
'''
def interrupt():
    while not DEAF.exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)
start.fill_catalog = lambda *_: start.DemoKeys("lk_a", {})
start._answers = lambda _: False
start._command = lambda *_: [sys.executable, "-c", SERVICE]
start._TERMINATE_S = 0.2
threading.Thread(target=interrupt).start()
raise SystemExit(start.main())
"""


def test_a_start_that_ignores_ctrl_c_is_killed_soon(tmp_path: Path) -> None:
    (tmp_path / "starting.py").write_text(STARTING)
    begun_s = time.monotonic()
    done = run(tmp_path, "starting")
    assert time.monotonic() - begun_s < 30
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[-1] == "Killed."


IMPORTS = """
import os, signal
from demo.interrupts import killed_by_sigint
with killed_by_sigint():
    os.kill(os.getpid(), signal.SIGINT)
print("goes on")
"""


def test_a_program_that_ignores_ctrl_c_goes_on(tmp_path: Path) -> None:
    """A process that a script starts in the background ignores SIGINT."""
    (tmp_path / "imports.py").write_text(IMPORTS)
    ignored = f"trap '' INT; exec {sys.executable} imports.py"
    said = subprocess.check_output(
        ["bash", "-c", ignored],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    )
    assert said == "goes on\n"
