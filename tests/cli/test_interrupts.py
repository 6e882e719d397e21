"""Ctrl-C ends `lorikeet serve` without a traceback, at every stage."""

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
    def run_or_exit(*_, **__): raise KeyboardInterrupt
class application:
    app = None
sys.modules["lorikeet.serving.start"] = start
sys.modules["lorikeet.serving.application"] = application
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
    done = run(tmp_path, "lorikeet.serving.run", "127.0.0.1", "9100")
    assert (done.returncode, done.stdout, done.stderr) == (status, said, "")


@pytest.mark.parametrize("module", ["demo.serve", "lorikeet"])
def test_ctrl_c_while_the_command_is_imported(tmp_path: Path, module: str) -> None:
    (tmp_path / "psutil.py").write_text(INTERRUPTED)
    done = run(tmp_path, module, "serve")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
    assert not (tmp_path / ".lorikeet").exists()


STAGE = """
import os, signal, sys, threading, time
from pathlib import Path
from lorikeet.cli.serve import run
from lorikeet.cli.serve.environment import service_environment
DEAF = Path("deaf")
SERVICE = '''
import pathlib, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
pathlib.Path("deaf").touch()
time.sleep(60)
'''
def interrupt():
    while not DEAF.exists():
        time.sleep(0.05)
    os.kill(os.getpid(), {number})
def prepare(_):
    {prepare}
    return run.Prepared(None, None, None)
run._check = lambda _: {check}
run._command = lambda _: [sys.executable, "-c", SERVICE]
run._TERMINATE_S = 0.2
threading.Thread(target=interrupt, daemon=True).start()
raise SystemExit(run.run_service(service_environment(os.environ | {{"PORT": "9"}}), prepare))
"""
KILL = "os.kill(os.getpid(), {number})"


@pytest.mark.parametrize(
    ("stage", "number", "status"),
    [("check", signal.SIGINT, 130), ("prepare", signal.SIGTERM, 143)],
)
def test_a_signal_before_the_service_runs_ends_it_at_once(
    tmp_path: Path, stage: str, number: int, status: int
) -> None:
    stages = {"check": "None", "prepare": "pass"} | {stage: KILL.format(number=int(number))}
    (tmp_path / "stage.py").write_text(STAGE.format(number=int(number), **stages))
    done = run(tmp_path, "stage")
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


SLOW_IMPORT = "import pathlib, time; pathlib.Path('deaf').touch(); time.sleep(60)"


def test_ctrl_c_ends_the_checks_too(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(SLOW_IMPORT)
    script = STAGE.format(number=int(signal.SIGINT), prepare="pass", check="None")
    (tmp_path / "stage.py").write_text(script.replace("run._check = lambda _: None", ""))
    begun_s = time.monotonic()
    done = run(tmp_path, "stage")
    assert time.monotonic() - begun_s < 30
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_start_that_ignores_ctrl_c_is_killed_soon(tmp_path: Path) -> None:
    script = STAGE.format(number=int(signal.SIGINT), prepare="pass", check="None")
    (tmp_path / "stage.py").write_text(script)
    begun_s = time.monotonic()
    done = run(tmp_path, "stage")
    assert time.monotonic() - begun_s < 30
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == "Killed."


IMPORTS = """
import os, signal
from lorikeet.interrupts import killed_by_sigint
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
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        text=True,
    )
    assert said == "goes on\n"
