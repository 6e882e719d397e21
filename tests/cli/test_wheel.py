"""The wheel has the command and the application, without the repository."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROBE = """
import importlib.util, lorikeet, lorikeet_engine
print(lorikeet.__file__)
print(lorikeet_engine.__file__)
print(importlib.util.find_spec("lorikeet.serving.application").origin)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Environment with the wheel, and this one's packages for its dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    uv = [sys.executable, "-m", "uv"]
    dist = str(folder / "dist")
    built = subprocess.run(
        [*uv, "build", "--quiet", "--wheel", "--out-dir", dist, str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )
    if "Failed to fetch" in built.stderr:
        pytest.skip("the build backend cannot be downloaded")
    assert built.returncode == 0, built.stderr
    venv.create(folder / "env", with_pip=False)
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    beside = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "dependencies.pth").write_text(f"{beside}\n")
    (wheel,) = (folder / "dist").glob("*.whl")
    python = str(folder / "env" / "bin" / "python")
    subprocess.run(
        [*uv, "pip", "install", "--quiet", "--no-deps", "--python", python, str(wheel)], check=True
    )
    return folder / "env"


def run(installed: Path, program: str, *arguments: str) -> str:
    environ = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.check_output(
        [installed / "bin" / program, *arguments], cwd=installed, env=environ, text=True
    )


@pytest.mark.soak  # builds and installs
def test_an_installed_wheel_holds_all_that_lorikeet_serve_starts(installed: Path) -> None:
    found = run(installed, "python", "-c", PROBE).splitlines()
    assert len(found) == 3
    assert all(Path(path).is_relative_to(installed) for path in found), found


@pytest.mark.soak
def test_an_installed_wheel_has_the_command(installed: Path) -> None:
    said = run(installed, "lorikeet", "serve", str(ROOT / "demo" / "model"), "--print-env")
    assert f"export LORIKEET_BASE_MODELS=model={ROOT}/demo/model" in said
