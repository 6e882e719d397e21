"""Triton's kernels on a machine without a GPU: a test file run again in Triton's interpreter.

The interpreter must be chosen before Triton is first imported, so the file gets a process of its
own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def run_in_interpreter(file: str, marks: str = "") -> None:
    """Every test of the file with these marks must pass there; over there, this one is skipped."""
    if INTERPRETED:
        pytest.skip("this is the interpreter's process")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", "-m", marks, file],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stdout + run.stderr
