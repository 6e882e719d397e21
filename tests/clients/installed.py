"""Clients of the service, installed once from their registries into folders of their own.

In the development environment they would take 1 GB and pin packages that it shares with them.
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
"""Requirements by prefix of a script's name: Instructor needs an older client of OpenAI's."""
PACKAGES = (HERE / "package.json", HERE / "package-lock.json")
INSTALL_S = 900
_NO_NETWORK = re.compile("ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ETIMEDOUT|error sending request")
"""Messages of npm and uv if no registry can be reached."""


@cache
def python(script: str) -> Path:
    """Return the Python of an environment with the client that a script uses."""
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
    """Return a folder whose node_modules has the clients in package.json."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")

    def install(folder: Path) -> None:
        for file in PACKAGES:
            shutil.copy(file, folder)
        # no package but Claude Code, which moves its binary into place, runs install scripts
        _run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], folder)
        _run(["node", "node_modules/@anthropic-ai/claude-code/install.cjs"], folder)

    return _installed(install, *PACKAGES) / "node_modules"


def _installed(install: Callable[[Path], None], *pins: Path) -> Path:
    """Return the folder of an installation; skip the test if no registry is reachable.

    Installs under another name first, then renames, so an unfinished installation is started
    anew.
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
