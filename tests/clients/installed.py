"""Clients of the service, installed from their registries once into folders of their own.

They would make the development environment larger by 1 GB, and pin what it shares with them.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path

import pytest

HERE = Path(__file__).parent
EXAMPLES = HERE / "examples"
REQUIREMENTS = {"instructor": HERE / "instructor.txt", "": HERE / "requirements.txt"}
"""What to install by how a script begins: Instructor wants an older client of OpenAI's."""
PACKAGES = (HERE / "package.json", HERE / "package-lock.json")
INSTALL_S = 900
_NO_NETWORK = re.compile("ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ETIMEDOUT|error sending request")
"""What npm and uv say where no registry can be reached."""


@cache
def python(script: str) -> Path:
    """Return the Python of an environment with the client whose examples a script has."""
    requirements = next(REQUIREMENTS[begin] for begin in REQUIREMENTS if script.startswith(begin))

    def install(folder: Path) -> None:
        uv = [sys.executable, "-m", "uv"]
        _run([*uv, "venv", "--quiet", "--python", sys.executable, str(folder / "venv")], folder)
        interpreter = str(folder / "venv/bin/python")
        to = ["--quiet", "--python", interpreter, "--requirement", str(requirements)]
        _run([*uv, "pip", "install", *to], folder)

    return _installed(install, requirements) / "venv/bin/python"


@cache
def node_modules() -> Path:
    """Return the folder beside which scripts find the clients in package.json."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")

    def install(folder: Path) -> None:
        for file in PACKAGES:
            shutil.copy(file, folder)
        # but for Claude Code, which puts its binary into place, no package runs scripts
        _run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], folder)
        _run(["node", "node_modules/@anthropic-ai/claude-code/install.cjs"], folder)

    return _installed(install, *PACKAGES) / "node_modules"


def _installed(install: Callable[[Path], None], *pins: Path) -> Path:
    """Return a folder for these pins; skip the test where the registry cannot be reached.

    It is made under another name first: what was begun and not finished is begun again.
    """
    digest = sha256(b"".join(pin.read_bytes() for pin in pins)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"lorikeet-clients-{digest}"
    if not folder.exists():
        begun = Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))
        install(begun)
        begun.rename(folder)
    assert folder.stat().st_uid == os.getuid(), f"{folder} is another user's"
    return folder


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False
    )
    if done.returncode and _NO_NETWORK.search(done.stderr):
        pytest.skip(f"clients cannot be installed without a network: {done.stderr.strip()[-200:]}")
    assert not done.returncode, done.stderr
