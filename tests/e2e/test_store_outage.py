"""Outages of the object store under load: resident adapters are served, others fail by name."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import pytest
import ray
from ray import serve

from lorikeet.serving import deployments
from lorikeet.settings import Settings
from tests.e2e.conftest import free_port
from tests.e2e.load import Load, hit_rate
from tests.e2e.service_processes import actor_named, actors_named
from tests.waiting import eventually

ADAPTERS = 12
OTHER = "other"
GATEWAYS = f"{OTHER}#gateway#"
OUTAGE_S = 60
WELL = ("RUNNING", "HEALTHY")


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
def test_while_the_store_is_down_only_requests_that_need_it_fail(
    service, store_link, crowd, adapters, seconds
):
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
def test_a_load_waits_for_a_store_that_hangs_for_two_seconds(service, store_link, crowd, adapters):
    cold, unregistered = crowd.adapters(1)[0], crowd.unregistered()
    with (
        ThreadPoolExecutor(1) as pool,
        Load(service.url, [*adapters, crowd.base()]) as load,
    ):
        load.wait_for(20)
        with store_link.silent():
            waiting = pool.submit(ask, service, cold)
            assert code_of(ask(service, unregistered)) == (503, "unavailable")
            time.sleep(2)
            assert not waiting.done()
        answer = waiting.result(timeout=60)
        assert eventually(lambda: ask(service, unregistered).status_code == 404, within_s=10)
    assert (answer.status_code, answer.headers["x-lorikeet-residency"]) == (200, "remote")
    assert load.unfinished() == []
    assert hit_rate(load.results) > 0.9


@pytest.mark.soak
def test_a_load_fails_with_503_if_the_store_hangs_for_long(service, store_link, crowd, adapters):
    (cold,) = crowd.adapters(1)
    with (
        ThreadPoolExecutor(1) as pool,
        Load(service.url, [*adapters, crowd.base()]) as load,
    ):
        load.wait_for(20)
        with store_link.silent():
            waiting, began_s = pool.submit(ask, service, cold), time.monotonic()
            assert service.admin("POST", "/tenants", json={"tenant": "late"}).status_code == 503
            assert time.monotonic() - began_s < 15
            answer = waiting.result(timeout=40)
            load.wait_for(20)
        assert eventually(lambda: ask(service, cold).status_code == 200, within_s=10)
    assert code_of(answer) == (503, "adapter_load_failed")
    assert cold.model in answer.json()["error"]["message"]
    assert answer.headers["retry-after"] == "10"
    assert load.unfinished() == []
    assert hit_rate(load.results) > 0.9


@pytest.mark.soak
def test_a_gateway_started_while_the_store_is_down_serves_the_catalog_cached_on_its_machine(
    service, store_link, adapters
):
    time.sleep(2)  # until the gateway has saved its view of the catalog
    with store_link.down():
        ray.kill(actor_named("#gateway#"), no_restart=False)
        assert eventually(lambda: answered(service, adapters[0]), within_s=60)
        status = service.admin("GET", "/status").raise_for_status().json()
        assert status["catalog_age_s"] > 2
    assert eventually(lambda: is_fresh(service), within_s=10)


def answered(service, target):
    try:
        return ask(service, target).status_code == 200
    except httpx.TransportError:  # the gateway may end during our connection
        return False


def is_fresh(service):
    return service.admin("GET", "/status").json()["catalog_age_s"] < 2


@pytest.mark.soak
@pytest.mark.parametrize("outage", ["down", "silent"])
def test_the_whole_application_starts_during_an_outage(service, store_link, tmp_path, outage):
    with ExitStack() as running:
        with getattr(store_link, outage)():
            url = running.enter_context(application(service, tmp_path))
            until_s = time.monotonic() + OUTAGE_S
            while time.monotonic() < until_s:
                assert code_of(ask_demo(service, url)) == (503, "unavailable")
                assert broken_deployments() == []
                time.sleep(1)
        assert eventually(lambda: ask_demo(service, url).status_code == 200, within_s=10)


@pytest.mark.soak
def test_both_gateways_are_killed_during_an_outage(service, store_link, tmp_path):
    with application(service, tmp_path) as url:
        assert ask_demo(service, url).status_code == 200  # its adapter is on the GPU
        assert eventually(lambda: any(tmp_path.glob("*.view")), within_s=10)
        with store_link.down():
            killed = [each["name"] for each in actors_named(GATEWAYS)]
            assert len(killed) == 2
            for name in killed:
                ray.kill(ray.get_actor(name, namespace="serve"), no_restart=False)
            assert eventually(lambda: two_others(killed), within_s=60)
            assert all(ask_demo(service, url).status_code == 200 for _ in range(20))
            assert broken_deployments() == []


@contextmanager
def application(service, cache_dir):
    """Run a whole application with two gateways on the service's catalog; yield its URL."""
    admin = f"127.0.0.1:{free_port()}"
    settings = Settings.from_env(
        {
            "LORIKEET_CATALOG": service.catalog,
            "LORIKEET_CACHE_DIR": str(cache_dir),
            "LORIKEET_GATEWAYS": "2",
            "LORIKEET_REPLICAS": "1",
            "LORIKEET_ADMIN_ADDRESS": admin,
        }
    )
    engines = {name: deployments.engine(settings, name) for name in settings.base_models}
    controller = deployments.controller(settings, engines)
    app = deployments.gateway(settings, engines, controller)
    try:
        serve.run(app, name=OTHER, route_prefix=f"/{OTHER}")
        yield f"{service.url}/{OTHER}"
    finally:
        serve.delete(OTHER)


def ask_demo(service, url):
    key = service.tenant_keys["kestrel"]
    return httpx.post(
        f"{url}/v1/completions",
        headers={"Authorization": f"Bearer {key}"},
        json={"model": "kestrel/spell", "prompt": "a", "max_tokens": 2},
        timeout=60,
    )


def broken_deployments():
    """Unhealthy deployments of the application, and the application itself if it is down."""
    status = serve.status().applications[OTHER]
    parts = {"the application": status, **status.deployments}
    return [(name, part) for name, part in parts.items() if part.status not in WELL]


def two_others(killed):
    """Whether Serve has replaced the killed gateways by as many healthy ones."""
    names = {each["name"] for each in actors_named(GATEWAYS)}
    return len(names) == 2 and names.isdisjoint(killed) and broken_deployments() == []
