"""Pushes to a real service, where every replica has a version before the store does."""

import hashlib
import json
import os
import shutil
import signal
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import httpx
import pytest

from demo.fill_catalog import ADAPTERS
from demo.tasks import TASKS
from loadtest.real_service.adapters import save_adapter
from lorikeet.gateway.pushing.push_folders import BLOB
from lorikeet_engine.adapter_format import BaseShape, write_blob
from tests.e2e.conftest import REPLICAS, ROOT
from tests.e2e.faulty_replica import faults
from tests.e2e.service_processes import complete, engine_processes, process_of
from tests.waiting import eventually

TASK = TASKS[0]
GATEWAY = "default#gateway#"


@pytest.fixture(scope="module")
def key(service):
    wanted = {"scopes": ["publish"], "adapters": ["policy*"]}
    made = service.admin("POST", f"/tenants/{TASK.tenant}/keys", json=wanted)
    return made.raise_for_status().json()["key"]


@pytest.fixture
def blob(tmp_path):
    """Make the blob of a training step: the demo adapter, a little stronger at each step."""
    folder = shutil.copytree(ADAPTERS / TASK.tenant / TASK.name, tmp_path / "peft")
    config = json.loads((folder / "adapter_config.json").read_text())

    def make(step):
        changed = config | {"lora_alpha": config["lora_alpha"] * (1 + step / 1000)}
        (folder / "adapter_config.json").write_text(json.dumps(changed))
        write_blob(folder, tmp_path / "blob")
        return (tmp_path / "blob").read_bytes()

    return make


def push(service, key, blob, name="policy", **query):
    digest = hashlib.sha256(blob).hexdigest()
    return httpx.put(
        f"{service.url}/v1/adapters/{name}/versions/{digest}",
        headers={"authorization": f"Bearer {key}"},
        content=blob,
        params=query,
        timeout=60,
    )


def show(service, key, version):
    adapter = version["adapter"].partition("/")[2]
    return httpx.get(
        f"{service.url}/v1/adapters/{adapter}/versions/{version['digest']}",
        headers={"authorization": f"Bearer {key}"},
        timeout=30,
    )


def ask(service, model):
    return httpx.post(
        f"{service.url}/v1/chat/completions",
        headers={"authorization": f"Bearer {service.tenant_keys[TASK.tenant]}"},
        json={
            "model": model,
            "messages": [{"role": "user", "content": TASK.example.prompt}],
            "temperature": 0,
        },
        timeout=60,
    )


def test_replicas_on_the_gateways_machine_link_to_its_file(service, key, blob):
    version = push(service, key, blob(8), name="policy-near", lifetime_s=60).json()
    cache = Path(os.environ["LORIKEET_CACHE_DIR"])
    (of_gateway,) = (
        path
        for path in cache.glob(f"pushes/*/*/{BLOB}")
        if path.samefile(cache / version["digest"])
    )
    assert of_gateway.stat().st_nlink == 2


def test_a_replica_on_another_machine_is_sent_the_blob(service, key, blob):
    with faults(files="raise"):
        version = push(service, key, blob(6), name="policy-far", lifetime_s=60).json()
    assert version["ready"]
    answer = ask(service, version["model"])
    assert answer.headers["x-lorikeet-adapter-digest"] == version["digest"]


@pytest.mark.soak
def test_versions_become_ready_though_the_store_is_down_for_a_minute(
    service, key, blob, store_link
):
    assert push(service, key, blob(20), name="policy-down", wait="durable").is_success
    with store_link.down():
        until_s = time.monotonic() + 60
        versions, took_s = [], []
        while time.monotonic() < until_s:
            began_s = time.monotonic()
            pushed = push(service, key, blob(21 + len(versions)), name="policy-down", alias="prod")
            took_s.append(time.monotonic() - began_s)
            assert pushed.status_code == 201, pushed.text
            versions.append(pushed.json())
            time.sleep(max(0.0, began_s + 4.5 - time.monotonic()))  # at most 16 may wait
    assert not any(version["durable"] for version in versions)
    assert max(took_s) < 3
    assert eventually(lambda: show(service, key, versions[-1]).json()["durable"], within_s=30)
    assert all(show(service, key, version).json()["durable"] for version in versions)
    prod = ask(service, f"{TASK.tenant}/policy-down")
    assert prod.headers["x-lorikeet-adapter-digest"] == versions[-1]["digest"]


