"""Ctrl-C ends `make serve PORT=…` without a traceback, whatever it is at."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RAY = """
{}
def init(**_): {}
class serve:
    start = staticmethod(lambda **_: None)
    shutdown = staticmethod(lambda: print("shut down"))
    def run(*_, **__): raise KeyboardInterrupt
"""


@pytest.mark.parametrize(
    ("imports", "init", "said"),
    [
        ("raise KeyboardInterrupt", "pass", ""),
        ("pass", "raise KeyboardInterrupt", ""),
        ("pass", "pass", "shut down\n"),
    ],
)
def test_an_interrupt_leaves_no_traceback(
    tmp_path: Path, imports: str, init: str, said: str
) -> None:
    (tmp_path / "ray.py").write_text(RAY.format(imports, init))
    (tmp_path / "serve_app.py").write_text("app = None")
    done = subprocess.run(
        [sys.executable, "-m", "demo.serve_on_port", "127.0.0.1", "9100"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
