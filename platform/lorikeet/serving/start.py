"""Checks before and during a start by `serve run`: a start that would fail is refused with a
remedy, and one that fails exits with status 1.

Serve alone ends with status 0 after a failed start, and waits for ever for GPUs and CPUs that a
machine lacks.
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
from lorikeet.serving.deployments import reserved_resources
from lorikeet.settings import Settings

_FIXES = {
    "CPU": "LORIKEET_REPLICAS or LORIKEET_GATEWAYS",
    "GPU": "LORIKEET_REPLICAS or LORIKEET_TENSOR_PARALLEL, or set LORIKEET_DEVICE=cpu",
}
_serve_run = serve.run


def guard_start() -> None:
    """Check the machine before `serve run` starts the service, and give failed starts an exit
    status.

    Does nothing in processes that import the application for another reason: tests, and Serve's own
    processes. Raises SystemExit if the start would fail.
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

    joins: whether Ray was running before this process.
    options: keyword arguments of `serve.run`.
    """
    try:
        _check_resources(Settings.from_env(), joins=joins)
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
    """Whether `ray.init` will join a Ray cluster that is running, instead of starting one.

    address: option --address of `serve run`, by default the value of RAY_ADDRESS.
    """
    noted = Path(environ.get("RAY_TMPDIR") or "/tmp") / "ray" / "ray_current_cluster"
    return address != "local" and (bool(address) or noted.exists())


def _check_resources(settings: Settings, *, joins: bool) -> None:
    """Check that Ray has the CPUs and GPUs that the deployments reserve; Serve would wait for them
    without end.

    joins: whether Ray was running before this process. Such a cluster may still grow, so a shortage
        is only printed; otherwise it raises RuntimeError.
    """
    wanted, there = reserved_resources(settings), ray.cluster_resources()  # type: ignore[no-untyped-call]
    for kind, amount in wanted.items():
        if amount > there.get(kind, 0):
            found = f"the deployments reserve {amount:g} {kind}s, Ray has {there.get(kind, 0):g}"
            if not joins:
                raise RuntimeError(f"{found}: lower {_FIXES[kind]}")
            print(f"Serve waits for resources: {found}.", file=sys.stderr)
