"""Trainers push versions with publish keys, each completely or not at all."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from lorikeet.catalog.catalog import blob_key
from lorikeet.catalog.store.local import LocalStore
from lorikeet.gateway.pushing import routes
from lorikeet.usage.object_format import PREFIX, from_json
from lorikeet_engine.adapter_format import values
from tests.gateway.conftest import WIDER, Gateway, chat, demo_encoder, serving
from tests.gateway.test_bad_requests import error_of
from tests.gateway.trainer import Trainer, digest_of
from tests.waiting import eventually


@pytest.fixture
def trainer(gateway: Gateway) -> Trainer:
    return Trainer(gateway)


def test_a_pushed_version_answers_by_its_digest(trainer: Trainer) -> None:
    blob = trainer.blob()
    pushed = trainer.push(blob, wait="durable")
    assert pushed.status_code == 201
    version = pushed.json()
    assert version["model"] == f"acme/policy@{digest_of(blob)}"
    assert (version["version"], version["durable"], version["aliases"]) == (1, True, ["prod"])
    assert trainer.gateway.catalog.store.get(blob_key(digest_of(blob))) == blob
    answer = trainer.gateway.post("/v1/chat/completions", chat(version["model"]))
    assert answer.headers["x-lorikeet-adapter-digest"] == digest_of(blob)
    assert trainer.show(digest_of(blob)).json() == version


@pytest.mark.parametrize("way", ["register", "push"])
def test_a_replica_learns_an_activated_loras_invocation_with_the_request(
    trainer: Trainer, way: str
) -> None:
    gateway = trainer.gateway
    gateway.register("acme/support")
    gateway.post("/v1/chat/completions", chat()).raise_for_status()
    tokens = list(gateway.engines.encoded[-1].prompts[0][-2:])
    for invocation in (tokens, [*tokens, tokens[0]]):
        blob = trainer.blob(config={"alora_invocation_tokens": invocation})
        if way == "push":
            model = trainer.push(blob, wait="ready").json()["model"]
        else:
            version = gateway.upload("acme/policy", blob).raise_for_status().json()
            assert version["invocation_tokens"] == invocation
            model = f"acme/policy@{version['version']}"
        answer = gateway.post("/v1/chat/completions", chat(model)).raise_for_status()
        adapter = gateway.engines.last.adapter
        assert adapter is not None
        assert adapter.invocation_tokens == tuple(invocation)
        why = gateway.admin("GET", f"/requests/{answer.headers['x-request-id']}").json()
        assert why["invoked"] == (invocation == tokens)
    answer = gateway.post("/v1/chat/completions", chat())
    why = gateway.admin("GET", f"/requests/{answer.headers['x-request-id']}").json()
    assert why["invoked"] is None


def test_a_version_that_is_ready_is_listed_before_it_is_durable(trainer: Trainer) -> None:
    gateway = trainer.gateway
    before = gateway.catalog.reader.refresh().seq
    trainer.push(trainer.blob(), alias="prod", lifetime_s=60)
    listed = gateway.request("GET", "/v1/models", gateway.keys["acme"]).json()["data"]
    assert "acme/policy" in [model["id"] for model in listed]
    for model in ("policy", f"policy@{digest_of(trainer.blob())}"):  # of the key's own tenant
        answer = gateway.post("/v1/chat/completions", chat(model)).raise_for_status()
        assert answer.headers["x-lorikeet-adapter-digest"] == digest_of(trainer.blob())
    assert gateway.catalog.reader.refresh().seq == before


def test_the_same_push_again_changes_nothing(trainer: Trainer) -> None:
    blob = trainer.blob()
    first = trainer.push(blob, wait="durable")
    before = trainer.gateway.catalog.reader.refresh().seq
    again = trainer.push(blob, wait="durable")
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json()
    assert trainer.gateway.catalog.reader.refresh().seq == before


def test_an_alias_moves_with_a_push(trainer: Trainer) -> None:
    first, second, third = (trainer.blob(seed) for seed in (1, 2, 3))
    trainer.push(first, wait="durable")
    assert trainer.push(second, wait="durable").json()["aliases"] == []
    assert trainer.push(third, wait="durable", alias="canary").json()["aliases"] == ["canary"]
    moved = trainer.push(second, wait="durable", alias="prod").json()
    assert (moved["version"], moved["aliases"]) == (2, ["prod"])


def test_a_push_takes_over_the_request_defaults_of_a_version(trainer: Trainer) -> None:
    gateway, template = trainer.gateway, "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    first, second, third = (trainer.blob(seed) for seed in (1, 2, 3))
    trainer.push(first, wait="durable")
    body = {"digest": digest_of(first), "defaults": {"chat_template": template}}
    own = gateway.admin("POST", "/adapters/acme/policy/versions", body).json()
    assert (own["version"], own["aliases"]) == (2, [])
    pushed = trainer.push(second, defaults_of="2", alias="prod", wait="durable").json()
    passing = trainer.push(third, defaults_of="prod", alias="trial", lifetime_s=60).json()
    assert (pushed["version"], passing["ready"]) == (3, True)
    for model, shown in ((pushed["model"], True), ("policy@trial", True), ("policy@1", False)):
        gateway.post("/v1/chat/completions", chat(model, "hello")).raise_for_status()
        (ids,) = gateway.engines.encoded[-1].prompts
        assert (demo_encoder().backend.decode(list(ids)) == "[hello]") is shown
    again = trainer.push(second, defaults_of="3", wait="durable")
    assert (again.status_code, again.json()["version"]) == (200, 3)
    assert trainer.push(second, wait="durable").json()["version"] == 4


@pytest.mark.parametrize("selector", ["none", "7", "A!"])
def test_request_defaults_of_no_version_are_refused(trainer: Trainer, selector: str) -> None:
    error = error_of(trainer.push(trainer.blob(), defaults_of=selector), 400)
    assert error["param"] in ("defaults_of", "selector")


def test_request_defaults_of_another_base_model_are_refused(trainer: Trainer) -> None:
    trainer.push(trainer.blob(), wait="durable")
    config = {"base_model_name_or_path": "org/Wider-2B"}
    other = trainer.blob(seed=2, config=config, width=WIDER.hidden)
    error = error_of(trainer.push(other, defaults_of="1"), 422)
    assert error["param"] == "defaults_of"


def test_the_log_names_the_key_of_a_push_and_the_push_can_be_explained(trainer: Trainer) -> None:
    blob = trainer.blob()
    pushed = trainer.push(blob, wait="durable")
    (entry, *_) = trainer.gateway.admin("GET", "/log").json()["data"]
    assert (entry["actor"], entry["changes"][0]["digest"]) == (trainer.key_id, digest_of(blob))
    told = trainer.gateway.admin("GET", f"/requests/{pushed.headers['x-request-id']}").json()
    assert told["request"] == "PUT /v1/adapters/{name}/versions/{digest}"
    assert (told["key_id"], told["model"]) == (trainer.key_id, pushed.json()["model"])
    assert told["outcome"] == "finished"
    stages = {each["stage"]: each["ms"] for each in told["stages"]}
    assert list(stages) == ["receive", "check", "deliver", "announce", "rest"]
    assert min(stages.values()) >= 0
    assert sum(stages.values()) == pytest.approx(told["total_ms"], abs=0.01)
    again = trainer.push(blob, wait="durable").headers["x-request-id"]
    retold = trainer.gateway.admin("GET", f"/requests/{again}").json()["stages"]
    assert all(each["ms"] >= 0 for each in retold)


def test_only_the_gateways_log_names_the_key_of_an_ephemeral_push(
    trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lorikeet.gateway.pushing")
    durable, passing = trainer.blob(seed=1), trainer.blob(seed=2)
    trainer.push(durable, wait="durable")
    before = trainer.gateway.admin("GET", "/log").json()
    pushed = trainer.push(passing, alias="prod", lifetime_s=60)
    assert trainer.push(passing, digest="0" * 64, lifetime_s=60).status_code == 422
    assert trainer.gateway.admin("GET", "/log").json() == before
    (noted,) = [record for record in caplog.records if record.msg == "ephemeral_push"]
    told = {"key": trainer.key_id, "request_id": pushed.headers["x-request-id"]}
    told |= {"adapter": "acme/policy", "digest": digest_of(passing), "alias": "prod"}
    told |= {"expires": pushed.json()["expires"]}
    assert {name: getattr(noted, name) for name in told} == told


def test_usage_reports_have_all_pushes_except_refused_pushes(tmp_path: Path) -> None:
    with serving(tmp_path, usage_flush_s=0.05) as gateway:
        trainer, again = Trainer(gateway), 2
        blob = trainer.blob()
        for _ in range(again):
            assert trainer.push(blob, wait="durable").is_success
        assert trainer.push(blob, digest="0" * 64).status_code == 422

        def row() -> dict[str, Any]:
            reported = gateway.request("GET", "/v1/usage", gateway.keys["acme"]).json()["data"]
            rows: list[dict[str, Any]] = [row for row in reported if row["pushes"]]
            return rows[0] if rows else {"pushes": 0}

        eventually(lambda: row()["pushes"] == again)
        assert (row()["adapter"], row()["base_model"]) == ("acme/policy", "tiny")
        assert (row()["pushed_bytes"], row()["requests"]) == (again * len(blob), 0)


def test_a_gateways_usage_is_written_when_it_ends(tmp_path: Path) -> None:
    with serving(tmp_path) as gateway:
        trainer = Trainer(gateway)
        assert trainer.push(trainer.blob(), wait="durable").is_success
    store = LocalStore(tmp_path / "store")
    (written,) = [from_json(store.get(key), key) for key in store.list(PREFIX)]
    assert [counts.pushes for counts in written.use.values()] == [1]


def test_a_bad_adapter_says_why_and_changes_nothing(trainer: Trainer) -> None:
    before = trainer.gateway.catalog.reader.refresh().seq
    too_high = trainer.blob(rank=8)
    error = error_of(trainer.push(too_high), 422)
    assert error["code"] == "invalid_adapter"
    assert "rank" in error["message"]
    assert error_of(trainer.push(trainer.blob()[:-4]), 422)["code"] == "invalid_adapter"
    damaged = error_of(trainer.push(trainer.blob(), digest="0" * 64), 422)
    assert (damaged["code"], damaged["param"]) == ("invalid_adapter", "digest")
    assert trainer.gateway.catalog.reader.refresh().seq == before
    assert trainer.show("0" * 64).status_code == 404


def test_values_are_scanned_while_they_arrive_and_not_again(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> NoReturn:
        raise AssertionError("the file was read")

    monkeypatch.setattr(values, "_pieces", read)
    blob = trainer.blob()
    assert trainer.push(blob).status_code == 201
    path, key = "/admin/v1/adapters/acme/other/versions", trainer.gateway.admin_key
    assert trainer.gateway.request("PUT", path, key, content=blob).status_code == 201
    monkeypatch.undo()
    diverged = error_of(trainer.push(blob[:-4] + b"\xff\xff\xff\xff"), 422)
    assert diverged["message"].endswith("holds NaN or Inf: the training diverged")
    assert ".lora_" in diverged["param"]


def test_a_large_blob_is_announced_to_replicas_before_it_has_arrived(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, blob = trainer.gateway.engines.expected, trainer.blob()
    trainer.push(blob, base_model="tiny")
    assert told == []
    monkeypatch.setattr(routes, "_LARGE_BYTES", len(blob))

    def body() -> Iterator[bytes]:
        yield blob[:100]
        assert eventually(lambda: bool(told))
        yield blob[100:]

    length = {"content-length": str(len(blob))}
    pushed = trainer.push(body(), digest="0" * 64, headers=length, base_model="tiny")
    ((base_model, digest, file, size_bytes),) = told
    assert (base_model, digest, size_bytes) == ("tiny", "0" * 64, len(blob))
    assert error_of(pushed, 422)["param"] == "digest"
    assert not file.exists()  # the sign by which replicas know that the blob was refused


def test_a_blob_of_unknown_base_model_is_not_announced(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_LARGE_BYTES", 1)
    told = trainer.gateway.engines.expected
    trainer.push(trainer.blob())
    assert told == []
    monkeypatch.delitem(trainer.gateway.base_models, "wider")
    trainer.push(trainer.blob(2))
    assert [each[0] for each in told] == ["tiny"]


def test_a_key_pushes_only_adapters_with_its_names(trainer: Trainer, tmp_path: Path) -> None:
    before = trainer.gateway.catalog.reader.refresh().seq
    refused = error_of(trainer.push(trainer.blob(), name="support"), 403)
    assert refused["code"] == "forbidden"
    assert "policy*" in refused["message"]
    for key in (trainer.gateway.keys["acme"], trainer.gateway.admin_key):
        assert error_of(trainer.push(trainer.blob(), key=key), 403)["code"] == "forbidden"
    assert trainer.gateway.catalog.reader.refresh().seq == before


def test_pushes_and_their_bytes_are_limited_each_minute(trainer: Trainer) -> None:
    blob = trainer.blob()
    _, often = trainer.new_key(requests_per_min=1)
    assert trainer.push(blob, key=often).is_success
    assert error_of(trainer.push(blob, key=often), 429)["code"] == "rate_limit_exceeded"
    _, much = trainer.new_key(bytes_per_min=20 * len(blob), burst_s=1)
    assert eventually(
        lambda: trainer.push(blob, key=much).is_success
    )  # the bucket of a new gateway fills
    refused = trainer.push(blob, key=much)
    assert "bytes per minute" in error_of(refused, 429)["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 30


@pytest.mark.parametrize("limit", ["tokens_per_min", "tokens_per_month"])
def test_used_up_tokens_stop_answers_and_no_push(trainer: Trainer, limit: str) -> None:
    gateway = trainer.gateway
    gateway.admin("PATCH", "/tenants/acme", {limit: 1}).raise_for_status()

    def answer() -> int:
        return gateway.post("/v1/chat/completions", chat("acme/support")).status_code

    assert eventually(lambda: answer() == 429)
    blob = trainer.blob()
    assert trainer.push(blob, wait="durable").status_code == 201
    assert trainer.show(digest_of(blob)).status_code == 200
    assert answer() == 429


@pytest.mark.parametrize(
    ("query", "digest", "param"),
    [
        ({"alias": "7"}, None, "alias"),
        ({"alias": "Prod"}, None, "alias"),
        ({"base_model": "other"}, None, "base_model"),
        ({}, "0" * 63, "digest"),
        ({}, "A" * 64, "digest"),
    ],
)
def test_an_invalid_push_query_names_the_parameter(
    trainer: Trainer, query: dict[str, str], digest: str | None, param: str
) -> None:
    assert error_of(trainer.push(trainer.blob(), digest=digest, **query), 400)["param"] == param


def test_a_body_of_unknown_length_is_refused(trainer: Trainer) -> None:
    blob = trainer.blob()
    refused = trainer.push(iter([blob]), digest=digest_of(blob))
    assert error_of(refused, 400)["param"] == "content-length"
    length = {"content-length": str(len(blob))}
    streamed = trainer.push(iter([blob[:99], blob[99:]]), digest=digest_of(blob), headers=length)
    assert streamed.status_code == 201
