"""Checks with which `lorikeet serve` begins: python -m lorikeet.doctor PORT.

They import torch, which the process of the command does not need.
"""

import os
import sys

from lorikeet.doctor.checks import can_start, run_checks
from lorikeet.doctor.finding import Severity
from lorikeet.doctor.planned_start import PlannedStart


def main(http_port: int) -> bool:
    """Print all findings that are not ok, with their remedies; return whether the service can
    start.

    http_port: port of the tenants' listener.
    """
    findings = run_checks(PlannedStart(os.environ, http_port=http_port, makes_missing=True))
    for each in findings:
        if each.severity is not Severity.OK:
            print(f"{each.severity.value} {each.check}: {each.message}\n  → {each.fix}")
    return can_start(findings)


if __name__ == "__main__":
    sys.exit(not main(int(sys.argv[1])))
