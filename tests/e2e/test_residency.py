"""Residency of adapters: affinity, pins, versions, and recovery after a death."""

import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import ray

from demo.fill_catalog import ADAPTERS
from demo.tasks import TASKS
from lorikeet.catalog.catalog import blob_key
from lorikeet.catalog.store.object_store import open_store
from lorikeet_engine.adapter_format import write_blob
from tests.e2e.conftest import REPLICAS, Service
from tests.e2e.service_processes import actor_named, engine_processes
from tests.waiting import eventually

UPPER, REVERSE = TASKS[:2]


def replica_of(service: Service, model: str) -> str:
    answer = service.client(UPPER.tenant).with_raw_response.completions.create(
        model=model, prompt="x", max_tokens=1
    )
    return answer.headers["x-lorikeet-replica"]


def pin_states(service: Service) -> dict[str, str]:
    pins = service.admin("GET", "/pins").raise_for_status().json()["data"]
    return {pin["adapter"] or pin["tenant"]: pin["state"] for pin in pins}


def blob_of(task, folder: Path) -> bytes:
    write_blob(ADAPTERS / task.tenant / task.name, folder / "blob")
    return (folder / "blob").read_bytes()


def test_requests_for_an_adapter_stay_on_its_replica(service):
    for task in TASKS:
        if task.tenant == UPPER.tenant:
            first = replica_of(service, task.model)
            holders = set(service.holders(task.model))
            assert first in holders
            assert {replica_of(service, task.model) for _ in range(5)} <= holders


def test_a_pin_makes_an_adapter_resident_on_all_replicas_within_5_s(service):
    path = f"/pins/{REVERSE.model}"
    body = {"reason": "demo at ten", "replicas": None}
    service.admin("PUT", path, json=body).raise_for_status()
    try:
        assert eventually(lambda: len(service.holders(REVERSE.model)) == REPLICAS, within_s=5)
    finally:
        service.admin("DELETE", path).raise_for_status()


def test_a_tenants_pin_is_met_if_it_fits_and_a_dry_run_moves_nothing(service):
    path = f"/pins/{UPPER.tenant}"
    tried = service.admin("PUT", path, json={"tier": "host", "dry_run": True}).raise_for_status()
    assert tried.json()["unmet"] == []
    assert pin_states(service) == {}
    service.admin("PUT", path, json={"tier": "host"}).raise_for_status()
    try:
        assert eventually(lambda: pin_states(service) == {UPPER.tenant: "met"}, within_s=10)
        again = service.admin("PUT", path, json={"tier": "host", "dry_run": True}).json()
        assert again == {"loads": [], "releases": [], "unmet": [], "lost": []}
        service.admin("PUT", f"{path}/{UPPER.name}", json={"replicas": 99}).raise_for_status()
        assert pin_states(service)[f"{UPPER.tenant}/{UPPER.name}"] == "unmet"
    finally:
        service.admin("DELETE", f"{path}/{UPPER.name}")
        service.admin("DELETE", path).raise_for_status()


def test_requests_work_without_the_controller_and_pins_are_met_after_its_restart(service):
    ray.kill(actor_named("#controller#"))
    for task in TASKS:
        if task.tenant == UPPER.tenant:
            replica_of(service, task.model)
    path = f"/pins/{UPPER.model}"
    service.admin("PUT", path, json={"reason": "after a crash"}).raise_for_status()
    try:
        assert eventually(lambda: len(service.holders(UPPER.model)) == REPLICAS, within_s=60)
    finally:
        service.admin("DELETE", path).raise_for_status()


def test_promote_and_rollback_change_the_answer_within_5_s(service, tmp_path):
    name = "shifting"
    versions = f"/adapters/{UPPER.tenant}/{name}/versions"
    model = f"{UPPER.tenant}/{name}"

    def says(text: str) -> bool:
        answer = service.client(UPPER.tenant).chat.completions.create(
            model=model, messages=[{"role": "user", "content": "pencil"}], temperature=0
        )
        return answer.choices[0].message.content == text

    service.admin("PUT", versions, content=blob_of(UPPER, tmp_path)).raise_for_status()
    assert eventually(lambda: says("PENCIL"), within_s=5)
    service.admin("PUT", versions, content=blob_of(REVERSE, tmp_path)).raise_for_status()
    assert says("PENCIL")
    promote = {"version": 2, "expect": 1}
    service.admin("POST", f"/adapters/{model}/promote", json=promote).raise_for_status()
    assert eventually(lambda: says("licnep"), within_s=5)
    service.admin("POST", f"/adapters/{model}/rollback", json={}).raise_for_status()
    assert eventually(lambda: says("PENCIL"), within_s=5)


