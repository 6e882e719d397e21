"""why: a request's outcome, stages and attempts, as text and as JSON."""

import json
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import pytest

from lorikeet.catalog.records import Scope
from lorikeet.catalog.store.local import LocalStore
from lorikeet.protocol.messages import (
    AnswerHeader,
    Attempt,
    Candidate,
    Cost,
    EncodedCall,
    FinalUsage,
    Refusal,
    StreamItem,
)
from lorikeet.protocol.status_update import StatusUpdate
from lorikeet_engine.adapter import Composition, Residency
from lorikeet_engine.adapter_format import write_blob
from lorikeet_engine.request import DraftCounts, DraftSource, EngineTimings, MemberLoad
from lorikeet_engine.telemetry.status import LiveStats
from tests.cli.conftest import Lorikeet, new_catalog, serving
from tests.cli.peft_folders import peft_folder

WEIGHED = (
    Candidate("r7", Residency.GPU, Cost(0.010, 0.002, 0.0, 0.001, 0.0)),
    Candidate("r3", Residency.GPU, Cost(0.010, 0.040, 0.0, 0.001, 0.0)),
)

COURSE = EngineTimings(
    queued_s=0.5,
    prefill_s=0.25,
    decode_s=1.0,
    drafts=(DraftCounts(DraftSource.LOOKUP, 18, 12), DraftCounts(DraftSource.ANSWERS, 2, 1)),
)


async def told(base_model: str, encoded: EncodedCall) -> AsyncGenerator[StreamItem, None]:
    yield Attempt(encoded.call.request_id, "r3", 0.001, WEIGHED[::-1], "the replica was lost")
    yield Attempt(f"{encoded.call.request_id}-1", "r7", 0.001, WEIGHED[::-1])
    yield AnswerHeader(
        "r7", None, None, StatusUpdate(1, LiveStats(decoding=5, prefilling=1, waiting=1))
    )
    yield FinalUsage(12, 8, 34, (COURSE,))
    yield b"{}"


async def refused(base_model: str, encoded: EncodedCall) -> AsyncGenerator[StreamItem, None]:
    yield Attempt(encoded.call.request_id, "r7", 0.001, WEIGHED)
    yield Refusal("overloaded", "no")


def send(lorikeet: Lorikeet, **body: object) -> str:
    _, key = lorikeet.catalog.create_key("acme", {Scope.INFER}, actor="test")
    answer = httpx.post(
        f"{lorikeet.url}/v1/completions",
        headers={"authorization": f"Bearer {key}"},
        json={"model": "tiny", "prompt": "hello", **body},
    )
    return answer.headers["x-request-id"]


def test_the_stages_of_a_push_are_shown(lorikeet: Lorikeet, tmp_path: Path) -> None:
    _, key = lorikeet.catalog.create_key(
        "acme", {Scope.PUBLISH}, actor="test", adapters=("policy",)
    )
    digest = write_blob(peft_folder(tmp_path / "policy"), tmp_path / "blob")
    pushed = httpx.put(
        f"{lorikeet.url}/v1/adapters/policy/versions/{digest}",
        headers={"authorization": f"Bearer {key}"},
        content=(tmp_path / "blob").read_bytes(),
    )
    said = lorikeet.do("why", pushed.headers["x-request-id"])
    for stage in (
        "body received",
        "checked",
        "delivered to all replicas",
        "announced to all gateways",
    ):
        assert f"\n {stage} " in said
    assert "Tokens" not in said


@pytest.mark.parametrize("prefix", ["chatcmpl-", "cmpl-", "resp_", "msg_", ""])
def test_a_request_is_found_by_its_answers_id(
    prefix: str, lorikeet: Lorikeet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lorikeet.engines, "stream_answer", told)
    assert lorikeet.do("why", f"{prefix}{send(lorikeet)}").startswith("POST /v1/completions")


