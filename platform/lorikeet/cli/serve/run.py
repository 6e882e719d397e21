"""One run of the service: checks, start, readiness, and an orderly end."""

import contextlib
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TextIO

from lorikeet.cli.admin_client import AdminClient
from lorikeet.cli.output import is_shown, say
from lorikeet.cli.serve.environment import HTTP_HOST, make_ray_folder, with_free_ports
from lorikeet.cli.serve.progress import StartProgress
from lorikeet.cli.serve.running import hold_pid_file, note_ready
from lorikeet.cli.serve.service_process import ServiceProcess, Terminated, raise_when_terminated
from lorikeet.errors import LorikeetError
from lorikeet.settings import Settings

INTERRUPTED = 130
"""A shell's status of a program ended by SIGINT."""
TERMINATED = 143
"""A shell's status of a program ended by SIGTERM."""
_STOP_S = 60  # Serve itself stops waiting for its parts after half of this time
# The sender of SIGTERM, or a closed terminal, may kill soon after. A starting service has nothing
# to finish, and may go on after SIGINT: Ray forks, and callbacks of a fork lose KeyboardInterrupt.
_TERMINATE_S = 10
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


@dataclass(frozen=True, slots=True)
class Planned:
    """A service that is about to start.

    url, admin_url: addresses of the listeners for tenants and administrators.
    """

    settings: Settings
    url: str
    admin_url: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """A service whose catalog is prepared.

    admin: client of the admin API.
    register: registers adapters with the service that runs; its argument shows progress.
    greet: prints how to use the service.
    """

    admin: AdminClient
    register: Callable[[Callable[[str], None]], None]
    greet: Callable[[], None]


Prepare = Callable[[Planned], Prepared]
"""Function that makes or fills the catalog before a start."""


def run_service(environ: Mapping[str, str], prepare: Prepare) -> int:
    """Run the service until Ctrl-C, SIGTERM or `lorikeet stop`; return the exit status.

    environ: the service's environment, as service_environment returns it.
    prepare: makes or fills the catalog before the start.

    Raises LorikeetError if the service cannot start.
    """
    os.umask(0o077)  # keys, catalog, Ray's token and logs are private
    raise_when_terminated()
    try:
        with hold_pid_file() as pid_file:  # no other start fills the catalog meanwhile
            environ = with_free_ports(environ)
            _check(environ)
            make_ray_folder(environ)
            planned = _planned(environ)
            return _run(environ, planned, prepare(planned), pid_file)
    except Terminated:
        return TERMINATED
    except KeyboardInterrupt:  # the next start prepares the rest
        return INTERRUPTED


def _planned(environ: Mapping[str, str]) -> Planned:
    settings = Settings.from_env(environ)
    host = _ANY_HOST.get(environ[HTTP_HOST], environ[HTTP_HOST])
    admin = settings.admin_address._replace(
        host=_ANY_HOST.get(settings.admin_address.host, settings.admin_address.host).strip("[]")
    )
    return Planned(settings, f"http://{host}:{environ['PORT']}", f"http://{admin}")


def _check(environ: Mapping[str, str]) -> None:
    """Run doctor's checks, which print what they find. Raises LorikeetError for a problem."""
    done = subprocess.run(
        [sys.executable, "-m", "lorikeet.doctor", environ["PORT"]],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=sys.__stderr__,
        start_new_session=True,  # Ctrl-C ends it from here, without a traceback
        check=False,
    )
    if done.returncode:
        raise LorikeetError("the service was not started, for the problems above")


def _run(
    environ: Mapping[str, str],
    planned: Planned,
    prepared: Prepared,
    pid_file: TextIO,
) -> int:
    engines = sum(planned.settings.replicas.values())
    progress = StartProgress(engines) if is_shown(sys.stderr) else None
    say("Starting… (half a minute or so)")
    service = ServiceProcess(_command(environ), environ, progress.read if progress else None)
    stop_s = _TERMINATE_S
    try:
        service.start()
        with progress or contextlib.nullcontext():
            is_ready = _wait_until_ready(service, planned, prepared.admin)
            if is_ready:
                prepared.register(progress.show if progress else lambda _: None)
        if is_ready:
            stop_s = _STOP_S
            prepared.greet()
            note_ready(pid_file)
            while not service.ends_within(1):
                pass
            say("The service has ended by itself; its output above says why.")
        else:
            say("The service did not start; its output above says why.")
        service.stop(_TERMINATE_S)
        return 1
    except KeyboardInterrupt:
        return service.stop(stop_s)
    except (Terminated, OSError):  # OSError: the output is closed
        return service.stop(_TERMINATE_S)
    except BaseException:
        service.stop(_TERMINATE_S)
        raise


def _command(environ: Mapping[str, str]) -> list[str]:
    return [sys.executable, "-m", "lorikeet.serving.run", environ[HTTP_HOST], environ["PORT"]]


def _wait_until_ready(service: ServiceProcess, planned: Planned, admin: AdminClient) -> bool:
    """Wait until every base model is served; return False if the service ends before.

    There is no time limit: a large model may load for many minutes.
    """
    while not service.ends_within(0.25):
        with (
            contextlib.suppress(OSError, LorikeetError),
            urllib.request.urlopen(f"{planned.url}/readyz", timeout=1),
        ):
            served = {replica["base_model"] for replica in admin.get("/status")["replicas"]}
            if served >= planned.settings.base_models.keys():
                return True
    return False
