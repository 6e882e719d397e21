"""What a newcomer sees: one command, a line to paste, an answer, Ctrl-C."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def demo(tmp_path):
    """`python -m demo.serve` in a folder of its own, and the lines it has printed."""
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "LORIKEET_BASE_MODELS": f"lorikeet-demo={ROOT / 'demo' / 'model'}",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "demo.serve"],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True)
    reader.start()
    yield process, lines
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def printed(lines, text, within_s):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if any(text in line for line in lines):
            return True
        time.sleep(0.1)
    return False


def curl_in(lines):
    text = "".join(lines)
    return re.search(r"^  (curl .*?\\\n.*?)$", text, re.MULTILINE | re.DOTALL).group(1)


def test_one_command_serves_the_line_it_prints_works_and_ctrl_c_ends_it(demo):
    process, lines = demo
    begun = time.monotonic()
    assert printed(lines, "Ctrl-C stops the service", within_s=120), "".join(lines)
    ready_s = time.monotonic() - begun
    answer = subprocess.run(
        ["bash", "-c", curl_in(lines)], capture_output=True, text=True, check=True, timeout=60
    )
    content = json.loads(answer.stdout)["choices"][0]["message"]["content"]
    assert json.loads(content) == {"name": "Mira", "amount": 12, "city": "Lyon"}

    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert time.monotonic() - begun < 25
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", 8000)) != 0
    assert ready_s < 60


@pytest.mark.parametrize("port", [8000, 8001])
def test_a_taken_port_is_said_and_nothing_is_started(tmp_path, port):
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        squatter.bind(("127.0.0.1", port))
        squatter.listen()
        ended = subprocess.run(
            [sys.executable, "-m", "demo.serve"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 1
    assert f"127.0.0.1:{port}" in ended.stderr
    assert not (tmp_path / ".lorikeet").exists()
