"""The check of constraints.txt, without a package registry."""

import os
import subprocess
import sys
from pathlib import Path

from tests.constraints import ROOT, differences, pins


def test_the_check_names_missing_and_unused_pins() -> None:
    wanted = pins("torch==2.13.0\nnvidia-nccl-cu13==2.29.7\njinja2==3.1.6\n")
    pinned = pins("# comment\ntorch==2.12.0 # why\nJinja2==3.1.6\n")
    assert list(differences(pinned, wanted)) == [
        "constraints.txt: add nvidia-nccl-cu13==2.29.7",
        "constraints.txt: add torch==2.13.0",
        "constraints.txt: remove torch==2.12.0: unused",
    ]


def test_package_names_are_normalized_before_they_are_compared() -> None:
    assert pins("pydantic_core==2.50.4\nzope.event==6.2\nPyYAML==6.0.3\n") == {
        "pydantic-core==2.50.4",
        "zope-event==6.2",
        "pyyaml==6.0.3",
    }


def test_the_check_is_skipped_with_a_message_if_the_registry_is_unreachable(tmp_path: Path) -> None:
    nowhere = {"UV_DEFAULT_INDEX": "http://127.0.0.1:1/simple", "UV_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.constraints"],
        cwd=ROOT,
        env={**os.environ, **nowhere, "UV_HTTP_RETRIES": "0"},
        capture_output=True,
        text=True,
    )
    assert "not checked, as the package registry cannot be reached" in done.stdout
    assert done.returncode == 0


def test_every_command_that_installs_the_cuda_extra_uses_the_constraints() -> None:
    files = [*ROOT.glob("docs/*.md"), *ROOT.glob("platform/**/*.py"), *ROOT.glob("engine/**/*.py")]
    told = [line for file in files for line in file.read_text().splitlines() if "[cuda]" in line]
    assert len(told) >= 3
    assert all("pip install --constraint constraints.txt" in line for line in told), told


def test_make_refuses_an_old_python_before_it_installs_anything(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    python = tmp_path / "python3"
    old = "import sys; sys.version_info = (3, 10, 13); exec(sys.argv[1])"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{old}' \"$2\"\n")
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "serve", f"PYTHON={python}"], cwd=tmp_path, capture_output=True, text=True
    )
    assert "Python 3.11 or newer is wanted: make serve PYTHON=python3.12" in done.stderr
    assert done.returncode == 2
    assert not (tmp_path / ".venv").exists()
