"""Pushes that wait, and what hangs beside them, keep no other push from coming in."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from lorikeet.gateway.pushing import routes
from tests.gateway.conftest import Gateway, eventually
from tests.gateway.trainer import Trainer


@pytest.fixture
def trainer(gateway: Gateway) -> Trainer:
    return Trainer(gateway)


def test_so_many_pushes_of_a_tenant_wait_at_once_and_the_next_is_answered(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_MOST_WAITING", 2)
    gateway, blob = trainer.gateway, trainer.blob()
    gateway.engines.takes_pushes = False
    with ThreadPoolExecutor(3) as clients:
        asked = [clients.submit(trainer.push, blob, timeout_s=30) for _ in range(3)]
        eventually(lambda: any(each.done() for each in asked))
        assert sum(each.done() for each in asked) == 1
        gateway.engines.takes_pushes = True
        codes = sorted(each.result().status_code for each in asked)
    assert codes == [201, 201, 202]
