"""An upload resumes after dropped connections, restarted gateways and Ctrl-C."""

import hashlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from lorikeet.catalog.store.local import LocalStore
from lorikeet.catalog.store.object_store import open_store
from lorikeet.catalog.store.s3 import S3Parts
from lorikeet.cli.adapters import upload
from tests.cli.conftest import Lorikeet, new_catalog, serving
from tests.cli.peft_folders import peft_folder

PART = 200


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "_PAUSE_S", 0.02)


@pytest.fixture
def lorikeet(tmp_path: Path) -> Iterator[Lorikeet]:
    catalog, key = new_catalog(LocalStore(tmp_path / "catalog"))
    with serving(catalog, key, PART) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return peft_folder(tmp_path / "adapter")


def parts_of(lorikeet: Lorikeet) -> list[str]:
    """List the parts in quarantine."""
    found = lorikeet.catalog.store.list("uploads/")
    return [key for key in found if not key.endswith("upload.json")]


def command(lorikeet: Lorikeet, server: str, *arguments: str) -> subprocess.Popen[str]:
    """Start the command in its own process."""
    return subprocess.Popen(
        [sys.executable, "-c", "from lorikeet.cli import main; main()", *arguments],
        env=os.environ | {"LORIKEET_SERVER": server, "LORIKEET_ADMIN_KEY": lorikeet.admin_key},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Road:
    """Proxy between the command and a gateway, on which a test makes trouble."""

    def __init__(self, lorikeet: Lorikeet) -> None:
        self.to = lorikeet.url
        self.requests: list[bytes] = []
        self.trouble: Callable[[bytes], bool] = lambda _: False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def puts(self) -> int:
        return sum(line.startswith(b"PUT") for line in self.requests)

    def _pass_on(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            head = client.recv(65536)
            line = head.partition(b"\r\n")[0]
            self.requests.append(line)
            if self.trouble(line):
                return
            host, _, port = self.to.removeprefix("http://").partition(":")
            with socket.create_connection((host, int(port))) as server:
                server.sendall(head)
                back = threading.Thread(target=_pump, args=(server, client), daemon=True)
                back.start()
                _pump(client, server)
                back.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@contextmanager
def road_to(lorikeet: Lorikeet) -> Iterator[Road]:
    road = Road(lorikeet)
    thread = threading.Thread(target=road.serve)
    thread.start()
    try:
        yield road
    finally:
        road.close()
        thread.join()


def test_a_dropped_connection_costs_only_its_part(lorikeet: Lorikeet, folder: Path) -> None:
    with road_to(lorikeet) as road:
        road.trouble = lambda line: line.startswith(b"PUT") and len(road.requests) % 3 == 0
        lorikeet.do("--server", road.url, "register", str(folder), "acme/support")
        dropped = road.puts()
    (version,) = lorikeet.catalog.reader.refresh().adapter("acme", "support").versions
    parts = -(-version.size_bytes // PART)
    assert parts > 5
    assert parts < dropped < 2 * parts


def test_a_gateway_that_restarts_in_the_middle_is_waited_for(
    lorikeet: Lorikeet, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "_CONNECTIONS", 1)
    with road_to(lorikeet) as road, serving(lorikeet.catalog, lorikeet.admin_key, 999) as second:
        away: list[bytes] = []

        def restart(line: bytes) -> bool:
            if len(parts_of(lorikeet)) >= 3 and len(away) < 4:
                away.append(line)
                road.to = second.url
            return 0 < len(away) < 4

        road.trouble = restart
        lorikeet.do("--server", road.url, "register", str(folder), "acme/support")
        assert len(away) == 4
    (version,) = lorikeet.catalog.reader.refresh().adapter("acme", "support").versions
    assert (
        hashlib.sha256(
            lorikeet.catalog.store.get(f"blobs/{version.digest[:2]}/{version.digest}")
        ).hexdigest()
        == version.digest
    )


def test_a_stuck_upload_reports_its_progress(lorikeet: Lorikeet, folder: Path) -> None:
    with road_to(lorikeet) as road:
        road.trouble = lambda line: b"/parts/3 " in line
        result = lorikeet.run("--server", road.url, "register", str(folder), "acme/support")
        assert result.exit_code == 1
        assert "stuck at" in result.stderr
        assert "Run the same command again to resume" in " ".join(result.stderr.split())
        before = road.puts()
        road.trouble = lambda _: False
        lorikeet.do("--server", road.url, "register", str(folder), "acme/support")
        assert road.puts() == before + 1


def test_ctrl_c_keeps_the_arrived_parts(lorikeet: Lorikeet, folder: Path) -> None:
    with road_to(lorikeet) as road:
        road.trouble = lambda line: line.startswith(b"PUT") and time.sleep(0.1) is not None
        running = command(lorikeet, road.url, "register", str(folder), "acme/support")
        while len(parts_of(lorikeet)) < 4 and running.poll() is None:
            time.sleep(0.01)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=20)
        assert running.returncode == 130
        assert "interrupted at" in said
        assert "run the same command again to resume" in said
        assert "Traceback" not in said

        kept, sent = len(parts_of(lorikeet)), road.puts()
        assert kept >= 4
        lorikeet.do("--server", road.url, "register", str(folder), "acme/support")
        version = lorikeet.catalog.reader.refresh().adapter("acme", "support").versions[0]
        assert road.puts() - sent == -(-version.size_bytes // PART) - kept


def test_a_blob_in_the_catalog_is_not_sent_again(lorikeet: Lorikeet, folder: Path) -> None:
    lorikeet.do("register", str(folder), "acme/support")
    with road_to(lorikeet) as road:
        said = lorikeet.do("--server", road.url, "register", str(folder), "acme/other", "--json")
        assert json.loads(said)["version"] == 1
        assert road.puts() == 0


def test_two_concurrent_registers_of_one_blob_both_succeed(
    lorikeet: Lorikeet, folder: Path
) -> None:
    both = [
        command(lorikeet, lorikeet.url, "register", str(folder), "acme/support", "--json")
        for _ in range(2)
    ]
    said = [running.communicate(timeout=20) for running in both]
    assert [json.loads(stdout)["version"] for stdout, _ in said] == [1, 1], said


def test_a_full_disk_on_the_admins_machine_is_named(lorikeet: Lorikeet, folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        result = lorikeet.run("register", str(folder), "acme/support")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.exit_code == 1
    assert "free some space there, or set TMPDIR" in " ".join(result.stderr.split())


def test_an_unknown_tenant_is_refused_before_any_byte_is_sent(
    lorikeet: Lorikeet, folder: Path
) -> None:
    result = lorikeet.run("register", str(folder), "nobody/support")
    assert result.exit_code == 1
    assert "nobody" in result.stderr
    assert list(lorikeet.catalog.store.list("uploads/")) == []


@pytest.fixture
def on_s3(s3_bucket: str) -> Iterator[Lorikeet]:
    catalog, key = new_catalog(open_store(f"{s3_bucket}/{uuid.uuid4().hex}"))
    with serving(catalog, key, PART) as running:
        yield running


def test_on_s3_no_byte_passes_through_the_gateway(on_s3: Lorikeet, folder: Path) -> None:
    with road_to(on_s3) as road:
        on_s3.do("--server", road.url, "register", str(folder), "acme/support")
        assert [line.split()[:2] for line in road.requests] == [
            [b"POST", b"/admin/v1/uploads"],
            [b"POST", b"/admin/v1/adapters/acme/support/versions"],
        ]


def test_parts_go_through_the_gateway_if_the_store_is_unreachable(
    on_s3: Lorikeet, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(S3Parts, "url", lambda *_: "http://127.0.0.1:1/bucket/key")
    with road_to(on_s3) as road:
        on_s3.do("--server", road.url, "register", str(folder), "acme/support")
        version = on_s3.catalog.reader.refresh().adapter("acme", "support").versions[0]
        assert road.puts() == -(-version.size_bytes // PART)
