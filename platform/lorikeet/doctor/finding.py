"""What a check says."""

from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    """WARNING: it starts, and something will be missed. PROBLEM: it will not start, or not work."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """check: what was looked at. fix: a command or a setting; None: nothing is to be done."""

    check: str
    severity: Severity
    message: str
    fix: str | None = None


def ok(check: str, message: str) -> Finding:
    """A finding that nothing is wrong."""
    return Finding(check, Severity.OK, message)


def warning(check: str, message: str, fix: str) -> Finding:
    """A finding that the service starts, but will work worse than it could."""
    return Finding(check, Severity.WARNING, message, fix)


def problem(check: str, message: str, fix: str) -> Finding:
    """A finding that the service will not start, or not work."""
    return Finding(check, Severity.PROBLEM, message, fix)
