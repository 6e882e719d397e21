"""Defaults of sampling fields from a base model's generation_config.json."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lorikeet.client import Client
from lorikeet.errors import InvalidSetting
from lorikeet.gateway.sampling_defaults import read_sampling_defaults
from lorikeet.gateway.services import ServedModel, read_base_models
from lorikeet.settings import Settings
from tests.gateway.conftest import SHAPE, Gateway, chat, repeat, serving
from tests.gateway.scripted_replica import ScriptedReplica

QWEN = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
DEMO = Path("demo/model")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    served = {
        "tiny": ServedModel(SHAPE, ("org/Tiny-1B",), sampling_defaults=QWEN),
        "plain": ServedModel(SHAPE),
    }
    folder = tmp_path_factory.mktemp("defaults")
    with serving(folder, responses_lifetime_s=60, served=served) as running:
        yield running


def sampled(gateway: Gateway, path: str, body: dict[str, Any]) -> dict[str, float]:
    """Return the sampling with which a replica got a request."""
    answer = gateway.post(path, body)
    assert answer.status_code == 200, answer.text
    sampling = gateway.engines.last.sampling
    return {name: getattr(sampling, name) for name in QWEN}


ENDPOINTS = {
    "/v1/chat/completions": chat(),
    "/v1/completions": {"model": "acme/support", "prompt": "hello there"},
    "/v1/responses": {"model": "acme/support", "input": "hello there"},
    "/v1/messages": chat(max_tokens=8),
}


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("model", ["tiny", "acme/support"])
def test_fields_that_a_request_leaves_out_are_the_base_models(
    gateway: Gateway, path: str, model: str
) -> None:
    assert sampled(gateway, path, {**ENDPOINTS[path], "model": model}) == QWEN


@pytest.mark.parametrize("path", ENDPOINTS)
def test_fields_of_a_request_win_even_with_the_apis_default(gateway: Gateway, path: str) -> None:
    body = {**ENDPOINTS[path], "temperature": 1, "top_p": 1}
    assert sampled(gateway, path, body) == {**QWEN, "temperature": 1, "top_p": 1}
    assert sampled(gateway, path, {**ENDPOINTS[path], "temperature": 0})["temperature"] == 0


def test_null_leaves_a_field_out(gateway: Gateway) -> None:
    assert sampled(gateway, "/v1/chat/completions", chat(temperature=None)) == QWEN


def test_minus_one_switches_top_k_off(gateway: Gateway) -> None:
    assert sampled(gateway, "/v1/chat/completions", chat(top_k=-1))["top_k"] == 0


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_base_model_without_defaults_has_the_apis(gateway: Gateway, path: str) -> None:
    neutral = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    assert sampled(gateway, path, {**ENDPOINTS[path], "model": "plain"}) == neutral


def test_a_response_repeats_the_values_that_were_used(gateway: Gateway) -> None:
    answer = gateway.post("/v1/responses", ENDPOINTS["/v1/responses"]).json()
    assert (answer["temperature"], answer["top_p"]) == (0.6, 0.95)


def test_a_model_shows_its_defaults(gateway: Gateway) -> None:
    def shown(model: str) -> dict[str, Any]:
        entry: dict[str, Any] = gateway.request(
            "GET", f"/v1/models/{model}", gateway.keys["acme"]
        ).json()
        return entry

    assert shown("tiny")["sampling_defaults"] == QWEN
    assert shown("acme/support")["sampling_defaults"] == QWEN
    assert "sampling_defaults" not in shown("plain")


def write(folder: Path, values: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_only_sampling_fields_of_the_file_are_read(tmp_path: Path) -> None:
    others = {"do_sample": False, "max_new_tokens": 9, "eos_token_id": [1, 2], "top_k": None}
    assert read_sampling_defaults(write(tmp_path, QWEN | others | {"top_k": 7})) == {
        **QWEN,
        "top_k": 7,
    }
    assert read_sampling_defaults(write(tmp_path, others)) == {}
    assert read_sampling_defaults(tmp_path / "without") == {}


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": "0.9"}, "top_p"),
        ({"top_k": 2.5}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ([], "the file"),
    ],
)
def test_a_value_that_no_request_could_have_stops_the_start(
    tmp_path: Path, value: Any, name: str
) -> None:
    with pytest.raises(InvalidSetting, match=rf"generation_config.json: {name}: .*=none"):
        read_sampling_defaults(write(tmp_path, value))


def test_the_setting_leaves_out_the_defaults_of_some_base_models(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((DEMO / name).read_bytes())
    write(tmp_path, QWEN)
    folders = {"a": tmp_path, "b": tmp_path}
    served = read_base_models(Settings(base_models=folders, generation_config="b=none"))
    assert served["a"].sampling_defaults == QWEN
    assert served["b"].sampling_defaults == {}
    everywhere = read_base_models(Settings(base_models=folders, generation_config="none"))
    assert not any(each.sampling_defaults for each in everywhere.values())


def test_a_trainers_samples_are_of_the_whole_distribution(gateway: Gateway, tmp_path: Path) -> None:
    replica = ScriptedReplica(tmp_path)
    gateway.engines.replay = replica.writes("fine<|eos|>")
    try:
        Client(gateway.url, gateway.keys["acme"]).sample("tiny", (5, 6), top_p=0.5, max_tokens=8)
    finally:
        gateway.engines.replay = repeat
    sampling = gateway.engines.last.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 0.5, 0)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.0, 1.0)
