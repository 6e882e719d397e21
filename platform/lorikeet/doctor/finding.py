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
    """check: what was looked at. cure: a command or a setting; None: nothing is to be done."""

    check: str
    verdict: Severity
    found: str
    cure: str | None = None


def ok(check: str, found: str) -> Finding:
    """A finding that nothing is wrong."""
    return Finding(check, Severity.OK, found)


def warning(check: str, found: str, cure: str) -> Finding:
    """A finding that the service starts, but will work worse than it could."""
    return Finding(check, Severity.WARNING, found, cure)


def problem(check: str, found: str, cure: str) -> Finding:
    """A finding that the service will not start, or not work."""
    return Finding(check, Severity.PROBLEM, found, cure)
