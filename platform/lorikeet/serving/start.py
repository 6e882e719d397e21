"""Start by `serve run`: refused with the remedy where it would fail, and status 1 if it fails.

Serve alone ends with status 0 after a failed start, and waits for ever for GPUs and CPUs that a
machine does not have.
"""

import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
import ray
from ray import serve
from ray.serve.deployment import Application

from lorikeet.addresses import SERVES_PORT
from lorikeet.doctor.planned_start import PlannedStart
from lorikeet.doctor.refusals import refusals
from lorikeet.serving.deployments import reserved_cpus
from lorikeet.settings import Settings

_serve_run = serve.run


def guard_start() -> None:
    """Check and watch the start, if `serve run` imports the application in this process.

    Other processes import it too: tests, and Serve's own where a file names the application.
    Raises SystemExit.
    """
    context = click.get_current_context(silent=True)
    if context is None or context.info_name != "run":
        return
    joins = _joins_ray(os.environ, context.params.get("address"))
    if not joins:
        refuse_bad_start(SERVES_PORT)
    serve.run = partial(run_or_exit, joins=joins)  # type: ignore[assignment]  # `serve run` calls it


def refuse_bad_start(http_port: int) -> None:
    """Print the problems that no start survives, and raise SystemExit if there are any.

    http_port: port of the tenants' listener.
    """
    found = refusals(PlannedStart(os.environ, http_port=http_port))
    for each in found:
        print(f"{each.check}: {each.message}\n  → {each.fix}", file=sys.stderr)
    if found:
        print("The service was not started. `lorikeet doctor` checks the rest.", file=sys.stderr)
        raise SystemExit(1)


def run_or_exit(app: Application, *, joins: bool, **options: Any) -> None:
    """Call `serve.run`; print the reason and raise SystemExit, with status 1, if that fails.

    joins: whether Ray ran before this process.
    """
    try:
        if not joins:
            _refuse_too_few_cpus(Settings.from_env())
        _serve_run(app, **options)
    except Exception as error:
        print(f"The service did not start: {error}", file=sys.stderr)
        print(
            "Events `start_failed` above say why, if engines or gateways failed.", file=sys.stderr
        )
        if joins:
            # Otherwise Serve ends with the Ray of this process.
            serve.shutdown()  # type: ignore[no-untyped-call]
        raise SystemExit(1) from error


def _joins_ray(environ: Mapping[str, str], address: str | None) -> bool:
    """Whether `ray.init` will join a Ray that runs, and not start one.

    address: option --address of `serve run`, by default the value of RAY_ADDRESS.
    """
    noted = Path(environ.get("RAY_TMPDIR") or "/tmp") / "ray" / "ray_current_cluster"
    return address != "local" and (bool(address) or noted.exists())


def _refuse_too_few_cpus(settings: Settings) -> None:
    """Raise RuntimeError if Ray waits for ever for the CPUs that the deployments reserve."""
    wanted = reserved_cpus(settings)
    there = ray.cluster_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
    if wanted > there:
        raise RuntimeError(
            f"engines and gateways reserve {wanted:g} CPUs, and Ray counts {there:g} here: lower "
            "LORIKEET_REPLICAS or LORIKEET_GATEWAYS"
        )
