"""All checks, one after the other: none can stop or hold up the others."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lorikeet.doctor import (
    adapters,
    base_models,
    catalog,
    disk,
    environment,
    gpus,
    limits,
    memory,
    ports,
    versions,
)
from lorikeet.doctor.finding import Finding, Verdict, problem
from lorikeet.doctor.site import Site

_SLOW_S = 60.0  # torch and transformers may have to come from a cold disk
_REMOTE_S = 15.0
_REMOTE_CURE = "check the network and AWS_ENDPOINT_URL_S3: nothing answers"


@dataclass(frozen=True, slots=True)
class Check:
    """needs_settings: not run where they do not parse. cure: where it is not done in time."""

    name: str
    run: Callable[[Site], Iterable[Finding]]
    within_s: float = _SLOW_S
    cure: str = "see what this machine is busy with, and run it again"
    needs_settings: bool = True


CHECKS: Sequence[Check] = (
    Check("settings", environment.check_settings, needs_settings=False),
    Check("ray variables", environment.check_ray_variables, needs_settings=False),
    Check("versions", versions.check_versions, needs_settings=False),
    Check("base models", base_models.check_base_models),
    Check("memory", memory.check_device_memory),
    Check("host memory", memory.check_host_memory),
    Check("disk cache", disk.check_disk),
    Check("gpus", gpus.check_gpus),
    Check("kernels", gpus.check_kernels),
    Check("ports", ports.check_ports),
    Check("limits", limits.check_limits),
    Check("store", catalog.check_store, _REMOTE_S, _REMOTE_CURE),
    Check("catalog", adapters.check_catalog, _REMOTE_S, _REMOTE_CURE),
    Check("adapters", adapters.check_adapters, _REMOTE_S, _REMOTE_CURE),
)


def examine(site: Site, checks: Iterable[Check] = CHECKS) -> list[Finding]:
    """What all checks find, in their order."""
    return [finding for check in checks for finding in _findings(check, site)]


def can_start(findings: Iterable[Finding]) -> bool:
    """Whether nothing was found that would keep the service from working."""
    return all(finding.verdict is not Verdict.PROBLEM for finding in findings)


def _findings(check: Check, site: Site) -> list[Finding]:
    """In a thread that is left alone when it takes too long."""
    found: list[Finding] = []
    if check.needs_settings and not site.readable:
        return found

    def run() -> None:
        try:
            for finding in check.run(site):
                found.append(finding)
        except Exception as error:
            what = f"this could not be looked at: {type(error).__name__}: {error}"
            found.append(problem(check.name, what, "mend what that says"))

    thread = threading.Thread(target=run, name=f"doctor {check.name}", daemon=True)
    thread.start()
    thread.join(check.within_s)
    if thread.is_alive():
        found.append(problem(check.name, f"no answer within {check.within_s:g} s", check.cure))
    return found
