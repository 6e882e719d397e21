"""Requests to embed texts: OpenAI's shapes, dimensions, and what else is refused by name."""

import json
from array import array
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import OpenAI

from lorikeet.apis.pooling.answer import embedding
from lorikeet.gateway.services import ServedModel
from lorikeet_engine.adapter import Embedder, Head, Pooling
from lorikeet_engine.adapter_format import write_blob
from tests.gateway.conftest import SHAPE, Gateway, chat, demo_encoder, make_peft, serving
from tests.gateway.test_bad_requests import error_of
from tests.gateway.test_heads import head_blob, scoring

EMBEDDINGS = "/v1/embeddings"
STATE = (3.0, 0.0, -4.0, *[0.0] * (SHAPE.hidden - 3))
UNIT = (0.6, 0.0, -0.8)
PIPELINES: dict[str, dict[str, Any]] = {
    "mean": {"pooling_mode": "mean", "normalize": False},
    "nested": {"pooling_mode": "lasttoken", "matryoshka_dimensions": [2, 4]},
    "whole": {"pooling_mode": "lasttoken", "is_matryoshka": False},
}


def embedder_blob(folder: Path, pooling_mode: str, normalize: bool = True, **config: Any) -> bytes:
    """Make a blob of an adapter with the files of sentence-transformers."""
    make_peft(folder, seed=len(folder.name), config={"task_type": "FEATURE_EXTRACTION"})
    kinds = ["Transformer", "Pooling", *["Normalize"] * normalize]
    modules = [{"type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = json.dumps({"pooling_mode": pooling_mode})
    (folder / "1_Pooling" / "config.json").write_text(pooling)
    (folder / "config.json").write_text(json.dumps(config))
    write_blob(folder, folder / "blob")
    return (folder / "blob").read_bytes()


@pytest.fixture(scope="module")
def _serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("embedders")
    served = {"dense": ServedModel(SHAPE, embedder=None)}
    with serving(folder, served=served) as running:
        for name, pipeline in PIPELINES.items():
            answer = running.upload(f"acme/{name}", embedder_blob(folder / name, **pipeline))
            assert answer.is_success, answer.text
        answer = running.upload("acme/tone", head_blob(folder / "tone", 3))
        assert answer.is_success, answer.text
        yield running


@pytest.fixture
def gateway(_serving: Gateway) -> Gateway:
    _serving.engines.replay = scoring(*STATE)
    return _serving


def embedded(gateway: Gateway, **body: Any) -> list[float]:
    answer = gateway.post(EMBEDDINGS, {"model": "tiny", "input": "hello", **body})
    assert answer.is_success, answer.text
    found: list[float] = answer.json()["data"][0]["embedding"]
    return found


def test_texts_are_embedded_in_openais_shape(gateway: Gateway) -> None:
    answer = gateway.post(EMBEDDINGS, {"model": "acme/support", "input": ["hello there", "bye"]})
    assert answer.is_success, answer.text
    body = answer.json()
    assert body["object"] == "list"
    assert [(each["object"], each["index"]) for each in body["data"]] == [
        ("embedding", 0),
        ("embedding", 1),
    ]
    assert body["data"][0]["embedding"][:3] == pytest.approx(UNIT)
    tokens = sum(len(ids) for ids in gateway.engines.encoded[-1].prompts)
    usage = body["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] == tokens
    assert "completion_tokens" not in usage
    assert (body["model"], body["adapter"]["name"]) == ("acme/support", "acme/support")


def test_openais_client_reads_the_vectors(gateway: Gateway) -> None:
    client = OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.keys["acme"])
    for more in ({}, {"encoding_format": "float"}):
        found = client.embeddings.create(model="tiny", input=["a", "b"], dimensions=3, **more)
        assert [each.embedding for each in found.data] == [pytest.approx(UNIT)] * 2
    assert found.usage.total_tokens == found.usage.prompt_tokens > 0


def test_a_base_model_without_a_served_pipeline_refuses_to_embed(gateway: Gateway) -> None:
    error = error_of(gateway.post(EMBEDDINGS, {"model": "dense", "input": "hello"}), 400)
    assert error["param"] == "model"
    assert "modules.json in its base model's folder" in error["message"]


def test_base64_is_little_endian_float32(gateway: Gateway) -> None:
    body = {"model": "tiny", "input": "hello", "encoding_format": "base64"}
    (found,) = gateway.post(EMBEDDINGS, body).json()["data"]
    vector = np.frombuffer(b64decode(found["embedding"]), "<f4")
    assert vector.tolist() == embedded(gateway)


def test_cut_vectors_are_normalised_again(gateway: Gateway) -> None:
    assert embedded(gateway, dimensions=2) == [1.0, 0.0]
    assert embedded(gateway, dimensions=3) == pytest.approx(UNIT)
    assert embedded(gateway, dimensions=3, use_activation=False) == [3.0, 0.0, -4.0]
    assert embedded(gateway, dimensions=2, model="acme/mean") == [3.0, 0.0]


@pytest.mark.parametrize(
    ("model", "dimensions", "want"),
    [
        ("tiny", SHAPE.hidden + 1, f"want 1 to {SHAPE.hidden}"),
        ("acme/nested", 3, f"want 2, 4, {SHAPE.hidden}"),
        ("acme/whole", 4, f"want {SHAPE.hidden}"),
        ("acme/whole", 0, "greater than or equal to 1"),
    ],
)
def test_other_dimensions_are_refused_by_name(
    gateway: Gateway, model: str, dimensions: int, want: str
) -> None:
    body = {"model": model, "input": "hello", "dimensions": dimensions}
    error = error_of(gateway.post(EMBEDDINGS, body), 400)
    assert error["param"] == "dimensions"
    assert want in error["message"]
    assert len(embedded(gateway, model=model, dimensions=SHAPE.hidden)) == SHAPE.hidden


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("hello", ["hello"]),
        (["hello", "bye"], ["hello", "bye"]),
        ([5, 6, 3], [[5, 6, 3]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_texts_and_token_ids_are_taken(gateway: Gateway, text: Any, want: list[Any]) -> None:
    embedded(gateway, input=text)
    encoder = demo_encoder()
    ids = [
        list(encoder.encode_text(each, 4096, add_special_tokens=True))
        if isinstance(each, str)
        else each
        for each in want
    ]
    assert [list(prompt) for prompt in gateway.engines.encoded[-1].prompts] == ids


def test_padding_of_the_base_model_stays_for_embeddings(gateway: Gateway) -> None:
    embedded(gateway, input=[9, 8, 0, 0])
    assert [list(ids) for ids in gateway.engines.encoded[-1].prompts] == [[9, 8, 0, 0]]


def test_the_pooling_is_the_adapters_or_else_the_base_models(gateway: Gateway) -> None:
    for model, want in (("tiny", Embedder()), ("acme/mean", Embedder(Pooling.MEAN, False))):
        embedded(gateway, model=model)
        call = gateway.engines.encoded[-1].call
        assert call.embedder == want
    shown = gateway.admin("GET", "/adapters/acme/nested").json()["versions"][0]["embedder"]
    assert shown == {"pooling": "lasttoken", "normalizes": True, "dimensions": [2, 4]}


def test_added_adapters_must_agree_on_the_pooling(gateway: Gateway) -> None:
    error = error_of(gateway.post(EMBEDDINGS, {"model": "acme/mean+acme/whole", "input": "a"}), 400)
    assert "in different ways" in error["message"]


def test_a_model_with_a_head_does_not_embed(gateway: Gateway) -> None:
    error = error_of(gateway.post(EMBEDDINGS, {"model": "acme/tone", "input": "a"}), 400)
    assert "does not embed" in error["message"]


def test_thousands_of_texts_are_taken_and_too_many_values_refused(gateway: Gateway) -> None:
    body = {"model": "tiny", "input": ["a"] * 2048, "encoding_format": "base64"}
    answer = gateway.post(EMBEDDINGS, body)
    assert len(answer.json()["data"]) == 2048
    error = error_of(gateway.post(EMBEDDINGS, body | {"input": ["a"] * 2049}), 400)
    assert error["param"] == "input"
    assert "at most 2048 prompts" in error["message"]


@pytest.mark.parametrize(
    "body",
    [{}, {"input": []}, {"input": [[]]}, {"input": "a", "messages": chat()["messages"]}],
)
def test_a_bad_input_is_named(gateway: Gateway, body: dict[str, Any]) -> None:
    error = error_of(gateway.post(EMBEDDINGS, {"model": "tiny", **body}), 400)
    assert error["param"] in ("input", "messages")


def test_a_request_is_explained(gateway: Gateway) -> None:
    answer = gateway.post(EMBEDDINGS, {"model": "acme/mean", "input": "hello there"})
    request_id = answer.headers["x-request-id"]
    assert answer.json()["id"] == f"embd-{request_id}"
    why = gateway.request("GET", f"/v1/requests/{request_id}", gateway.keys["acme"]).json()
    assert (why["request"], why["model"]) == (f"POST {EMBEDDINGS}", "acme/mean")


def test_a_base_model_with_a_head_classifies_and_does_not_generate(tmp_path: Path) -> None:
    head = Head(("calm", "wild"))
    with serving(
        tmp_path, served={"tiny": ServedModel(SHAPE, ("org/Tiny-1B",), head=head)}
    ) as gateway:
        gateway.engines.replay = scoring(1.0, 3.0)
        body = {"model": "tiny", "input": "hello"}
        (found,) = gateway.post("/v1/classify", body).json()["data"]
        assert (found["label"], found["num_classes"]) == ("wild", 2)
        error = error_of(gateway.post("/v1/chat/completions", chat("tiny")), 400)
        assert "does not generate" in error["message"]
        assert "does not embed" in error_of(gateway.post(EMBEDDINGS, body), 400)["message"]


def test_a_vector_of_zeros_stays_so() -> None:
    zeros = array("f", [0.0] * 4)
    assert embedding(Embedder(), zeros, None, raw=False).tolist() == [0.0] * 4
