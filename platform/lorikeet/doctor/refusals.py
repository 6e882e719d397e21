"""Problems that no start survives: the part of doctor's checks with which every start begins.

Doctor also reports what a start survives: settings that make the service slower or worse, faults
that show only in use, and an unreachable store if this machine keeps a view of the catalog.
"""

from collections.abc import Iterator

from lorikeet.catalog.kept_view import KeptView
from lorikeet.catalog.store.object_store import open_store
from lorikeet.doctor.base_models import check_base_model_folders
from lorikeet.doctor.catalog import check_presence
from lorikeet.doctor.checks import Check, run_checks
from lorikeet.doctor.environment import check_settings
from lorikeet.doctor.finding import Finding, Severity
from lorikeet.doctor.gpus import check_gpus
from lorikeet.doctor.planned_start import PlannedStart
from lorikeet.doctor.system import check_cache_folder, check_ports
from lorikeet.errors import LorikeetError

_REMOTE_S = 20.0


def refusals(planned: PlannedStart) -> list[Finding]:
    """Return the problems that would end the start, or keep it waiting for ever."""
    checks = (
        Check("settings", check_settings, needs_settings=False),
        Check("base models", check_base_model_folders),
        Check("gpus", _check_gpus),
        Check("disk cache", check_cache_folder),
        Check("ports", check_ports),
        Check("catalog", _check_catalog, _REMOTE_S, "see LORIKEET_CATALOG and AWS_ENDPOINT_URL_S3"),
    )
    found = run_checks(planned, checks)
    return [each for each in found if each.severity is Severity.PROBLEM]


def _check_gpus(planned: PlannedStart) -> Iterator[Finding]:
    if planned.device == "cuda":
        yield from check_gpus(planned)


def _check_catalog(planned: PlannedStart) -> Iterator[Finding]:
    settings = planned.settings
    try:
        kept = KeptView(settings.cache_dir, open_store(settings.catalog).url).read()
    except LorikeetError:  # check_presence says what is wrong
        kept = None
    if kept is None:
        yield from check_presence(planned)
