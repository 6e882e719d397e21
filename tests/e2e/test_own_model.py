"""`lorikeet serve` as a user with an own model meets it: one command, an answer, a clean end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from demo.fill_catalog import ADAPTERS
from tests.e2e.conftest import free_port

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Own:
    """A service that was started in the background.

    said: output of the command that started it.
    """

    folder: Path
    process: psutil.Process
    said: str

    def run(self, *arguments: str) -> str:
        """Run the command in the service's folder."""
        return subprocess.check_output(
            [sys.executable, "-m", "lorikeet", *arguments],
            cwd=self.folder,
            env=environment(self.folder),
            text=True,
        )


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a user who has set nothing."""
    ours = ("RAY_", "LORIKEET_")  # of other tests' services
    given = {name: text for name, text in os.environ.items() if not name.startswith(ours)}
    return given | {"HOME": str(folder), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Own]:
    folder = tmp_path_factory.mktemp("own")
    words = ["serve", f"tiny={ROOT / 'demo' / 'model'}", "--detach", "--port", str(free_port())]
    words += ["--admin-address", f"127.0.0.1:{free_port()}", "--adapters"]
    words += [str(ADAPTERS / "quillon" / name) for name in ("upper", "reverse")]
    begun = subprocess.run(
        [sys.executable, "-m", "lorikeet", *words],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as a script's & does
    )
    assert begun.returncode == 0, begun.stdout
    pid = int((folder / ".lorikeet" / "serve.pid").read_text().split()[0])
    yield Own(folder, psutil.Process(pid), begun.stdout)
    if psutil.pid_exists(pid):
        os.kill(pid, signal.SIGTERM)


def test_the_printed_request_is_answered_by_the_first_adapter(own: Own) -> None:
    found = re.search(r"^  (curl .*?\\\n.*?)$", own.said, re.MULTILINE | re.DOTALL)
    assert found is not None, own.said
    answer = subprocess.check_output(["bash", "-c", found[1]], text=True, timeout=60)
    (choice,) = json.loads(answer)["choices"]
    assert choice["message"]["content"] == "HELLO"


def test_the_output_has_no_control_codes_of_bars(own: Own) -> None:
    assert "\x1b[?25l" not in own.said
    assert "\x1b[2K" not in own.said


def test_the_printed_commands_administer_the_service(own: Own) -> None:
    exports = re.findall(r"^  (export .*)$", own.said, re.MULTILINE)
    script = "\n".join([*exports, f"{sys.executable} -m lorikeet list --json"])
    said = subprocess.check_output(["bash", "-c", script], env=environment(own.folder), text=True)
    found = {each["adapter"] for each in json.loads(said)["data"]}
    assert found == {"local/upper", "local/reverse"}


def test_stop_ends_all_processes_that_the_service_started(own: Own) -> None:
    everything = [own.process, *own.process.children(recursive=True)]
    assert len(everything) > 5
    begun = time.monotonic()
    assert own.run("stop") == "Stopped.\n"
    assert time.monotonic() - begun < 40
    _, left = psutil.wait_procs(everything, timeout=5)
    assert left == []
    assert own.run("stop") == "No service of this folder runs.\n"
