"""`make serve` as a newcomer meets it: one command, a line to paste, an answer, a clean end."""

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

import grpc
import psutil
import pytest
import ray
import yaml

from lorikeet.addresses import public_port
from lorikeet.errors import InvalidSetting
from tests.e2e.conftest import free_port

ROOT = Path(__file__).parents[2]
PORT, ADMIN_PORT = free_port(), free_port()


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Yield a `python -m demo.serve` in its own folder, as from a script, and its output."""
    folder = tmp_path_factory.mktemp("demo")
    process = start(folder, stdout=subprocess.PIPE, preexec_fn=ignore_sigint)
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True)
    reader.start()
    yield process, lines, folder
    if process.poll() is None:
        process.terminate()
        process.wait(60)


def start(folder, settings=None, **options):
    environ = {
        **os.environ,
        "HOME": str(folder),  # Ray keeps its token there
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "LORIKEET_BASE_MODELS": f"lorikeet-demo={ROOT / 'demo' / 'model'}",
        "PORT": str(PORT),
        "LORIKEET_ADMIN_ADDRESS": f"127.0.0.1:{ADMIN_PORT}",
        **(settings or {}),
    }
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        environ.pop(name, None)
    return subprocess.Popen(
        [sys.executable, "-m", "demo.serve"],
        cwd=folder,
        env=environ,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def ignore_sigint():
    """Ignore SIGINT, as a shell does for background processes of a script."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def printed(process, lines, text, within_s):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and process.poll() is None:
        if any(text in line for line in lines):
            return True
        time.sleep(0.1)
    return False


def curl_in(lines):
    text = "".join(lines)
    return re.search(r"^  (curl .*?\\\n.*?)$", text, re.MULTILINE | re.DOTALL).group(1)


def test_make_serve_serves_and_its_printed_command_works(demo):
    process, lines, _ = demo
    assert printed(process, lines, "stops the service", within_s=200), "".join(lines)
    ready_s = processor_s(process)  # of the wall clock, a busy machine takes any time
    told = "".join(lines)
    assert "engine_ready" in told[: told.index("Lorikeet is ready")]
    answer = subprocess.run(
        ["bash", "-c", curl_in(lines)], capture_output=True, text=True, check=True, timeout=60
    )
    content = json.loads(answer.stdout)["choices"][0]["message"]["content"]
    assert json.loads(content) == {"name": "Mira", "amount": 12, "city": "Lyon"}
    assert ready_s < 90  # 30 s of processor time on two cores


def test_only_guarded_ports_are_reachable_from_outside(demo):
    """Serve's replicas bind their own server to every address; that server requires the token."""
    process, _, _ = demo
    found = listeners(process)
    assert {(PORT, True), (ADMIN_PORT, True)} <= {(at.port, at.local) for at in found}
    outside = [at for at in found if not at.local]
    assert outside
    assert all("ray::ServeReplica" in at.owner for at in outside), outside
    assert all(unguarded(at.port) == {} for at in outside)
    assert all(asks_for_token(at.port, "/ray.serve.ASGIService/HandleRequest") for at in outside)


def test_no_port_of_ray_accepts_a_client_without_the_token(demo):
    process, _, folder = demo
    token = folder / ".ray" / "auth_token"
    assert token.stat().st_mode & 0o077 == 0
    found = listeners(process)
    assert {at.port: codes for at in found if (codes := unguarded(at.port))} == {}
    # nor is there a dashboard, whose job API runs what it is given
    assert not [at for at in found if at.port in range(8265, 8365)]


def test_no_file_of_the_service_is_open_to_other_users(demo):
    """Ray opens its folders to all users, whatever the umask; the folder around them is private."""
    process, _, folder = demo
    sockets = {
        Path(at.laddr)
        for child in process_tree(process)
        for at in child.net_connections("unix")
        if at.laddr.startswith("/")
    }
    assert sockets
    catalog = folder / ".lorikeet"
    for path in sockets | set(catalog.rglob("*")):
        assert any(each.lstat().st_mode & 0o077 == 0 for each in path.parents), path
    assert catalog.stat().st_mode & 0o077 == 0


def test_sigterm_ends_a_service_that_a_script_started(demo):
    process, _, _ = demo
    everything = process_tree(process)
    begun = time.monotonic()
    process.terminate()
    process.wait(60)
    assert time.monotonic() - begun < 15
    assert left_of(everything) == []


