"""One run of the service: readiness, and ends that no signal causes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.ports import free_port

# Replaces Ray: listens like both listeners, and ends by itself.
SERVICE = """
import http.server, json, os, sys, threading, time
class Ready(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Ready.asked += self.path == "/admin/v1/status"
        served = ["a", "b"][: Ready.asked]
        body = json.dumps({"replicas": [{"base_model": name} for name in served]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
for port in (os.environ["PORT"], os.environ["LORIKEET_ADMIN_ADDRESS"].partition(":")[2]):
    server = http.server.HTTPServer(("127.0.0.1", int(port)), Ready)
    threading.Thread(target=server.serve_forever, daemon=True).start()
while Ready.asked < 2:
    time.sleep(0.01)
time.sleep(1)
"""
RUN = """
import os, sys
from lorikeet.cli.admin_client import AdminClient
from lorikeet.cli.serve import run
from lorikeet.cli.serve.environment import service_environment
run._check = lambda _: None
run._command = lambda _: [sys.executable, "-c", os.environ["SERVICE"]]
def prepare(planned):
    admin = AdminClient(planned.admin_url, "lk_a")
    return run.Prepared(admin, lambda _: print("registers"), lambda: print("greets"))
sys.exit(run.run_service(service_environment(os.environ), prepare))
"""


def run(folder: Path, service: str) -> subprocess.CompletedProcess[str]:
    own = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "LORIKEET_BASE_MODELS": "a=/m/a,b=/m/b",
        "PORT": str(free_port()),
        "LORIKEET_ADMIN_ADDRESS": f"127.0.0.1:{free_port()}",
        "SERVICE": service,
    }
    command = [sys.executable, "-c", RUN]
    return subprocess.run(
        command, env=os.environ | own, cwd=folder, capture_output=True, text=True, timeout=60
    )


def test_it_greets_once_every_base_model_is_served_and_reports_an_end_without_a_signal(
    tmp_path: Path,
) -> None:
    done = run(tmp_path, SERVICE)
    assert (done.returncode, done.stdout) == (1, "registers\ngreets\n")
    assert "The service has ended by itself" in done.stderr


@pytest.mark.parametrize("service", ["", "raise SystemExit(1)"])
def test_a_start_that_fails_exits_with_an_error(tmp_path: Path, service: str) -> None:
    done = run(tmp_path, f"print('why', flush=True)\n{service}")
    assert (done.returncode, done.stdout) == (1, "")
    assert "why\n" in done.stderr
    assert "The service did not start; its output above says why." in done.stderr
