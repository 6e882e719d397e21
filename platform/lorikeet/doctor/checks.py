"""All checks, run one after the other. A check that fails or takes too long does not stop the next
ones.
"""

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
_LEAST_S = 2.0  # each check gets this much, even after slow ones
_SLOW_S = 60.0  # importing torch and transformers from a cold disk takes long
_REMOTE_S = 15.0
_REMOTE_FIX = "check the network and AWS_ENDPOINT_URL_S3: nothing answers"


@dataclass(frozen=True, slots=True)
class Check:
    """One check of a planned start.

    within_s: time limit in seconds.
    fix: the remedy to print if the check exceeds its time limit.
    needs_settings: skip the check if the settings do not parse.
    """

    name: str
    run: Callable[[PlannedStart], Iterable[Finding]]
    within_s: float = _SLOW_S
    fix: str = "see what keeps this machine busy, and run it again"
    needs_settings: bool = True


CHECKS: Sequence[Check] = (
    Check("settings", environment.check_settings, needs_settings=False),
    Check("ray variables", environment.check_ray_variables, needs_settings=False),
    Check("versions", software.check_versions, needs_settings=False),
    Check("base models", base_models.check_base_models),
    Check("memory", memory.check_device_memory),
    Check("host memory", memory.check_host_memory),
    Check("disk cache", system.check_disk),
    Check("shared folder", system.check_load_from),
    Check("audit stream", system.check_audit_log),
    Check("identity provider", system.check_identity_provider),
    Check("gpus", gpus.check_gpus),
    Check("kernels", software.check_kernels),
    Check("ports", system.check_ports),
    Check("limits", system.check_system_limits),
    Check("catalog", catalog.check_catalog, _REMOTE_S, _REMOTE_FIX),
)


def run_checks(planned: PlannedStart, checks: Iterable[Check] = CHECKS) -> list[Finding]:
    """Run checks in order, and return their findings."""
    until = time.monotonic() + _ALL_S
    findings: list[Finding] = []
    for check in checks:
        left_s = max(_LEAST_S, until - time.monotonic())
        findings += _findings(check, planned, min(check.within_s, left_s))
    return findings


def can_start(findings: Iterable[Finding]) -> bool:
    """Whether no finding is a problem."""
    return all(finding.severity is not Severity.PROBLEM for finding in findings)


def _findings(check: Check, planned: PlannedStart, within_s: float) -> list[Finding]:
    """Run a check in a thread, and return its findings; abandon the thread after `within_s`
    seconds.
    """
    found: list[Finding] = []
    if check.needs_settings and not planned.readable:
        return found

    def run() -> None:
        try:
            for finding in check.run(planned):
                found.append(finding)
        except Exception as error:
            message = f"the check failed: {type(error).__name__}: {error}"
            found.append(problem(check.name, message, "fix that error's cause"))

    thread = threading.Thread(target=run, name=f"doctor {check.name}", daemon=True)
    thread.start()
    thread.join(within_s)
    if thread.is_alive():
        found.append(problem(check.name, f"no answer within {within_s:.0f} s", check.fix))
    return found
