"""The command doctor: checks everything that a start of the service needs."""

import os
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.markup import escape

from lorikeet.addresses import public_port
from lorikeet.cli.arguments import parse_bytes
from lorikeet.cli.output import AsJson, print_json, print_line
from lorikeet.doctor.finding import Finding, Severity
from lorikeet.doctor.planned_start import PlannedStart

_COLOURS = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.PROBLEM: "bold red"}


def doctor(
    gpu_memory: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            parser=parse_bytes,
            help="Plan for GPUs of this size, such as 80GiB, instead of this machine's.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check everything that `serve run serve_app:app` needs, and propose fixes.

    `lorikeet serve` begins with these checks. Run it on the service's machine, in the same
    environment, with the same PORT. It takes seconds and leaves nothing behind. The exit status is
    0 if the service can start, and 1 if not.

    Example: `lorikeet doctor --gpu-memory 80GiB`
    """
    from lorikeet.doctor.checks import can_start, run_checks  # other commands start sooner

    findings = run_checks(PlannedStart(os.environ, gpu_memory, public_port(os.environ)))
    starts = can_start(findings)
    if as_json:
        print_json({"can_start": starts, "findings": list(map(_json, findings))})
    else:
        for finding in findings:
            _print(finding)
        print_line(_summary(findings, starts=starts))
    raise typer.Exit(not starts)


def _json(finding: Finding) -> dict[str, str | None]:
    return {
        "check": finding.check,
        "severity": finding.severity.value,
        "message": finding.message,
        "fix": finding.fix,
    }


def _print(finding: Finding) -> None:
    colour, severity = _COLOURS[finding.severity], finding.severity.value
    print_line(f"[{colour}]{severity:<8}[/] [bold]{finding.check}[/]: {escape(finding.message)}")
    if finding.fix is not None:
        print_line(f"         → {escape(finding.fix)}")


def _summary(findings: Sequence[Finding], *, starts: bool) -> str:
    problems, warnings = (
        sum(finding.severity is severity for finding in findings)
        for severity in (Severity.PROBLEM, Severity.WARNING)
    )
    start = "It can start" if starts else "It cannot start with these settings"
    return f"\n{start}. Problems: {problems}, warnings: {warnings}."
