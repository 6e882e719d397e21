"""All checks, one after the other: none can stop or hold up the others."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lorikeet.doctor import (
    base_models,
    catalog,
    environment,
    gpus,
    memory,
    software,
    system,
)
from lorikeet.doctor.finding import Finding, Severity, problem
from lorikeet.doctor.planned_start import PlannedStart

_ALL_S = 120.0
_LEAST_S = 2.0  # what each check has, however long others took
_SLOW_S = 60.0  # torch and transformers may have to come from a cold disk
_REMOTE_S = 15.0
_REMOTE_FIX = "check the network and AWS_ENDPOINT_URL_S3: nothing answers"


@dataclass(frozen=True, slots=True)
class Check:
    """needs_settings: not run where they do not parse. fix: where it is not done in time."""

    name: str
    run: Callable[[PlannedStart], Iterable[Finding]]
    within_s: float = _SLOW_S
    fix: str = "see what this machine is busy with, and run it again"
    needs_settings: bool = True


CHECKS: Sequence[Check] = (
    Check("settings", environment.check_settings, needs_settings=False),
    Check("ray variables", environment.check_ray_variables, needs_settings=False),
    Check("versions", software.check_versions, needs_settings=False),
    Check("base models", base_models.check_base_models),
    Check("memory", memory.check_device_memory),
    Check("host memory", memory.check_host_memory),
    Check("disk cache", system.check_disk),
    Check("gpus", gpus.check_gpus),
    Check("kernels", software.check_kernels),
    Check("ports", system.check_ports),
    Check("limits", system.check_system_limits),
    Check("catalog", catalog.check_catalog, _REMOTE_S, _REMOTE_FIX),
)


def run_checks(planned: PlannedStart, checks: Iterable[Check] = CHECKS) -> list[Finding]:
    """What all checks find, in their order."""
    until = time.monotonic() + _ALL_S
    findings: list[Finding] = []
    for check in checks:
        left_s = max(_LEAST_S, until - time.monotonic())
        findings += _findings(check, planned, min(check.within_s, left_s))
    return findings


def can_start(findings: Iterable[Finding]) -> bool:
    """Whether nothing was found that would keep the service from working."""
    return all(finding.severity is not Severity.PROBLEM for finding in findings)


def _findings(check: Check, planned: PlannedStart, within_s: float) -> list[Finding]:
    """Run a check in a thread that is left alone when it takes too long."""
    found: list[Finding] = []
    if check.needs_settings and not planned.readable:
        return found

    def run() -> None:
        try:
            for finding in check.run(planned):
                found.append(finding)
        except Exception as error:
            what = f"this could not be looked at: {type(error).__name__}: {error}"
            found.append(problem(check.name, what, "mend what that says"))

    thread = threading.Thread(target=run, name=f"doctor {check.name}", daemon=True)
    thread.start()
    thread.join(within_s)
    if thread.is_alive():
        found.append(problem(check.name, f"no answer within {within_s:.0f} s", check.fix))
    return found
