"""Environment of the service's processes: settings, and the variables that Ray reads."""

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from lorikeet.errors import InvalidSetting
from lorikeet.ray_variables import RAY_VARIABLES

HTTP_HOST = "RAY_SERVE_DEFAULT_HTTP_HOST"
"""Variable with the host of the tenants' listener."""
_RAY_FOLDER = "RAY_TMPDIR"
_JOINED_RAY = "RAY_ADDRESS"


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
