"""Processes and actors of the service that tests kill."""

import os
from pathlib import Path
from typing import Any

import ray

from tests.e2e.conftest import REPLICAS, Service
from tests.waiting import eventually


def engine_processes(service: Service) -> dict[int, int]:
    """Return this service's engine processes, each with the replica process that started it."""
    found = {}
    ours = f"LORIKEET_CATALOG={service.catalog}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (process / "cmdline").read_bytes().split(b"\0")
            runs_engine = b"lorikeet_engine.process.server" in arguments
            if runs_engine and ours in (process / "environ").read_bytes().split(b"\0"):
                state = (process / "stat").read_text().rpartition(")")[2].split()
                found[int(process.name)] = int(state[1])
        except OSError:  # the process has just ended
            continue
    return found


def process_of(deployment: str) -> int:
    """Return the id of the process that runs the only replica of a Serve deployment."""
    actor = actor_named(f"default#{deployment}#")
    process: int = ray.get(actor.__ray_call__.remote(lambda actor: os.getpid()))
    return process


def actor_named(part: str) -> Any:
    """Return the only actor whose name contains `part`."""
    found = actors_named(part)
    assert len(found) == 1, found
    return ray.get_actor(found[0]["name"], namespace=found[0]["namespace"])


def actors_named(part: str) -> list[dict[str, str]]:
    """Return the name and namespace of each actor whose name contains `part`."""
    names = ray.util.list_named_actors(all_namespaces=True)
    return [name for name in names if part in name["name"]]


def complete(service: Service) -> bool:
    """Whether all replicas are running within a minute."""
    return eventually(lambda: len(service.replicas()) == REPLICAS, within_s=60)
