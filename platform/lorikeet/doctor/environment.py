"""Checks of environment variables: Lorikeet's own, and those that Ray's processes read at start."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from lorikeet.doctor.finding import Finding, ok, problem, warning
from lorikeet.doctor.planned_start import PlannedStart
from lorikeet.errors import InvalidSetting
from lorikeet.settings import Settings
from lorikeet_engine.errors import SettingsError

CALLBACK = "lorikeet.serving.proxy_middleware:middlewares"
LARGEST_MESSAGE = 128 * 2**20
"""Limit on the bytes of a message of Ray Serve.

The largest messages are the largest request, and the largest answer without `stream` (with all log
probabilities that a request may ask for), which the proxy receives as one message.
"""

_NUMBER = re.compile(r"-?[0-9]+")


class _Wanted(NamedTuple):
    """A variable that Ray reads.

    value: wanted value. If it is a number, larger ones are accepted too, or smaller ones if `most`
        is true.
    harm: effect of an unaccepted value.
    """

    name: str
    value: str
    harm: str
    most: bool = False


_RAY_VARIABLES = (
    _Wanted("RAY_SERVE_THROUGHPUT_OPTIMIZED", "1", "streams are several times slower"),
    _Wanted("RAY_SERVE_PROXY_USE_GRPC", "1", "Serve's own proxy adds 2 ms to a first token"),
    _Wanted(
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH",
        str(LARGEST_MESSAGE),
        "requests and answers above 4 MiB fail",
    ),
    _Wanted(
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH",
        CALLBACK,
        "answers that clients do not read fill memory, and clients can choose request ids",
    ),
    _Wanted(
        "RAY_worker_niceness",
        "0",
        "engines and gateways run at niceness 15, and lose their cores to any other program",
        most=True,
    ),
)


def check_settings(planned: PlannedStart) -> Iterator[Finding]:
    """Check that all settings parse and agree with each other."""
    try:
        settings = planned.settings
        for base_model in settings.base_models:
            planned.engine_settings(base_model)
    except InvalidSetting as error:
        fix = "correct it; `lorikeet settings` lists all. Checks that need settings were skipped"
        yield problem("settings", error.message, fix)
    except SettingsError as error:
        yield problem("settings", error.message, "correct the LORIKEET_ variable of that name")
    else:
        given, total = len(settings.model_fields_set), len(Settings.model_fields)
        yield ok("settings", f"{given} of {total} are set, the others have their defaults")


def check_ray_variables(planned: PlannedStart) -> Iterator[Finding]:
    """Check the variables that must be set before Ray starts: serve_app runs too late to
    set them.
    """
    missing = [each for each in _RAY_VARIABLES if not _fits(planned.environ.get(each.name), each)]
    for each in missing:
        there = planned.environ.get(each.name)
        found = f"{each.name} is {'not set' if there is None else f'{there!r}'}: {each.harm}"
        yield warning("ray variables", found, f"export {each.name}={each.value}")
    if planned.environ.get("RAY_AUTH_MODE") == "disabled":
        found = "RAY_AUTH_MODE is disabled: any client that reaches Ray's ports can run code here"
        yield warning("ray variables", found, "export RAY_AUTH_MODE=token")
    elif not missing:
        yield ok("ray variables", f"all {len(_RAY_VARIABLES)} are set")


def _fits(given: str | None, wanted: _Wanted) -> bool:
    if given is None or not _NUMBER.fullmatch(wanted.value) or not _NUMBER.fullmatch(given):
        return given == wanted.value
    number, bound = int(given), int(wanted.value)
    return number <= bound if wanted.most else number >= bound
