"""MiniStack's S3 server, run from this Python environment on a free port."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loadtest.ports import free_port

_START_S = 60


@contextmanager
def ministack() -> Iterator[str]:
    """Run the server and yield its address. Its data is lost at the end."""
    port = free_port()
    settings = {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "SERVICES": "s3"}
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(
            [_program()],
            cwd=folder,
            env=os.environ | settings | {"IOT_MTLS_ENABLED": "0"},  # IoT takes a fixed port
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait_for_port(port, server)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()  # kill, as a graceful end would wait for idle connections
            server.wait()


def _program() -> str:
    beside = Path(sys.executable).with_name("ministack")
    found = str(beside) if beside.exists() else shutil.which("ministack")
    assert found is not None, "ministack is not installed: install the dev group"
    return found


def _wait_for_port(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        assert server.poll() is None, f"the S3 server ended with status {server.returncode}"
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"the S3 server did not start in {_START_S} s")
