"""Start of the service with the demo.

Creates the demo's catalog with its tenants and adapters if there is none, runs the application
(serve_on_port.py), prints the commands to try once the service answers, and stops the
service on Ctrl-C. The environment variable PORT sets the tenants' port.
"""

import contextlib
import json
import os
import shlex
import socket
import stat
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from demo.fill_catalog import ADMIN_KEY, DemoKeys, fill_catalog
from demo.running import KEYS, hold_pid_file
from demo.service_process import ServiceProcess, Terminated, raise_when_terminated, say
from demo.tasks import TASKS
from lorikeet.addresses import public_port
from lorikeet.cli.admin_client import DEFAULT_SERVER
from lorikeet.errors import InvalidSetting, LorikeetError
from lorikeet.settings import Settings

_HOST_VARIABLE = "RAY_SERVE_DEFAULT_HTTP_HOST"
_READY_TIMEOUT_S = 300
_STOP_S = 60  # Serve itself stops waiting for its parts after half of this time
# The sender of SIGTERM, or a closed terminal, may kill soon after. A starting service has nothing
# to finish, and may go on after SIGINT: Ray forks, and callbacks of a fork lose KeyboardInterrupt.
_TERMINATE_S = 10
_INTERRUPTED = 130  # a shell's status of a program ended by SIGINT


def main() -> int:
    """Run the demo until Ctrl-C; return the exit status."""
    os.umask(0o077)  # keys, catalog, Ray's token and logs are private
    try:
        settings = Settings.from_env()
        port = public_port(os.environ)
        if port == settings.admin_address.port:
            raise InvalidSetting(
                f"PORT={port} is the port of LORIKEET_ADMIN_ADDRESS={settings.admin_address} too: "
                "give one of them another"
            )
        public, admin = f"http://127.0.0.1:{port}", f"http://{settings.admin_address}"
        if taken := next(filter(_answers, (public, admin)), None):
            print(
                f"Something already answers on {taken}: stop it first (Ctrl-C where it runs, or "
                "`make stop`; `ray stop` after a killed one, which ends all your Ray), or "
                "set other ports with PORT and LORIKEET_ADMIN_ADDRESS.",
                file=sys.stderr,
            )
            return 1
        with hold_pid_file():  # no other start fills the catalog meanwhile
            keys, environ = fill_catalog(settings, KEYS), _environment()
            return _run(_command(port, environ[_HOST_VARIABLE]), environ, keys, public, admin)
    except LorikeetError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # the next start fills the rest of the catalog
        return _INTERRUPTED


def _run(
    command: list[str], environ: Mapping[str, str], keys: DemoKeys, public: str, admin: str
) -> int:
    raise_when_terminated()
    say("Starting… (half a minute or so)")
    service, stop_s = ServiceProcess(command, environ), _TERMINATE_S
    try:
        service.start()
        if _wait_until_ready(service, public):
            stop_s = _STOP_S
            _greet(keys, public, admin)
            while not service.ends_within(1):
                pass
            print("The service has ended by itself; its output above says why.", file=sys.stderr)
        else:
            print("The service did not start; its output above says why.", file=sys.stderr)
        service.stop(_TERMINATE_S)
        return 1
    except KeyboardInterrupt:
        return service.stop(stop_s)
    except (Terminated, OSError):  # OSError: the output is closed
        return service.stop(_TERMINATE_S)


def _command(port: int, host: str) -> list[str]:
    return [sys.executable, "-m", "demo.serve_on_port", host, str(port)]


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # any value: Ray opens ports on localhost alone
        _HOST_VARIABLE: "127.0.0.1",
        "RAY_TMPDIR": os.environ.get("RAY_TMPDIR") or str(_ray_folder()),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",  # no load balancer has to notice
        **os.environ,
        "PYTHONPATH": path,
    }


def _ray_folder() -> Path:
    """Return a private folder for RAY_TMPDIR: Ray makes files there that every user can open.

    The path is short, as paths of Ray's sockets below it may have 107 characters. Raises
    InvalidSetting if another user has made it, or it is not a folder.
    """
    folder = Path(f"/tmp/lorikeet-{os.getuid()}")
    with contextlib.suppress(FileExistsError):  # as a folder or as another kind of file
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    others = stat.S_IMODE(found.st_mode) & 0o077
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or others:
        raise InvalidSetting(
            f"{folder} is not a folder of yours alone: remove it, or set RAY_TMPDIR to a folder "
            "of mode 700 whose path has at most 40 characters"
        )
    return folder


def _answers(address: str) -> bool:
    url = urlsplit(address)
    try:
        socket.create_connection((url.hostname, url.port), timeout=1).close()
    except OSError:
        return False
    return True


def _wait_until_ready(service: ServiceProcess, public: str) -> bool:
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while not service.ends_within(0.25) and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{public}/readyz", timeout=1):
            return True
    return False


def _greet(keys: DemoKeys, public: str, admin: str) -> None:
    first = next(task for task in TASKS if task.model == "kestrel/intake")
    print(f"\nLorikeet is ready at {public}, for administrators at {admin}")
    print("\nTenants and their keys:")
    for tenant, key in keys.tenants.items():
        print(f"  {tenant:<10} {key}")
    print("\nModels: lorikeet-demo, and the fine-tunes")
    for task in TASKS:
        shared = " (shared)" if task.shared else ""
        print(f"  {task.model:<20} {task.about}{shared}")
    print("\nTry:\n")
    print(_curl(public, keys.tenants[first.tenant], first.model, first.example.prompt))
    print("\nAs an administrator, in another terminal:\n")
    if admin != DEFAULT_SERVER:
        print(f"  export LORIKEET_SERVER={admin}")
    print(f"  export LORIKEET_ADMIN_KEY=$(cat {KEYS / ADMIN_KEY})")
    print("  .venv/bin/lorikeet list\n\nCtrl-C stops the service.", flush=True)


def _curl(public: str, key: str, model: str, prompt: str) -> str:
    message = {"role": "user", "content": prompt}
    body = json.dumps({"model": model, "messages": [message], "temperature": 0})
    quoted = shlex.quote(body)
    return (
        f"  curl {public}/v1/chat/completions -H 'Authorization: Bearer {key}' \\\n"
        f"    -H 'Content-Type: application/json' -d {quoted}"
    )
