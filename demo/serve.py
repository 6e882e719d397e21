"""Start the service with the demo: `make serve`.

Fills the catalog with the demo's tenants and adapters when there is none yet, runs
`serve run serve_app:app`, says what to type once it answers, and stops it on Ctrl-C.
"""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from demo.fill_catalog import ADMIN_KEY, DemoKeys, fill_catalog
from demo.tasks import TASKS
from lorikeet.cli.admin_client import DEFAULT_SERVER
from lorikeet.errors import LorikeetError
from lorikeet.settings import Settings

KEYS = Path(".lorikeet")
ADDRESS = "http://127.0.0.1:8000"
_READY_TIMEOUT_S = 300
_STOP_TIMEOUT_S = 60


def main() -> int:
    """Run the demo until Ctrl-C; the exit status is for the shell."""
    try:
        settings = Settings.from_env()
        admin = f"http://{settings.admin_address}"
        if taken := next(filter(_answers, (ADDRESS, admin)), None):
            print(
                f"Something already answers on {taken}: stop it first (Ctrl-C where it runs, or "
                "`.venv/bin/ray stop`).",
                file=sys.stderr,
            )
            return 1
        keys = fill_catalog(settings, KEYS)
    except LorikeetError as error:
        print(error, file=sys.stderr)
        return 1
    serve = shutil.which("serve", path=str(Path(sys.executable).parent)) or "serve"
    process = subprocess.Popen(
        [serve, "run", "serve_app:app"],
        start_new_session=True,  # Ctrl-C reaches it once, from here, and not Ray's workers directly
        umask=0o077,  # Ray's token and its logs are nobody else's
        env=_environment(),
    )
    for ending in (signal.SIGTERM, signal.SIGHUP):  # a closed terminal ends it as Ctrl-C does
        signal.signal(ending, lambda *_: _interrupt())
    try:
        if _wait_until_ready(process):
            _greet(keys, admin)
            return process.wait()
        print("The service did not start: look for start_failed above.", file=sys.stderr)
        return _stop(process) or 1
    except KeyboardInterrupt:
        return _stop(process)


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # or any: Ray's own ports on localhost, no others
        "RAY_SERVE_DEFAULT_HTTP_HOST": "127.0.0.1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",  # nobody waits behind a balancer
        **os.environ,
        "PYTHONPATH": path,
    }


def _interrupt() -> None:
    raise KeyboardInterrupt


def _answers(address: str) -> bool:
    url = urlsplit(address)
    try:
        socket.create_connection((url.hostname, url.port), timeout=1).close()
    except OSError:
        return False
    return True


def _wait_until_ready(process: "subprocess.Popen[bytes]") -> bool:
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{ADDRESS}/healthz", timeout=1) as answer:
                if answer.status == 200:
                    return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.25)
    return False


def _stop(process: "subprocess.Popen[bytes]") -> int:
    if process.poll() is None:
        print("\nStopping… (Ctrl-C again kills it)", flush=True)
        process.send_signal(signal.SIGINT)
    try:
        process.wait(_STOP_TIMEOUT_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        print("Killed.")
        return 1
    print("Stopped.")
    return 0


def _greet(keys: DemoKeys, admin: str) -> None:
    first = next(task for task in TASKS if task.model == "kestrel/intake")
    print(f"\nLorikeet is ready at {ADDRESS}, for administrators at {admin}")
    print("\nTenants and their keys:")
    for tenant, key in keys.tenants.items():
        print(f"  {tenant:<10} {key}")
    print("\nModels: lorikeet-demo, and the fine-tunes")
    for task in TASKS:
        shared = " (shared)" if task.shared else ""
        print(f"  {task.model:<20} {task.about}{shared}")
    print("\nTry:\n")
    print(_curl(keys.tenants[first.tenant], first.model, first.example.prompt))
    print("\nAs an administrator, in another terminal:\n")
    if admin != DEFAULT_SERVER:
        print(f"  export LORIKEET_SERVER={admin}")
    print(f"  export LORIKEET_ADMIN_KEY=$(cat {KEYS / ADMIN_KEY})")
    print("  .venv/bin/lorikeet list\n\nCtrl-C stops the service.", flush=True)


def _curl(key: str, model: str, prompt: str) -> str:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": prompt}]})
    quoted = shlex.quote(body)
    return (
        f"  curl {ADDRESS}/v1/chat/completions -H 'Authorization: Bearer {key}' \\\n"
        f"    -H 'Content-Type: application/json' -d {quoted}"
    )


if __name__ == "__main__":
    sys.exit(main())
