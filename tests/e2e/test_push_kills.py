"""Killed parts and lost clients amid pushes: versions are complete or absent, retries safe."""

import hashlib
import os
import signal
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import ray

from tests.e2e.conftest import Service
from tests.e2e.pushing import TASK, SteadyTrainer, Steps
from tests.e2e.service_processes import actor_named, complete, engine_processes
from tests.waiting import eventually


@pytest.fixture(scope="module")
def key(service: Service) -> str:
    wanted = {"scopes": ["publish"], "adapters": ["kills*"]}
    made = service.admin("POST", f"/tenants/{TASK.tenant}/keys", json=wanted)
    key: str = made.raise_for_status().json()["key"]
    return key


def kill_gateway(_: Service) -> None:
    ray.kill(actor_named("default#gateway#"), no_restart=False)


def kill_replica(service: Service) -> None:
    os.kill(next(iter(engine_processes(service).values())), signal.SIGKILL)


def kill_engine(service: Service) -> None:
    os.kill(next(iter(engine_processes(service))), signal.SIGKILL)


def kill_controllers(_: Service) -> None:
    for controller in ("SERVE_CONTROLLER_ACTOR", "default#controller#"):
        ray.kill(actor_named(controller), no_restart=False)


@pytest.mark.parametrize(
    "kill",
    [
        kill_controllers,
        pytest.param(kill_replica, marks=pytest.mark.soak),
        pytest.param(kill_engine, marks=pytest.mark.soak),
        pytest.param(kill_gateway, marks=pytest.mark.soak),
    ],
)
def test_no_durable_version_is_lost_when_a_part_dies_amid_pushes(
    service: Service, key: str, tmp_path: Path, kill: Callable[[Service], None]
) -> None:
    assert complete(service)
    trainer = SteadyTrainer(service, key, f"kills-{kill.__name__.replace('_', '-')}", tmp_path)
    with trainer.at_work():
        kill(service)
        trainer.wait_for(3)
    assert complete(service)
    assert trainer.answered
    assert trainer.stale == []
    told = service.admin("GET", f"/adapters/{trainer.model}").raise_for_status().json()
    recorded = {each["version"]: each["digest"] for each in told["versions"]}
    assert {each.version: each.digest for each in trainer.pushed} == recorded
    for version in trainer.pushed:
        assert ask(service, version.model).headers["x-lorikeet-adapter-digest"] == version.digest
    prod = ask(service, trainer.model)
    assert prod.headers["x-lorikeet-adapter-digest"] == trainer.pushed[-1].digest


@pytest.mark.parametrize("sent", [0.5, 1.0])
def test_a_client_that_disconnects_amid_a_push_leaves_a_complete_version_or_none(
    service: Service, key: str, tmp_path: Path, sent: float
) -> None:
    blob = Steps(tmp_path).blob(int(10 * sent))
    digest = hashlib.sha256(blob).hexdigest()
    path = f"/v1/adapters/kills-left/versions/{digest}"
    address = urlsplit(service.url)
    head = (
        f"PUT {path}?wait=durable HTTP/1.1\r\nhost: {address.netloc}\r\n"
        f"authorization: Bearer {key}\r\ncontent-length: {len(blob)}\r\n\r\n"
    )
    with closing(socket.create_connection((address.hostname, address.port))) as connection:
        connection.sendall(head.encode() + blob[: int(sent * len(blob))])
    headers = {"authorization": f"Bearer {key}"}

    def states() -> tuple[int, bool]:
        shown = httpx.get(f"{service.url}{path}", headers=headers, timeout=30)
        return shown.status_code, shown.is_success and shown.json()["durable"]

    def is_decided() -> bool:
        return states() in ((404, False), (200, True))

    assert eventually(is_decided, within_s=30)  # gateways forget a dead gateway's uploads
    if sent < 1:
        assert states() == (404, False)
    again = httpx.put(
        f"{service.url}{path}",
        params={"wait": "durable"},
        headers=headers,
        content=blob,
        timeout=60,
    )
    assert (again.is_success, again.json()["durable"]) == (True, True)
    answer = ask(service, again.json()["model"])
    assert answer.headers["x-lorikeet-adapter-digest"] == digest


def ask(service: Service, model: str) -> httpx.Response:
    answer = httpx.post(
        f"{service.url}/v1/completions",
        headers={"authorization": f"Bearer {service.tenant_keys[TASK.tenant]}"},
        json={"model": model, "prompt": TASK.example.prompt, "max_tokens": 1},
        timeout=60,
    )
    return answer.raise_for_status()
