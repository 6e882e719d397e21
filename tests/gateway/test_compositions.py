"""Requests that name several adapters: how they are named, who may name them, what is told."""

from collections.abc import Iterator
from typing import Any

import pytest

from lorikeet.catalog.records import Scope
from lorikeet.protocol.messages import AnswerHeader, Call, FinalUsage
from lorikeet_engine.adapter import Composition, Residency
from lorikeet_engine.request import EngineTimings, MemberLoad
from tests.gateway.conftest import (
    WIDER,
    Gateway,
    Items,
    ReplayEngines,
    chat,
    make_blob,
    repeat,
    serving,
)
from tests.gateway.test_bad_requests import error_of
from tests.gateway.test_why import ask
from tests.waiting import eventually

CHAT = "/v1/chat/completions"
APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, chat()),
    "completions": ("/v1/completions", {"prompt": "hello there"}),
    "responses": ("/v1/responses", {"input": "hello there"}),
    "messages": ("/v1/messages", chat(max_tokens=9)),
}


@pytest.fixture(scope="module")
def _serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with serving(tmp_path_factory.mktemp("compositions")) as running:
        for seed, name in enumerate(("acme/tone", "acme/domain", "globex/own"), 1):
            running.register(name, seed)
        running.register("globex/lent", 4, shared=True)
        words = {"base_model_name_or_path": "org/Wider-2B"}
        wide = make_blob(running.folder / "wide", config=words, width=WIDER.hidden)
        assert running.upload("acme/wide", wide).is_success
        yield running


@pytest.fixture
def gateway(_serving: Gateway) -> Gateway:
    vars(_serving.engines).update(vars(ReplayEngines()))
    return _serving


def composed(call: Call) -> dict[str, float]:
    """Weights of a call's adapters by their names."""
    assert isinstance(call.adapter, Composition)
    pairs = zip(call.adapter.members, call.adapter.weights, strict=True)
    return {f"{ref.tenant}/{ref.name}@{ref.version}": weight for ref, weight in pairs}


@pytest.mark.parametrize("api", APIS)
def test_every_api_takes_names_joined_by_plus(gateway: Gateway, api: str) -> None:
    path, body = APIS[api]
    answer = gateway.post(path, body | {"model": "acme/tone+domain@prod+acme/support@1"})
    assert answer.is_success, answer.text
    call = gateway.engines.last
    assert composed(call) == {"acme/tone@1": 1, "acme/domain@1": 1, "acme/support@1": 1}
    assert call.model == answer.json()["model"] == "acme/tone+domain@prod+acme/support@1"
    assert call.adapter is not None
    assert answer.headers["x-lorikeet-adapter-digest"] == call.adapter.digest


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_adapters_have_weights(gateway: Gateway, api: str) -> None:
    path, body = APIS[api]
    adapters = [{"name": "acme/tone", "weight": 0.6}, {"name": "domain", "weight": -2}]
    answer = gateway.post(path, body | {"model": "tiny", "adapters": adapters})
    assert answer.is_success, answer.text
    assert composed(gateway.engines.last) == {"acme/tone@1": 0.6, "acme/domain@1": -2}
    told = {each["name"]: each["weight"] for each in answer.json()["adapters"]}
    assert told == {"acme/tone": 0.6, "acme/domain": -2}
    assert all(each["version"] == 1 and each["digest"] for each in answer.json()["adapters"])


def test_ranks_and_sizes_add_up(gateway: Gateway) -> None:
    gateway.post(CHAT, chat("acme/tone"))
    one = gateway.engines.last_work
    gateway.post(CHAT, chat("acme/tone+acme/domain"))
    both = gateway.engines.last_work
    assert (both.rank, both.adapter_bytes) == (2 * one.rank, 2 * one.adapter_bytes)


def test_one_adapter_of_weight_1_is_the_adapter_itself(gateway: Gateway) -> None:
    gateway.post(CHAT, chat("tiny", adapters=[{"name": "acme/tone"}]))
    alone = gateway.engines.last.adapter
    gateway.post(CHAT, chat("acme/tone"))
    assert alone == gateway.engines.last.adapter
    gateway.post(CHAT, chat("tiny", adapters=[{"name": "acme/tone", "weight": 0.5}]))
    assert composed(gateway.engines.last) == {"acme/tone@1": 0.5}


def test_shared_adapters_compose_with_own_ones(gateway: Gateway) -> None:
    answer = gateway.post(CHAT, chat("acme/tone+globex/lent"))
    assert answer.is_success, answer.text
    assert composed(gateway.engines.last) == {"acme/tone@1": 1, "globex/lent@1": 1}


@pytest.mark.parametrize("other", ["globex/own", "acme/nothing", "acme/tone@9"])
def test_an_adapter_that_may_not_be_named_is_refused_by_name(gateway: Gateway, other: str) -> None:
    error = error_of(gateway.post(CHAT, chat(f"acme/domain+{other}")), 404)
    assert error["code"] == "model_not_found"
    assert f"'{other}'" in error["message"]
    assert not gateway.engines.calls


