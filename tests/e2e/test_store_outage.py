"""The object store goes away under load: what is resident serves on, what is not says so."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.conftest import eventually
from tests.e2e.load import Load, hit_rate

ADAPTERS = 12


@pytest.fixture(scope="module")
def adapters(service, crowd):
    made = crowd.adapters(ADAPTERS)
    with Load(service.url, made) as warm:
        warm.wait_for(3 * ADAPTERS)
    return made


def ask(service, target):
    return httpx.post(
        f"{service.url}/v1/completions",
        headers={"Authorization": f"Bearer {target.key}"},
        json={"model": target.model, "prompt": "a", "max_tokens": 2},
        timeout=120,
    )


def code_of(answer):
    assert int(answer.headers["retry-after"]) >= 1
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=pytest.mark.soak)])
def test_a_store_that_is_down(service, store_link, crowd, adapters, seconds):
    cold, unregistered = crowd.adapters(1)[0], crowd.unregistered()
    with Load(service.url, [*adapters, crowd.base()]) as load:
        load.wait_for(20)
        with store_link.down():
            assert code_of(ask(service, cold)) == (503, "adapter_load_failed")
            assert code_of(ask(service, unregistered)) == (503, "unavailable")
            time.sleep(seconds)
        assert eventually(lambda: ask(service, cold).status_code == 200, within_s=10)
        assert eventually(lambda: ask(service, unregistered).status_code == 404, within_s=10)
    assert load.unfinished() == []
    assert hit_rate(load.results) > 0.9


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [2, 60])
def test_a_store_that_hangs(service, store_link, crowd, adapters, seconds):
    cold, unregistered = crowd.adapters(1)[0], crowd.unregistered()
    with (
        ThreadPoolExecutor(1) as pool,
        Load(service.url, [*adapters, crowd.base()]) as load,
    ):
        load.wait_for(20)
        with store_link.silent():
            waiting = pool.submit(ask, service, cold)
            assert code_of(ask(service, unregistered)) == (503, "unavailable")
            time.sleep(seconds)
            assert not waiting.done()
        answer = waiting.result(timeout=60)
        assert eventually(lambda: ask(service, unregistered).status_code == 404, within_s=10)
    assert (answer.status_code, answer.headers["x-lorikeet-residency"]) == (200, "remote")
    assert load.unfinished() == []
    assert hit_rate(load.results) > 0.9
