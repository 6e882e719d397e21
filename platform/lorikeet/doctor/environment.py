"""Checks of environment variables: Lorikeet's own, and those that Ray's processes read at start."""

from collections.abc import Iterator

from lorikeet.doctor.finding import Finding, ok, problem, warning
from lorikeet.doctor.planned_start import PlannedStart
from lorikeet.errors import InvalidSetting
from lorikeet.ray_variables import RAY_VARIABLES
from lorikeet.settings import Settings
from lorikeet_engine.errors import SettingsError


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
    missing = [each for each in RAY_VARIABLES if not each.accepts(planned.environ.get(each.name))]
    for each in missing:
        there = planned.environ.get(each.name)
        found = f"{each.name} is {'not set' if there is None else f'{there!r}'}: {each.harm}"
        yield warning("ray variables", found, f"export {each.name}={each.value}")
    if planned.environ.get("RAY_AUTH_MODE") == "disabled":
        found = "RAY_AUTH_MODE is disabled: any client that reaches Ray's ports can run code here"
        yield warning("ray variables", found, "export RAY_AUTH_MODE=token")
    elif not missing:
        yield ok("ray variables", f"all {len(RAY_VARIABLES)} are set")
