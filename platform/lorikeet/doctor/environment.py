"""The variables: Lorikeet's own, and those that Ray reads when its processes start."""

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
"""Bytes: for any request, and for an answer without `stream` of as many log probabilities as may be
asked for, which Serve's own proxy takes as one message."""

_NUMBER = re.compile(r"-?[0-9]+")


class _Wanted(NamedTuple):
    """A variable that Ray reads, the value it should have, and what happens without.

    A number may be larger, or smaller where `value` is the most.
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
        "answers that nobody reads pile up, and clients choose their requests' ids",
    ),
    _Wanted(
        "RAY_worker_niceness",
        "0",
        "engines and gateways run at niceness 15, where any other program takes their cores",
        most=True,
    ),
)


def check_settings(planned: PlannedStart) -> Iterator[Finding]:
    """Whether they parse, and do not contradict one another."""
    try:
        settings = planned.settings
        for base_model in settings.base_models:
            planned.engine_settings(base_model)
    except InvalidSetting as error:
        fix = "correct it; `lorikeet settings` lists them all. What needs them was not looked at"
        yield problem("settings", error.message, fix)
    except SettingsError as error:
        yield problem("settings", error.message, "correct the LORIKEET_ variable of that name")
    else:
        given, all_of_them = len(settings.model_fields_set), len(Settings.model_fields)
        yield ok("settings", f"{given} of {all_of_them} are given, the others have their defaults")


def check_ray_variables(planned: PlannedStart) -> Iterator[Finding]:
    """Whether they are set outside of serve_app, where it would be too late."""
    missing = [each for each in _RAY_VARIABLES if not _does(planned.environ.get(each.name), each)]
    for each in missing:
        there = planned.environ.get(each.name)
        found = f"{each.name} is {'not set' if there is None else f'{there!r}'}: {each.harm}"
        yield warning("ray variables", found, f"export {each.name}={each.value}")
    if planned.environ.get("RAY_AUTH_MODE") == "disabled":
        found = "RAY_AUTH_MODE is disabled: whoever reaches Ray's ports can run code here"
        yield warning("ray variables", found, "export RAY_AUTH_MODE=token")
    elif not missing:
        yield ok("ray variables", f"all {len(_RAY_VARIABLES)} are set")


def _does(given: str | None, wanted: _Wanted) -> bool:
    if given is None or not _NUMBER.fullmatch(wanted.value) or not _NUMBER.fullmatch(given):
        return given == wanted.value
    number, bound = int(given), int(wanted.value)
    return number <= bound if wanted.most else number >= bound