def test_a_requests_outcome_stages_and_attempts_are_shown(
    lorikeet: Lorikeet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lorikeet.engines, "stream_answer", told)
    said = lorikeet.do("why", f"cmpl-{send(lorikeet)}-1")
    lines = said.splitlines()
    assert lines[0] == "POST /v1/completions"
    assert any(line.startswith("Finished after ") for line in lines)
    assert "On r7, beside 5 running and 2 waiting requests" in lines
    assert "Tokens: 12 in, 8 of them cached, 34 out; 0 preemptions" in lines
    assert "Drafted tokens: 20, 13 of them accepted (lookup 12 of 18, answers 1 of 2)" in lines
    (queued,) = [line for line in lines if "waited in the engine's queue" in line]
    assert queued.split()[5] == "500.0"
    assert "█" in queued
    assert "Attempt 1 went to r3, which failed: the replica was lost" in said
    assert "Attempt 2 went to r7, as the best was full or did not answer" in said
    assert ["r7", "13.0", "10.0", "2.0", "0.0", "1.0", "0.0"] in [line.split() for line in lines]


def test_the_base_models_weight_format_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = peft_folder(tmp_path / "peft")
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "unsloth/Tiny-bnb-4bit"
    (folder / "adapter_config.json").write_text(json.dumps(config))
    store = LocalStore(tmp_path / "catalog")
    with serving(*new_catalog(store), quantization="awq") as lorikeet:
        monkeypatch.setattr(lorikeet.engines, "stream_answer", told)
        lorikeet.do("register", str(folder), "acme/quantised")
        said = lorikeet.do("why", send(lorikeet, model="acme/quantised")).splitlines()
    assert "Base model tiny, weights awq" in said
    assert any("Note that it was trained on unsloth/Tiny-bnb-4bit" in line for line in said)


async def added_up(base_model: str, encoded: EncodedCall) -> AsyncGenerator[StreamItem, None]:
    adapter = encoded.call.adapter
    assert isinstance(adapter, Composition)
    yield AnswerHeader("r7", adapter.digest, Residency.DISK)
    yield AnswerHeader("r7", adapter.digest, Residency.DISK, load_s=0.25)
    loads = (MemberLoad(Residency.GPU, 0.0), MemberLoad(Residency.DISK, 0.25))
    yield FinalUsage(12, 8, 34, (EngineTimings(queued_s=0.5, load_s=0.25, members=loads),))
    yield b"{}"


def test_each_adapter_of_several_is_shown_with_its_weight_and_wait(
    lorikeet: Lorikeet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lorikeet.engines, "stream_answer", added_up)
    for seed, name in enumerate(("tone", "domain")):
        lorikeet.do("register", str(peft_folder(tmp_path / name, seed=seed)), f"acme/{name}")
    adapters = [{"name": "tone", "weight": -0.5}, {"name": "domain"}]
    said = lorikeet.do("why", send(lorikeet, adapters=adapters)).splitlines()
    assert "Asked for tiny: 2 adapters added up" in said
    told = [line.partition(", ") for line in said if " · acme/" in line]
    assert {begin for begin, _, _ in told} == {"  -0.5 · acme/tone@1", "  1 · acme/domain@1"}
    assert [end.partition(": ")[2] for _, _, end in told] == [
        "on tier gpu, waited 0.0 ms",
        "on tier disk, waited 250.0 ms",
    ]
    assert "Its farthest adapter was on tier disk when it came; it waited 250.0 ms for it" in said


def test_a_refusal_names_its_code(lorikeet: Lorikeet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lorikeet.engines, "stream_answer", refused)
    assert "Refused (overloaded) after" in lorikeet.do("why", send(lorikeet))
    request_id = send(lorikeet, model="[red]no/such[/red]")
    said = lorikeet.do("why", request_id)
    assert "Asked for [red]no/such[/red]" in said
    assert "Refused (model_not_found" in said


def test_json_is_the_whole_answer(lorikeet: Lorikeet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lorikeet.engines, "stream_answer", told)
    request_id = send(lorikeet)
    said = json.loads(lorikeet.do("why", request_id, "--json"))
    assert (said["id"], said["outcome"], len(said["attempts"])) == (request_id, "finished", 2)


def test_an_unknown_request_names_how_long_requests_are_kept(lorikeet: Lorikeet) -> None:
    result = lorikeet.run("why", "0" * 32)
    assert result.exit_code == 1
    assert "more than an hour ago" in " ".join(result.stderr.split())


@pytest.mark.parametrize("request_id", ["../keys", "a/b", "é", "a?b"])
def test_an_id_cannot_lead_to_another_route(lorikeet: Lorikeet, request_id: str) -> None:
    assert lorikeet.run("why", request_id).exit_code == 2
