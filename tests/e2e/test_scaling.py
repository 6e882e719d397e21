"""Serve's autoscaler follows the pressure that replicas report."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorikeet.serving.autoscaling import autoscaling
from tests.e2e.conftest import Service
from tests.e2e.puppet import Puppet
from tests.waiting import eventually

IDLE = {
    "working_bytes": 0,
    "arena_bytes": 100,
    "oldest_wait_s": 0,
    "running_share": 0,
    "kv_share": 0,
    "sole_copies": 0,
}
NAME = "scaled"
DOWNSCALE_S = 2.0


@pytest.fixture
def puppets(service: Service, tmp_path: Path) -> Iterator[Path]:
    """The file whose contents the replicas report."""
    from ray import serve

    file = tmp_path / "stats"
    file.write_text(json.dumps(IDLE))
    deployment = serve.deployment(
        name=NAME,
        autoscaling_config=autoscaling(
            1, 3, upscale_s=1.0, downscale_s=DOWNSCALE_S, sole_copies_s=600.0
        ),
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_wait_loop_s=0.1,
    )(Puppet)
    serve.run(deployment.bind(file), name=NAME, route_prefix=None)
    yield file
    serve.delete(NAME)


def running() -> int:
    from ray import serve

    return serve.status().applications[NAME].deployments[NAME].replica_states.get("RUNNING", 0)


def test_serve_adds_replicas_under_pressure_and_removes_them_after_adapters_have_moved(
    puppets: Path,
) -> None:
    puppets.write_text(json.dumps(IDLE | {"working_bytes": 250}))
    assert eventually(lambda: running() == 3, within_s=60)
    puppets.write_text(json.dumps(IDLE | {"sole_copies": 0.2}))
    assert not eventually(lambda: running() < 3, within_s=2.5 * DOWNSCALE_S)
    puppets.write_text(json.dumps(IDLE))
    assert eventually(lambda: running() == 1, within_s=60)