@pytest.mark.soak  # 25 s of a core; test_service_process.py closes a small service's terminal
def test_a_closed_terminal_ends_the_service(tmp_path):
    terminal, inside = pty.openpty()
    process = start(tmp_path, stdin=inside, stdout=inside, start_new_session=True)
    os.close(inside)
    greeting = b""
    while b"stops the service" not in greeting:
        greeting += os.read(terminal, 65536)
    everything = process_tree(process)
    begun = time.monotonic()
    os.close(terminal)
    process.wait(60)
    assert time.monotonic() - begun < 15
    assert left_of(everything) == []


def left_of(processes):
    """Return processes that still run, and listener ports that are still taken."""
    _, left = psutil.wait_procs(processes, timeout=5)
    ports = []
    for port in (PORT, ADMIN_PORT):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                ports.append(port)
    return left + ports


class Listener(NamedTuple):
    port: int
    local: bool
    owner: str


def listeners(process):
    """Return the addresses on which processes of the service listen, in all their sessions."""
    found = set()
    for child in process_tree(process):
        with contextlib.suppress(psutil.Error):  # the process has just ended
            owner = " ".join(child.cmdline())
            for at in child.net_connections("tcp"):
                if at.status == psutil.CONN_LISTEN:
                    address = ip_address(at.laddr.ip)
                    address = getattr(address, "ipv4_mapped", None) or address
                    found.add(Listener(at.laddr.port, address.is_loopback, owner))
    return found


def processor_s(process):
    """Return the processor time of a process and of all that it started, those that ended too."""
    total = 0.0
    for each in [psutil.Process(process.pid), *process_tree(process)]:
        with contextlib.suppress(psutil.Error):  # the process has just ended
            total += sum(each.cpu_times()[:4])
    return total


def process_tree(process):
    return psutil.Process(process.pid).children(recursive=True)


def unguarded(port):
    """Return the methods, one of each gRPC service of Ray, that answer here without a token."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        return {
            method: code for method in SERVICES if (code := call(channel, method)) not in REFUSALS
        }


def asks_for_token(port, method):
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        return call(channel, method) is grpc.StatusCode.UNAUTHENTICATED


def call(channel, method):
    try:
        channel.unary_unary(method)(b"", timeout=5)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def services():
    """Return a method of each gRPC service in Ray's generated code."""
    files = Path(ray.__file__).parent.glob("*/generated/*_pb2_grpc.py")
    methods = {m for f in files for m in re.findall(r"['\"](/ray[.\w]+/\w+)['\"]", f.read_text())}
    return sorted({method.rpartition("/")[0]: method for method in sorted(methods)}.values())


SERVICES = services()
REFUSALS = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,  # port of another service
    grpc.StatusCode.UNAVAILABLE,  # no gRPC port
}


@pytest.mark.parametrize("name", ["PORT", "LORIKEET_ADMIN_ADDRESS"])
def test_a_named_port_that_is_taken_is_reported_and_nothing_is_started(tmp_path, name):
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        port = squatter.getsockname()[1]
        said = refused(tmp_path, {name: str(port) if name == "PORT" else f"127.0.0.1:{port}"})
    assert f"problem ports: {port}, for the " in said
    assert f"→ stop the process that listens there: `ss -ltnp 'sport = :{port}'`, or " in said
    assert name in said.partition("→")[2]


def test_a_bad_port_is_reported_and_nothing_is_started(tmp_path):
    assert "PORT='9000 ': want a port" in refused(tmp_path, {"PORT": "9000 "})


@pytest.mark.parametrize("port", ["0", "65536", "-1", "http"])
def test_a_port_beyond_tcps_is_refused(port):
    with pytest.raises(InvalidSetting, match=f"PORT='{port}': want a port"):
        public_port({"PORT": port})


def test_one_port_for_tenants_and_administrators_is_refused(tmp_path):
    both = {"PORT": str(PORT), "LORIKEET_ADMIN_ADDRESS": f"127.0.0.1:{PORT}"}
    said = refused(tmp_path, both)
    assert f"{PORT} is set for both the public and the admin listener" in said


def refused(folder, settings):
    """Return the output of a start that is refused before it begins."""
    ended = subprocess.run(
        [sys.executable, "-m", "demo.serve"],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "LORIKEET_BASE_MODELS": f"lorikeet-demo={ROOT / 'demo' / 'model'}",
            **settings,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert not (folder / ".lorikeet" / "demo").exists()
    assert "Traceback" not in ended.stderr
    return ended.stderr


def test_the_docs_name_a_file_that_serve_run_accepts():
    assert documented_file()["applications"][0]["import_path"] == "serve_app:app"


def documented_file():
    """Return the file that docs/operations.md gives `serve run` for another port."""
    text = (ROOT / "docs" / "operations.md").read_text()
    return yaml.safe_load(
        re.search(r"(?:^    .*\n)+", text[text.index("**Another port") :], re.M)[0]
    )