@pytest.mark.parametrize("api", APIS)
def test_a_key_uses_and_sees_only_its_adapters(gateway: Gateway, api: str) -> None:
    path, body = APIS[api]
    patterns = ("to*", "globex/lent")
    record, key = gateway.catalog.create_key("acme", {Scope.INFER}, adapters=patterns, actor="test")
    assert record.adapters == patterns

    def status(model: str) -> int:
        return gateway.request("POST", path, key, json=body | {"model": model}).status_code

    allowed = ["tone", "acme/tone@1", "globex/lent@prod", "acme/tone+globex/lent"]
    assert [status(model) for model in allowed] == [200] * 4
    hidden = ["domain", "acme/tone+domain", "globex/own", "acme/support@1", "tiny", "wider"]
    assert [status(model) for model in hidden] == [404] * 6
    assert [each["id"] for each in gateway.request("GET", "/v1/models", key).json()["data"]] == [
        "acme/tone",
        "globex/lent",
    ]


NINE = "+".join(f"acme/a{i}" for i in range(9))
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "too many names": (chat(NINE), "model", "2 to 8 adapters"),
    "an empty name": (chat("acme/tone++acme/domain"), "model", "joined by +"),
    "one twice": (chat("acme/tone+tone"), "model", "name each adapter once"),
    "one by two aliases": (chat("acme/tone+tone@1"), "model", "name each adapter once"),
    "a base model": (chat("tiny+acme/tone"), "model", "'tiny' is a base model"),
    "other base models": (chat("acme/tone+acme/wide"), "model", "compose adapters of one base"),
    "adapters beside an adapter": (
        chat("acme/tone", adapters=[{"name": "acme/domain"}]),
        "model",
        "the name of their base model",
    ),
    "adapters of another base model": (
        chat("wider", adapters=[{"name": "acme/domain", "weight": 2}]),
        "model",
        "needs the base model 'tiny'",
    ),
    "one adapter of another base model": (
        chat("wider", adapters=[{"name": "acme/domain"}]),
        "model",
        "needs the base model 'tiny'",
    ),
    "no adapters": (chat("tiny", adapters=[]), "adapters", "at least 1"),
    "a large weight": (
        chat("tiny", adapters=[{"name": "acme/tone", "weight": 2.1}]),
        "adapters[0].weight",
        "2",
    ),
    "a sum in adapters": (
        chat("tiny", adapters=[{"name": "acme/tone+acme/domain"}]),
        "adapters[0].name",
        "",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_faults_are_refused_by_field(gateway: Gateway, fault: str) -> None:
    body, param, said = REFUSED[fault]
    error = error_of(gateway.post(CHAT, body), 400)
    assert error["param"] == param
    assert said in error["message"]
    assert not gateway.engines.calls


def test_adapters_whose_base_model_is_not_served_are_refused_by_its_name(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(gateway.base_models, "tiny")
    answer = gateway.post(CHAT, chat("acme/tone+acme/domain"))
    assert "'tiny', which is not served now" in error_of(answer, 503)["message"]
    assert not gateway.engines.calls


def test_compositions_are_no_models(gateway: Gateway) -> None:
    listed = gateway.request("GET", "/v1/models", gateway.keys["acme"]).json()["data"]
    assert not any("+" in entry["id"] for entry in listed)
    at = "/v1/models/acme/tone+acme/domain"
    assert gateway.request("GET", at, gateway.keys["acme"]).status_code == 404


LOADS = (MemberLoad(Residency.GPU, 0.0), MemberLoad(Residency.DISK, 0.25))


async def loaded(call: Call) -> Items:
    """Replay an answer whose second adapter was loaded."""
    assert call.adapter is not None
    yield AnswerHeader("replica-7", call.adapter.digest, Residency.DISK)
    yield AnswerHeader("replica-7", call.adapter.digest, Residency.DISK, load_s=0.25)
    async for item in repeat(call):
        if isinstance(item, bytes):
            yield FinalUsage(1, 0, 1, (EngineTimings(queued_s=0.3, load_s=0.25, members=LOADS),))
            yield item


def test_why_tells_what_each_adapter_waited_for(gateway: Gateway) -> None:
    gateway.engines.replay = loaded
    answer = gateway.post(CHAT, chat("tiny", adapters=[{"name": "tone"}, {"name": "domain"}]))
    call, request_id = gateway.engines.last, answer.headers["x-request-id"]
    assert isinstance(call.adapter, Composition)
    assert eventually(lambda: ask(gateway, request_id)["outcome"] == "finished")
    for tenant in (None, "acme"):
        found = ask(gateway, request_id, tenant)
        assert found["adapter"] == "+".join(map(str, call.adapter.members))
        assert found["digest"] == call.adapter.digest
        told = [(a["adapter"], a["residency"], a["load_ms"]) for a in found["adapters"]]
        first, second = map(str, call.adapter.members)
        assert told == [(first, "gpu", 0.0), (second, "disk", 250.0)]
    assert ask(gateway, gateway.post(CHAT, chat()).headers["x-request-id"])["adapters"] is None
