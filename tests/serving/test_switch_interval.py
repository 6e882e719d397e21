"""Interpreter switch interval of gateways and replicas."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from lorikeet.serving import deployments


class NoReplicaError(Exception):
    """Fake of Serve's error outside a replica."""


@pytest.fixture(autouse=True)
def interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def nowhere() -> None:
    raise NoReplicaError


@pytest.mark.parametrize(
    ("replica", "arguments"), [(deployments.Gateway, 4), (deployments.EngineReplica, 2)]
)
def test_gateways_and_replicas_switch_threads_after_half_a_millisecond(
    monkeypatch: pytest.MonkeyPatch, replica: Any, arguments: int
) -> None:
    monkeypatch.setattr(deployments.serve, "get_replica_context", nowhere)
    monkeypatch.setattr(deployments, "log_to_stderr", lambda: None)
    with pytest.raises(NoReplicaError):
        replica(*[None] * arguments)
    assert sys.getswitchinterval() == pytest.approx(0.5e-3)
