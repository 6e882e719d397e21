"""The service's parts, as the processes and actors that tests kill."""

from pathlib import Path
from typing import Any

import ray

from tests.e2e.conftest import REPLICAS, Service
from tests.waiting import eventually


def engine_processes(service: Service) -> dict[int, int]:
    """The processes in which this service's engines run, and the replicas' that started them."""
    found = {}
    ours = f"LORIKEET_CATALOG={service.catalog}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (process / "cmdline").read_bytes().split(b"\0")
            runs_engine = b"lorikeet_engine.process.server" in arguments
            if runs_engine and ours in (process / "environ").read_bytes().split(b"\0"):
                state = (process / "stat").read_text().rpartition(")")[2].split()
                found[int(process.name)] = int(state[1])
        except OSError:  # it has just ended
            continue
    return found


def actor_named(part: str) -> Any:
    """The one actor whose name holds this."""
    found = actors_named(part)
    assert len(found) == 1, found
    return ray.get_actor(found[0]["name"], namespace=found[0]["namespace"])


def actors_named(part: str) -> list[dict[str, str]]:
    """Name and namespace of each actor whose name holds this."""
    names = ray.util.list_named_actors(all_namespaces=True)
    return [name for name in names if part in name["name"]]


def complete(service: Service) -> bool:
    """Whether all replicas are there within a minute."""
    return eventually(lambda: len(service.replicas()) == REPLICAS, within_s=60)
