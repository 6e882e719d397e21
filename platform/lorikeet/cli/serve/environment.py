"""Environment of the service's processes: settings, ports, and the variables that Ray reads."""

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from lorikeet.addresses import SERVES_PORT, port_is_free, public_port
from lorikeet.cli.output import say
from lorikeet.errors import InvalidSetting
from lorikeet.ray_variables import RAY_VARIABLES
from lorikeet.settings import PREFIX, Settings

HTTP_HOST = "RAY_SERVE_DEFAULT_HTTP_HOST"
"""Variable with the host of the tenants' listener."""
_RAY_FOLDER = "RAY_TMPDIR"
_JOINED_RAY = "RAY_ADDRESS"
_PORT, _ADMIN = "PORT", f"{PREFIX}ADMIN_ADDRESS"
_TRIED = 100  # ports


def service_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the given environment with defaults for the variables that Ray reads.

    RAY_ADDRESS is left out: the service joins no Ray that runs already.
    """
    return {
        **{each.name: each.value for each in RAY_VARIABLES},
        "RAY_AUTH_MODE": "token",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # any value: Ray opens ports on localhost alone
        HTTP_HOST: "127.0.0.1",
        _RAY_FOLDER: str(_own_ray_folder()),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",  # no load balancer has to notice
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        **{name: value for name, value in given.items() if value and name != _JOINED_RAY},
    }


def changed(environ: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that `environ` sets or changes, by name."""
    return {name: value for name, value in sorted(environ.items()) if before.get(name) != value}


def with_free_ports(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with a port for each listener: the one that it names, even if taken, else
    the usual one, else a free one, which is printed.

    Raises InvalidSetting if a variable has an invalid value.
    """
    chosen = {
        _PORT: str(public_port(environ)),
        _ADMIN: str(Settings.from_env(environ).admin_address),
    }
    named = {int(chosen[each].rpartition(":")[2]) for each in chosen if environ.get(each)}
    for name, listener in ((_PORT, "tenants"), (_ADMIN, "administrators")):
        if environ.get(name):
            continue
        host, _, usual = chosen[name].rpartition(":")
        port = _free_port(int(usual), named)
        named.add(port)
        if port != int(usual):
            say(f"Port {usual} is taken: {listener} use {port}.")
            chosen[name] = f"{host}:{port}" if host else str(port)
    return {**environ, **chosen}


def make_ray_folder(environ: Mapping[str, str]) -> None:
    """Make the private folder for Ray's files, which any user could open in a public folder.

    Makes nothing if RAY_TMPDIR names another folder.

    Raises InvalidSetting if another user has made it, or it is not a folder.
    """
    folder = _own_ray_folder()
    if environ[_RAY_FOLDER] != str(folder):
        return
    with contextlib.suppress(FileExistsError):  # as a folder or as another kind of file
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    others = stat.S_IMODE(found.st_mode) & 0o077
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or others:
        raise InvalidSetting(
            f"{folder} is not a folder of yours alone: remove it, or set RAY_TMPDIR to a folder "
            "of mode 700 whose path has at most 40 characters"
        )


def _own_ray_folder() -> Path:
    """Return a path that is short: paths of Ray's sockets below it may have 107 characters."""
    return Path(f"/tmp/lorikeet-{os.getuid()}")


def _free_port(usual: int, named: set[int]) -> int:
    """Return the usual port, else the next free one from SERVES_PORT + 80 on, else the usual one.

    named: ports of other listeners.
    """
    candidates = (usual, *range(SERVES_PORT + 80, SERVES_PORT + 80 + _TRIED))
    return next((port for port in candidates if port not in named and port_is_free(port)), usual)