@pytest.mark.parametrize("event", ["push", pytest.param("start", marks=pytest.mark.soak)])
def test_a_pins_prompt_is_computed_before_its_first_user_asks(service, tmp_path, event):
    prompt = f"Before the {event}, you are a clerk of the parcel service. " * 6

    def pin() -> dict[str, int]:
        (found,) = service.admin("GET", "/pins").raise_for_status().json()["data"]
        return found["prompt"]

    def cached_tokens() -> int:
        answer = service.client(UPPER.tenant).chat.completions.create(
            model=model,
            messages=[
                {"role": "system", "content": prompt},
                {"role": "user", "content": "pencil"},
            ],
            max_tokens=1,
        )
        assert answer.usage.prompt_tokens > 256
        return answer.usage.prompt_tokens_details.cached_tokens

    model = f"{UPPER.tenant}/prompted-{event}"
    versions = f"/adapters/{model}/versions"
    service.admin("PUT", versions, content=blob_of(REVERSE, tmp_path)).raise_for_status()
    assert cached_tokens() == 0
    service.admin("PUT", f"/pins/{model}", json={"prompt": prompt}).raise_for_status()
    try:
        assert eventually(lambda: pin()["computed"] == REPLICAS, within_s=30)
        if event == "push":
            service.admin("PUT", versions, content=blob_of(UPPER, tmp_path)).raise_for_status()
            promote = {"version": 2, "expect": 1}
            service.admin("POST", f"/adapters/{model}/promote", json=promote).raise_for_status()
            assert eventually(lambda: pin()["computed"] < REPLICAS, within_s=5)
        else:
            for process in engine_processes(service):
                os.kill(process, signal.SIGKILL)
            assert eventually(lambda: not service.replicas(), within_s=30)
        assert eventually(lambda: pin()["computed"] == REPLICAS, within_s=60)
        assert cached_tokens() >= 256
    finally:
        service.admin("DELETE", f"/pins/{model}").raise_for_status()


def test_an_adapter_whose_blob_is_missing_fails_only_its_own_requests(service, tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(ADAPTERS / UPPER.tenant / UPPER.name, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 3}))
    digest = write_blob(folder, tmp_path / "blob")
    model = f"{UPPER.tenant}/lost"
    service.admin(
        "PUT", f"/adapters/{model}/versions", content=(tmp_path / "blob").read_bytes()
    ).raise_for_status()
    open_store(service.catalog).delete(blob_key(digest))

    with ThreadPoolExecutor(2) as pool:
        lost = pool.submit(replica_of, service, model)
        assert replica_of(service, UPPER.model)
    error = lost.exception()
    assert isinstance(error, openai.InternalServerError)
    assert (error.status_code, error.code) == (503, "adapter_load_failed")
    assert f"{model}@1" in error.message


def test_a_truncated_adapter_is_refused_at_upload(service, tmp_path):
    name = "broken"
    path = f"/adapters/{UPPER.tenant}/{name}/versions"
    blob = blob_of(UPPER, tmp_path)
    answer = service.admin("PUT", path, content=blob[: len(blob) // 2])
    assert answer.status_code == 422
    assert "truncated" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [b"\x80\x04pickle", b"", b"\xff" * 64],
    ids=["pickle", "empty", "noise"],
)
def test_a_body_that_is_no_adapter_is_refused_at_upload(service, body):
    answer = service.admin("PUT", f"/adapters/{UPPER.tenant}/nonsense/versions", content=body)
    assert answer.status_code == 422
    assert answer.json()["error"]["code"] == "invalid_adapter"
