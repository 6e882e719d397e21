"""Trainers load adapters by vLLM's endpoints: each load is an ephemeral push to every replica."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import Scope
from lorikeet.gateway.app import create_app
from lorikeet.gateway.pushing import push_pipeline
from lorikeet.gateway.services import ServedModel, Services
from lorikeet.gateway.vllm import routes, shared_adapter
from lorikeet.gateway.vllm.requests import (
    LOAD,
    NO_OPS,
    PATHS,
    QUESTIONS,
    REFUSED,
    SKYRL_LOAD,
    UNLOAD,
)
from lorikeet_engine.adapter_format import write_blob
from tests.gateway.conftest import (
    LIMITS,
    SHAPE,
    Gateway,
    chat,
    encoders_of,
    listening,
    make_peft,
    serving,
)
from tests.gateway.linked_peers import LinkedPeers, link
from tests.gateway.test_bad_requests import error_of
from tests.gateway.trainer import Trainer, digest_of
from tests.waiting import eventually


class LoadingTrainer(Trainer):
    """Trainer that saves adapters below acme's folder of the shared file system.

    shared: that folder.
    """

    def __init__(self, gateway: Gateway, shared: Path) -> None:
        super().__init__(gateway)
        self.shared = shared

    def save(self, name: str, **peft: Any) -> Path:
        return make_peft(self.shared / name, **peft)

    def load(
        self, path: object, name: str = "policy-v1", key: str | None = None, **fields: Any
    ) -> httpx.Response:
        body = {"lora_name": name, "lora_path": str(path), **fields}
        return self.gateway.request("POST", LOAD, key or self.key, json=body)

    def unload(self, name: str = "policy-v1", key: str | None = None) -> httpx.Response:
        return self.gateway.request("POST", UNLOAD, key or self.key, json={"lora_name": name})

    def answer(self, model: str = "policy-v1") -> httpx.Response:
        return self.gateway.post("/v1/chat/completions", chat(model))

    def digest_that_answers(self, model: str = "policy-v1") -> str:
        return self.answer(model).raise_for_status().headers["x-lorikeet-adapter-digest"]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_pipeline, "_KEEP_S", 0.1)


@pytest.fixture
def peers() -> LinkedPeers:
    return LinkedPeers()


@pytest.fixture
def gateway(tmp_path: Path, peers: LinkedPeers) -> Iterator[Gateway]:
    with serving(tmp_path, load_from=tmp_path / "shared", peers=peers) as running:
        yield running


@pytest.fixture
def trainer(gateway: Gateway, tmp_path: Path) -> LoadingTrainer:
    return LoadingTrainer(gateway, tmp_path / "shared" / "acme")


def digest_in(folder: Path, tmp_path: Path) -> str:
    return write_blob(folder, tmp_path / "expected")


def test_a_loaded_adapter_answers_by_its_bare_name(trainer: LoadingTrainer, tmp_path: Path) -> None:
    gateway, folder = trainer.gateway, trainer.save("run/v1")
    before = gateway.catalog.reader.refresh().seq
    loaded = trainer.load(folder)
    assert (loaded.status_code, loaded.text) == (
        200,
        "Success: LoRA adapter 'policy-v1' added successfully.",
    )
    for model in ("policy-v1", "acme/policy-v1"):
        assert trainer.digest_that_answers(model) == digest_in(folder, tmp_path)
    assert gateway.catalog.reader.refresh().seq == before


def test_a_load_answers_once_every_replica_has_the_adapter(trainer: LoadingTrainer) -> None:
    folder, engines = trainer.save("v1"), trainer.gateway.engines
    engines.takes_pushes = False
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(trainer.load, folder)
        with pytest.raises(TimeoutError):
            loading.result(timeout=1)
        assert trainer.answer().status_code == 404
        engines.takes_pushes = True
        assert loading.result().is_success
    assert trainer.answer().is_success


def test_a_load_that_no_replica_takes_fails_and_may_be_repeated(
    trainer: LoadingTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    soon = routes._LOADED.model_copy(update={"timeout_s": 0.2})
    monkeypatch.setattr(routes, "_LOADED", soon)
    folder, engines = trainer.save("v1"), trainer.gateway.engines
    engines.takes_pushes = False
    assert error_of(trainer.load(folder), 503)["code"] == "unavailable"
    engines.takes_pushes = True
    assert eventually(lambda: trainer.load(folder).is_success)


def test_an_unloaded_adapter_is_unknown_on_every_gateway(
    trainer: LoadingTrainer, peers: LinkedPeers
) -> None:
    gateway, there_peers = trainer.gateway, LinkedPeers()
    served = {"tiny": ServedModel(SHAPE, ("org/Tiny-1B",))}
    engines = gateway.engines
    parts = AdapterCatalog(gateway.catalog.store), served, LIMITS, engines, encoders_of(engines)
    app = create_app(Services(*parts, peers=there_peers, load_from=trainer.shared.parent))
    with listening(app) as url:
        link([peers, there_peers])
        there = LoadingTrainer(replace(gateway, url=url, admin_key=""), trainer.shared)
        assert trainer.load(trainer.save("v1")).is_success
        assert there.answer().is_success
        unloaded = there.unload()  # the other gateway carries the push
        assert unloaded.text == "Success: LoRA adapter 'policy-v1' removed successfully."
        for each in (trainer, there):
            assert error_of(each.answer(), 404)["code"] == "model_not_found"
            assert error_of(each.unload(), 404)["code"] == "not_found"
        peers.others = ()


def test_a_reload_replaces_what_the_same_key_loaded(
    trainer: LoadingTrainer, tmp_path: Path
) -> None:
    first, second = trainer.save("a", seed=1), trainer.save("b", seed=2)
    for folder in (first, first, second, first):
        assert trainer.load(folder).is_success
        assert trainer.digest_that_answers() == digest_in(folder, tmp_path)


@pytest.mark.parametrize("taken", ["by another key", "as a registered adapter"])
def test_a_name_of_another_is_replaced_in_place_alone(
    trainer: LoadingTrainer, tmp_path: Path, taken: str
) -> None:
    first, second = trainer.save("a", seed=1), trainer.save("b", seed=2)
    _, other = trainer.new_key()
    if taken == "by another key":
        assert trainer.load(first, key=other).is_success
    else:
        trainer.gateway.register("acme/policy-v1", seed=1)
    error = error_of(trainer.load(second), 400)
    assert error["param"] == "lora_name"
    assert f"has already been loaded, {taken}" in error["message"]
    before = trainer.digest_that_answers()
    assert trainer.load(second, load_inplace=True).is_success
    assert trainer.digest_that_answers() == digest_in(second, tmp_path)
    assert trainer.unload().is_success
    if taken == "by another key":
        assert trainer.answer().status_code == 404
    else:
        assert trainer.digest_that_answers() == before
        assert trainer.unload().status_code == 404


def test_skyrls_load_replaces_any_adapter_of_the_name(
    trainer: LoadingTrainer, tmp_path: Path
) -> None:
    trainer.gateway.register("acme/policy-v1", seed=1)
    folder = trainer.save("b", seed=2)
    body = {"lora_name": "policy-v1", "lora_path": str(folder)}
    loaded = trainer.gateway.request("POST", SKYRL_LOAD, trainer.key, json=body)
    assert loaded.json() == {"status": "ok", "lora_name": "policy-v1"}
    assert trainer.digest_that_answers() == digest_in(folder, tmp_path)


def test_a_tenants_loaded_adapters_are_limited(
    trainer: LoadingTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push_pipeline, "MOST_OF_TENANT", 2)
    for seed in (1, 2):
        assert trainer.load(trainer.save("v", seed=seed), f"policy-v{seed}").is_success
    third = trainer.save("v", seed=3)
    assert error_of(trainer.load(third, "policy-v3"), 503)["code"] == "overloaded"
    assert trainer.unload("policy-v1").is_success
    assert trainer.load(third, "policy-v3").is_success


def test_a_load_can_be_explained_and_counts_as_a_push(
    trainer: LoadingTrainer, tmp_path: Path
) -> None:
    folder = trainer.save("v1")
    loaded = trainer.load(folder)
    told = trainer.gateway.admin("GET", f"/requests/{loaded.headers['x-request-id']}").json()
    assert told["request"] == f"POST {LOAD}"
    assert (told["tenant"], told["key_id"], told["outcome"]) == ("acme", trainer.key_id, "finished")
    assert told["model"] == f"acme/policy-v1@{digest_in(folder, tmp_path)}"
    stages = [each["stage"] for each in told["stages"]]
    assert stages == ["receive", "check", "deliver", "announce", "rest"]


def test_loaded_bytes_count_towards_the_keys_limit(trainer: LoadingTrainer) -> None:
    folder = trainer.save("v1")
    size = sum(each.stat().st_size for each in folder.iterdir())
    _, narrow = trainer.new_key(bytes_per_min=20 * size, burst_s=1)
    # the bucket of a new gateway fills
    assert eventually(lambda: trainer.load(folder, key=narrow).is_success)
    assert error_of(trainer.load(folder, key=narrow), 429)["code"] == "rate_limit_exceeded"


def test_a_key_loads_and_unloads_only_the_names_it_allows(trainer: LoadingTrainer) -> None:
    folder = trainer.save("v1")
    for name in ("support", "globex/policy-v1"):
        for answer in (trainer.load(folder, name), trainer.unload(name)):
            assert error_of(answer, 403)["code"] == "forbidden"
    assert trainer.load(folder, "acme/policy-v1").is_success


def test_a_refused_adapter_names_its_fault_and_leaves_nothing(trainer: LoadingTrainer) -> None:
    too_high = error_of(trainer.load(trainer.save("v1", rank=8)), 422)
    assert too_high["code"] == "invalid_adapter"
    assert "rank" in too_high["message"]
    dora = trainer.save("v2", config={"peft_type": "LOHA"})
    assert error_of(trainer.load(dora), 422)["code"] == "invalid_adapter"
    empty = trainer.shared / "v3"
    empty.mkdir()
    assert "adapter_config.json" in error_of(trainer.load(empty), 400)["message"]
    assert trainer.answer().status_code == 404
    left = [path for path in Path("/tmp").glob("pushes-*/*/*") if path.name == "copy"]
    assert left == []


def test_a_folder_larger_than_an_upload_may_be_is_refused(trainer: LoadingTrainer) -> None:
    folder = trainer.save("v1")
    (folder / "chat_template.jinja").write_text("x" * LIMITS.max_bytes)
    assert error_of(trainer.load(folder), 413)["code"] == "request_too_large"


PATHS_OUTSIDE = [
    "/etc",
    "relative/v1",
    "{shared}",
    "{shared}/globex/v1",
    "{shared}/acme/../globex/v1",
    "{shared}/acmefolder/v1",
    "{shared}/acme/v1/..",
    "{shared}/acme/linked",
    "{shared}/acme/linked/v1",
    "{shared}/acme/absent",
    "{shared}/acme/v1/adapter_config.json",
    "{shared}/acme/v1\0",
    "{shared}/acme/" + "x" * 300,
]


@pytest.mark.parametrize("path", PATHS_OUTSIDE)
def test_no_path_leaves_the_tenants_folder(
    trainer: LoadingTrainer, tmp_path: Path, path: str
) -> None:
    shared = tmp_path / "shared"
    trainer.save("v1")
    for tenant in ("globex", "acmefolder"):
        make_peft(shared / tenant / "v1")
    (shared / "acme" / "linked").symlink_to(shared / "globex")
    error = error_of(trainer.load(path.format(shared=shared)), 400)
    assert error["param"] == "lora_path"


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe"])
def test_a_file_that_is_a_link_or_a_pipe_is_not_read(
    trainer: LoadingTrainer, tmp_path: Path, kind: str
) -> None:
    other = make_peft(tmp_path / "shared" / "globex" / "v1")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        folder = trainer.save(f"with-{name}")
        (folder / name).unlink()
        if kind == "link":
            (folder / name).symlink_to(other / name)
        elif kind == "hard link":
            (folder / name).hardlink_to(other / name)
        else:
            os.mkfifo(folder / name)
        assert name in error_of(trainer.load(folder), 400)["message"]


def test_a_file_replaced_by_a_link_while_it_is_loaded_is_not_read(
    trainer: LoadingTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_peft(tmp_path / "shared" / "globex" / "v1", seed=7)
    folder = trainer.save("v1")
    choose = shared_adapter.adapter_files

    def replaced(*arguments: Any) -> tuple[str, ...]:
        chosen = choose(*arguments)
        (folder / "adapter_model.safetensors").unlink()
        (folder / "adapter_model.safetensors").symlink_to(other / "adapter_model.safetensors")
        return chosen

    monkeypatch.setattr(shared_adapter, "adapter_files", replaced)
    assert error_of(trainer.load(folder), 400)["param"] == "lora_path"


def test_a_folder_replaced_by_a_link_while_it_is_loaded_is_read_as_it_was(
    trainer: LoadingTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_peft(tmp_path / "shared" / "globex" / "v1", seed=7)
    folder = trainer.save("v1", seed=1)
    expected = digest_in(folder, tmp_path)
    choose = shared_adapter.adapter_files

    def replaced(*arguments: Any) -> tuple[str, ...]:
        folder.rename(folder.with_name("moved"))
        folder.symlink_to(other)
        return choose(*arguments)

    monkeypatch.setattr(shared_adapter, "adapter_files", replaced)
    assert trainer.load(folder).is_success
    assert trainer.digest_that_answers() == expected


def test_the_server_shows_what_trl_chooses_adapter_sync_by(trainer: LoadingTrainer) -> None:
    gateway = trainer.gateway
    told = gateway.request(
        "GET", "/server_info", trainer.key, params={"config_format": "json"}
    ).json()["vllm_config"]
    assert told["lora_config"] == {
        "max_lora_rank": LIMITS.max_rank,
        "max_loras": push_pipeline.MOST_OF_TENANT,
    }
    assert told["parallel_config"]["data_parallel_size"] == 1
    assert told["model_config"]["max_model_len"] == 4096
    assert told["weight_transfer_config"] is None
    gateway.catalog.limit_tenant("acme", max_rank=2, actor="test")

    def max_rank() -> int:
        answer = gateway.request("GET", "/server_info", trainer.key).json()
        rank: int = answer["vllm_config"]["lora_config"]["max_lora_rank"]
        return rank

    assert eventually(lambda: max_rank() == 2)


def test_pauses_and_resets_succeed_and_stop_nothing(trainer: LoadingTrainer) -> None:
    for path in NO_OPS:
        query = {"mode": "keep"} if path == "/pause" else {}
        answer = trainer.gateway.request("POST", path, trainer.key, params=query)
        assert (answer.status_code, answer.json()["success"]) == (200, True)
        assert trainer.gateway.post("/v1/chat/completions", chat()).is_success
    asked = trainer.gateway.request("GET", "/is_paused", trainer.key)
    assert asked.json() == {"is_paused": False}


@pytest.mark.parametrize("path", REFUSED)
def test_an_update_of_base_weights_is_refused_by_name(trainer: LoadingTrainer, path: str) -> None:
    answer = trainer.gateway.request("POST", path, trainer.key, json={"update_info": {}})
    error = error_of(answer, 400)
    assert error["code"] == "unsupported_parameter"
    assert error["message"].startswith(f"{path} is not served")


def test_one_url_has_a_key_for_loads_and_another_for_the_rest(trainer: LoadingTrainer) -> None:
    gateway = trainer.gateway
    host = gateway.url.removeprefix("http://")
    url = f"http://{trainer.key}:{gateway.keys['acme']}@{host}"
    body = {"lora_name": "policy-v1", "lora_path": str(trainer.save("v1"))}
    assert httpx.post(url + LOAD, json=body, timeout=60).is_success
    answer = httpx.post(url + "/v1/chat/completions", json=chat("policy-v1"), timeout=60)
    assert answer.is_success
    swapped = f"http://{gateway.keys['acme']}:{trainer.key}@{host}"
    assert error_of(httpx.post(swapped + LOAD, json=body), 403)
    assert error_of(httpx.post(swapped + "/v1/chat/completions", json=chat()), 403)
    alone = f"http://any:{trainer.key}@{host}"
    assert httpx.post(alone + LOAD, json=body, timeout=60).is_success


def test_without_the_setting_there_are_no_such_endpoints(own_gateway: Gateway) -> None:
    _, key = own_gateway.catalog.create_key("acme", {Scope.PUBLISH}, adapters=("*",), actor="test")
    for path in (LOAD, UNLOAD, *PATHS):
        method = "GET" if path in QUESTIONS else "POST"
        answer = own_gateway.request(method, path, key, json={})
        assert error_of(answer, 404)["code"] == "not_found"


def test_equal_adapters_in_a_folder_and_in_a_push_are_one_version(
    trainer: LoadingTrainer,
) -> None:
    blob = trainer.blob(seed=1)
    assert trainer.load(trainer.save("v1", seed=1)).is_success
    assert trainer.digest_that_answers() == digest_of(blob)
    assert trainer.push(blob, name="policy-v1", wait="durable").is_success
    assert trainer.digest_that_answers() == digest_of(blob)