@pytest.mark.soak
def test_a_version_is_durable_within_a_second_and_a_half_beyond_the_upload(
    service, key, s3_bucket, tmp_path
):
    config = json.loads((ROOT / "demo" / "model" / "config.json").read_text())
    shape, bucket = BaseShape.from_config(config), s3_bucket.removeprefix("s3://")
    store = boto3.session.Session().client("s3")
    more_s = []
    for turn in range(6):
        folder = save_adapter(tmp_path / str(turn), shape, rank=64, alpha=64 + turn)
        write_blob(folder, folder / "blob")
        made = (folder / "blob").read_bytes()
        began_s = time.monotonic()
        store.put_object(Bucket=bucket, Key=f"beside/{turn}", Body=made)
        uploaded_s = time.monotonic()
        options = {"base_model": "lorikeet-demo", "wait": "durable"}
        assert push(service, key, made, name="policy-large", **options).status_code == 201
        more_s.append((time.monotonic() - uploaded_s) - (uploaded_s - began_s))
    print(f"{len(made)} bytes: durable {[round(each, 2) for each in more_s]} s after an upload")
    assert statistics.median(more_s) <= 1.5


def test_every_replica_answers_with_a_pushed_version_while_the_store_is_down(
    service, key, blob, store_link
):
    assert push(service, key, blob(1), wait="durable").status_code == 201  # caches the key
    with store_link.down():
        pushed = push(service, key, blob(2), alias="prod")
        assert pushed.status_code == 201, pushed.text
        version = pushed.json()
        assert (version["ready"], version["durable"], version["aliases"]) == (True, False, ["prod"])
        with ThreadPoolExecutor(12) as pool:
            models = [version["model"], f"{TASK.tenant}/policy"] * 12
            answers = list(pool.map(lambda model: ask(service, model), models))
        assert {answer.status_code for answer in answers} == {200}
        digests = {answer.headers["x-lorikeet-adapter-digest"] for answer in answers}
        assert digests == {version["digest"]}
        assert {answer.headers["x-lorikeet-residency"] for answer in answers} <= {"host", "gpu"}
        said = {answer.json()["choices"][0]["message"]["content"] for answer in answers}
        assert said == {TASK.example.answer}
    assert eventually(lambda: show(service, key, version).json()["durable"], within_s=20)
    assert show(service, key, version).json()["version"] == 2
    holding = [
        replica
        for replica in service.replicas()
        if version["digest"] in {each["digest"] for each in replica["adapters"]}
    ]
    assert len(holding) == REPLICAS


def test_a_push_is_complete_or_absent_after_its_gateway_dies(service, key, blob, store_link):
    version = push(service, key, blob(3), name="policy-killed", wait="durable").json()
    made = blob(4)
    with store_link.down():
        lost = push(service, key, made, name="policy-killed", alias="prod").json()
        assert (lost["ready"], lost["durable"]) == (True, False)
        os.kill(process_of("gateway"), signal.SIGKILL)  # ray.kill returns before the process ends
    model = version["model"]
    assert eventually(lambda: ask(service, model).status_code == 200, within_s=60)
    assert show(service, key, lost).status_code == 404
    prod = ask(service, f"{TASK.tenant}/policy-killed")
    assert prod.headers["x-lorikeet-adapter-digest"] == version["digest"]
    again = push(service, key, made, name="policy-killed", alias="prod", wait="durable")
    assert (again.status_code, again.json()["version"]) == (201, 2)


def test_a_restarted_replica_is_sent_ephemeral_versions_again(service, key, blob):
    pushed = push(service, key, blob(5), name="policy-passing", lifetime_s=120)
    assert pushed.status_code == 201, pushed.text
    version = pushed.json()
    victim = min(engine_processes(service))
    os.kill(victim, signal.SIGKILL)
    assert eventually(lambda: victim not in engine_processes(service), within_s=20)
    assert complete(service)

    def all_hold():
        held = [{each["digest"] for each in r["adapters"]} for r in service.replicas()]
        return len(held) == REPLICAS and all(version["digest"] in each for each in held)

    assert eventually(all_hold, within_s=30)
    with ThreadPoolExecutor(9) as pool:
        answers = list(pool.map(lambda _: ask(service, version["model"]), range(18)))
    assert {answer.status_code for answer in answers} == {200}
    now = show(service, key, version).json()
    assert (now["version"], now["durable"]) == (None, False)


def test_tenants_requests_are_answered_while_versions_are_pushed(service, key, blob):
    push(service, key, blob(10), name="policy-moving", wait="durable")
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, service, f"{TASK.tenant}/policy-moving") for _ in range(24)]
        digests = [
            push(service, key, blob(step), name="policy-moving", alias="prod").json()["digest"]
            for step in range(11, 15)
        ]
        answers = [each.result() for each in asked]
    assert {answer.status_code for answer in answers} == {200}
    began_s = time.monotonic()
    last = ask(service, f"{TASK.tenant}/policy-moving")
    assert last.headers["x-lorikeet-adapter-digest"] == digests[-1]
    assert time.monotonic() - began_s < 5
