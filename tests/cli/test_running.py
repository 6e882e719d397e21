"""`lorikeet stop` stops the service of its folder, and no other."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOLDER = """
import time
from lorikeet.cli.serve.running import hold_pid_file
with hold_pid_file():
    print("held", flush=True)
    time.sleep(60)
"""


def python(folder, *arguments):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.fixture
def service(tmp_path):
    with python(tmp_path, "-c", HOLDER) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def stop(folder):
    process = python(folder, "-m", "lorikeet", "stop")
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    return said


def test_stop_ends_the_service_of_this_folder(service, tmp_path):
    assert stop(tmp_path) == "Stopped.\n"
    assert service.wait(10) != 0
    assert stop(tmp_path) == "No service of this folder runs.\n"


def test_stop_interrupts_the_service_as_ctrl_c_does(service, tmp_path):
    """And not by SIGTERM, after which the service kills its processes within ten seconds."""
    stop(tmp_path)
    assert "KeyboardInterrupt" in service.stderr.read()


def test_files_are_removed_only_after_the_service_has_stopped(service, tmp_path):
    bin_folder = f"BIN={Path(sys.executable).parent}"
    own, demo = (tmp_path / ".lorikeet" / name for name in ("catalog", "demo"))
    own.mkdir()
    demo.mkdir()
    for said in ("Stopped.", "No service of this folder runs."):  # the second time nothing runs
        done = subprocess.check_output(
            ["make", "--no-print-directory", "-f", ROOT / "Makefile", "clean", bin_folder],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            text=True,
        )
        removed = "rm -rf .lorikeet/demo .lorikeet/keys/demo .lorikeet/cache"
        assert done.splitlines() == [said, removed]
    assert service.poll() is not None
    assert own.exists(), "a user's own catalog stays"
    assert not demo.exists()


def test_stop_ends_no_other_process(service, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert stop(elsewhere) == "No service of this folder runs.\n"
    assert service.poll() is None


def test_a_killed_service_does_not_count_as_running(service, tmp_path):
    service.kill()
    service.wait(10)
    assert stop(tmp_path) == "No service of this folder runs.\n"


def test_an_unusable_folder_is_reported(tmp_path):
    (tmp_path / ".lorikeet").touch()
    process = python(tmp_path, "-c", HOLDER)
    _, said = process.communicate(timeout=30)
    assert "InvalidSetting: [Errno 17] File exists: '.lorikeet': .lorikeet must be" in said


def test_a_second_start_does_not_fill_the_catalog_of_the_first(service, tmp_path, monkeypatch):
    with (
        socket.create_server(("127.0.0.1", 0)) as free,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        monkeypatch.setenv("PORT", str(free.getsockname()[1]))
        monkeypatch.setenv("LORIKEET_ADMIN_ADDRESS", f"127.0.0.1:{other.getsockname()[1]}")
    second = python(tmp_path, "-m", "demo.serve")
    _, said = second.communicate(timeout=60)
    assert said == "Error: the service of this folder runs already: `lorikeet stop` stops it\n"
    assert not (tmp_path / ".lorikeet" / "demo").exists()


def test_a_second_service_of_a_folder_is_refused(service, tmp_path):
    second = python(tmp_path, "-c", HOLDER)
    _, said = second.communicate(timeout=30)
    assert second.returncode == 1
    assert "runs already: `lorikeet stop`" in said
    assert (tmp_path / ".lorikeet").stat().st_mode & 0o077 == 0
