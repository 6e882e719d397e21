"""Results of checks."""

from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    """Severity of a finding.

    WARNING: the service starts, but works worse than possible.
    PROBLEM: the service does not start, or does not work.
    """

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check.

    check: subject of the check, such as "ports".
    fix: the command or setting that helps; None: nothing needs to be done.
    """

    check: str
    severity: Severity
    message: str
    fix: str | None = None


def ok(check: str, message: str) -> Finding:
    """Make a finding that nothing is wrong.

    check, message: fields of Finding.
    """
    return Finding(check, Severity.OK, message)


def warning(check: str, message: str, fix: str) -> Finding:
    """Make a finding that the service starts, but works worse than it could.

    check, message, fix: fields of Finding.
    """
    return Finding(check, Severity.WARNING, message, fix)


def problem(check: str, message: str, fix: str) -> Finding:
    """Make a finding that the service does not start, or does not work.

    check, message, fix: fields of Finding.
    """
    return Finding(check, Severity.PROBLEM, message, fix)
