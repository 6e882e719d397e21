"""Two gateways of one service: one limit, one view of the fleet, one set of versions."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from demo.fill_catalog import ADAPTERS
from lorikeet_engine.adapter_format import write_blob
from tests.e2e.conftest import Service, free_port

PER_MIN, BURST_S = 240, 3
BODY = {"model": "lorikeet-demo", "prompt": "a", "max_tokens": 1}


class Urls(NamedTuple):
    """URLs of a service for tenants and for admins."""

    public: str
    admin: str


@pytest.fixture(scope="module")
def two_gateways(service: Service) -> Iterator[Urls]:
    """Second application: two gateways in front of the first application's engines."""
    from ray import serve

    from lorikeet.replica.engine_settings import adapter_memory
    from lorikeet.serving.deployments import Gateway
    from lorikeet.settings import Settings

    address = f"127.0.0.1:{free_port()}"
    settings = Settings.from_env(
        {
            "LORIKEET_CATALOG": service.catalog,
            "LORIKEET_GATEWAYS": "2",
            "LORIKEET_TINKER": "true",
            "LORIKEET_ADMIN_ADDRESS": address,
        }
    )
    handle = serve.get_deployment_handle("engine-lorikeet-demo", "default")
    deployment = serve.deployment(
        name="gateway", num_replicas=2, ray_actor_options={"num_cpus": 0.1}
    )(serve.ingress()(Gateway))
    application = deployment.bind(
        settings, adapter_memory(settings), {"lorikeet-demo": handle}, None
    )
    serve.run(application, name="two", route_prefix="/two")
    yield Urls(f"{service.url}/two", f"http://{address}")
    serve.delete("two")


def test_either_gateway_explains_a_request_that_the_other_answered(
    service: Service, two_gateways: Urls
) -> None:
    tenant, key = next(iter(service.tenant_keys.items()))
    asked = httpx.post(
        f"{two_gateways.public}/v1/completions",
        json=BODY,
        headers={"authorization": f"Bearer {key}"},
        timeout=30,
    ).raise_for_status()
    path = f"requests/{asked.headers['x-request-id']}"
    admin = f"{two_gateways.admin}/admin/v1"
    for plane, secret in ((admin, service.admin_key), (f"{two_gateways.public}/v1", key)) * 8:
        headers = {"authorization": f"Bearer {secret}"}
        told = httpx.get(f"{plane}/{path}", headers=headers, timeout=30)
        assert (told.status_code, told.json()["tenant"]) == (200, tenant)


def test_tinkers_client_gets_its_samples_from_either_gateway(
    service: Service, two_gateways: Urls
) -> None:
    tinker = pytest.importorskip("tinker")
    key = "tml-" + next(iter(service.tenant_keys.values()))
    with tinker.ServiceClient(base_url=two_gateways.public, api_key=key) as client:
        sampler = client.create_sampling_client(base_model="lorikeet-demo").result()
        prompt, params = tinker.ModelInput.from_ints([5, 9]), tinker.SamplingParams(max_tokens=8)
        samples = [sampler.sample(prompt, 1, params) for _ in range(8)]
        assert all(sample.result(timeout=20).sequences[0].tokens for sample in samples)


def test_each_gateway_shows_the_whole_fleet(service: Service, two_gateways: Urls) -> None:
    tenant, model = "kestrel", "kestrel/intake"
    httpx.post(
        f"{two_gateways.public}/v1/completions",
        json=BODY | {"model": model},
        headers={"authorization": f"Bearer {service.tenant_keys[tenant]}"},
        timeout=30,
    ).raise_for_status()
    headers = {"authorization": f"Bearer {service.admin_key}"}
    for _ in range(4):
        time.sleep(1.1)  # until the status, cached for a second, has expired
        told = httpx.get(f"{two_gateways.admin}/admin/v1/fleet", headers=headers, timeout=30).json()
        assert told["gateways"] == {"answered": 2, "silent": 0}
        shown = {told["adapters"][at][1] for each in told["replicas"] for at, *_ in each["blocks"]}
        assert "intake" in shown
        assert sum(told["lines"]["requests"]) > 0


def test_two_gateways_admit_as_many_requests_as_one_would(
    service: Service, two_gateways: Urls
) -> None:
    limits = {"requests_per_min": PER_MIN, "burst_s": BURST_S}
    service.admin("POST", "/tenants", json={"tenant": "limited", **limits}).raise_for_status()
    made = service.admin("POST", "/tenants/limited/keys", json={}).raise_for_status()
    headers = {"authorization": f"Bearer {made.json()['key']}"}
    time.sleep(BURST_S + 1)  # wait until the token buckets of new gateways are full

    def ask(_: int) -> httpx.Response:
        url = f"{two_gateways.public}/v1/completions"
        return httpx.post(url, json=BODY, headers=headers, timeout=30)

    began = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(60)))
    took_s = time.monotonic() - began
    passed = [answer for answer in answers if answer.is_success]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(passed) + len(refused) == len(answers)
    whole = PER_MIN / 60 * (BURST_S + took_s)
    assert 0.7 * whole <= len(passed) <= whole + 2
    assert refused[-1].headers["x-ratelimit-limit-requests"] == str(PER_MIN)
    assert 1 <= int(refused[-1].headers["retry-after"]) <= 2


def test_either_gateway_answers_with_a_version_that_was_pushed_to_one(
    service: Service, two_gateways: Urls, tmp_path: Path
) -> None:
    tenant = "kestrel"
    wanted = {"scopes": ["publish"], "adapters": ["pushed"]}
    made = service.admin("POST", f"/tenants/{tenant}/keys", json=wanted).raise_for_status()
    digest = write_blob(ADAPTERS / tenant / "spell", tmp_path / "blob")
    pushed = httpx.put(
        f"{two_gateways.public}/v1/adapters/pushed/versions/{digest}",
        headers={"authorization": f"Bearer {made.json()['key']}"},
        content=(tmp_path / "blob").read_bytes(),
        params={"lifetime_s": 60},
        timeout=60,
    )
    assert (pushed.status_code, pushed.json()["ready"]) == (201, True), pushed.text
    headers = {"authorization": f"Bearer {service.tenant_keys[tenant]}"}
    for _ in range(12):
        body = BODY | {"model": pushed.json()["model"]}
        url = f"{two_gateways.public}/v1/completions"
        answer = httpx.post(url, json=body, headers=headers, timeout=30)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-lorikeet-adapter-digest"] == digest
