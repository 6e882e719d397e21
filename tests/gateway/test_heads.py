"""Adapters with a head: requests to classify, score and pool, and what else is refused by name."""

import json
from array import array
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lorikeet.apis.answer import Answer
from lorikeet.protocol.messages import Call
from lorikeet.text.prompts import encode_call
from lorikeet_engine.adapter import Problem
from lorikeet_engine.adapter_format import write_blob
from lorikeet_engine.request import FinishReason, Pooled, Tokens
from tests.gateway.conftest import (
    SHAPE,
    Gateway,
    Items,
    chat,
    demo_encoder,
    header,
    make_peft,
    serving,
)
from tests.gateway.test_bad_requests import error_of

CLASSIFY, SCORE, POOLING = "/v1/classify", "/v1/score", "/v1/pooling"
PATHS = (CLASSIFY, SCORE, POOLING)
TONES = ("calm", "warm", "wild")
SCORES = (0.25, -1.5, 2.0)


def softmax(scores: tuple[float, ...]) -> list[float]:
    """Return the probabilities of one label each that transformers' pipelines give."""
    from transformers.pipelines import text_classification  # imports torch

    return list(text_classification.softmax(np.array(scores)).tolist())


def sigmoid(scores: tuple[float, ...]) -> list[float]:
    """Return the probabilities of several labels that transformers' pipelines give."""
    from transformers.pipelines import text_classification  # imports torch

    return list(text_classification.sigmoid(np.array(scores)).tolist())


def head_blob(folder: Path, labels: int, config: dict[str, Any] | None = None) -> bytes:
    """Make a blob of an adapter with a head. config: content of config.json in its folder."""
    words = {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]}
    make_peft(folder, seed=labels, config=words)
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors["base_model.model.score.weight"] = np.ones((labels, SHAPE.hidden), np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    write_blob(folder, folder / "blob")
    return (folder / "blob").read_bytes()


def scoring(*scores: float) -> Callable[[Call], Items]:
    """Answer each call with these values of a head, as a replica does."""

    async def replay(call: Call) -> Items:
        encoder = demo_encoder()
        prompts = encode_call(call, encoder, 4096).prompts
        answer = Answer(call, prompts, encoder.vocabulary, encoder.syntax)
        yield header(call)
        for index in range(len(prompts)):
            made = Tokens(call.request_id, index, (7,), FinishReason.LENGTH)
            for item in answer.take([Pooled(call.request_id, index, array("f", scores)), made]):
                yield item

    return replay


@pytest.fixture(scope="module")
def _serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("heads")
    with serving(folder) as running:
        tones = {"id2label": dict(enumerate(TONES)), "pad_token_id": 3}
        several = tones | {"problem_type": "multi_label_classification"}
        for name, labels, config in (
            ("reward", 1, None),
            ("tone", 3, tones),
            ("tags", 3, several),
            ("price", 1, {"problem_type": "regression"}),
        ):
            blob = head_blob(folder / name, labels, config)
            answer = running.upload(f"acme/{name}", blob)
            assert answer.is_success, answer.text
        yield running


@pytest.fixture
def gateway(_serving: Gateway) -> Gateway:
    _serving.engines.replay = scoring(*SCORES)
    return _serving


def test_a_text_is_classified_in_vllms_shape(gateway: Gateway) -> None:
    answer = gateway.post(CLASSIFY, {"model": "acme/tone", "input": ["hello there", "bye"]})
    assert answer.is_success, answer.text
    body = answer.json()
    want = softmax(SCORES)
    assert [each["index"] for each in body["data"]] == [0, 1]
    for each in body["data"]:
        assert (each["label"], each["num_classes"]) == ("wild", 3)
        assert each["probs"] == pytest.approx(want)
    tokens = sum(len(ids) for ids in gateway.engines.encoded[-1].prompts)
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == tokens
    assert body["usage"]["completion_tokens"] == 0
    assert body["id"] == f"classify-{answer.headers['x-request-id']}"
    assert (body["object"], body["model"]) == ("list", "acme/tone")
    assert body["adapter"]["name"] == "acme/tone"


@pytest.mark.parametrize(
    ("model", "scores", "activation"),
    [("tags", SCORES, sigmoid), ("reward", (-90.0,), sigmoid), ("price", (12.5,), list)],
)
def test_probabilities_are_those_of_transformers_pipelines(
    gateway: Gateway,
    model: str,
    scores: tuple[float, ...],
    activation: Callable[[tuple[float, ...]], list[float]],
) -> None:
    gateway.engines.replay = scoring(*scores)
    body = {"model": f"acme/{model}", "input": "hello"}
    (found,) = gateway.post(CLASSIFY, body).json()["data"]
    assert found["probs"] == pytest.approx(activation(scores))
    (raw,) = gateway.post(CLASSIFY, body | {"use_activation": False}).json()["data"]
    assert raw["probs"] == list(scores)


def test_a_reward_is_the_heads_own_value(gateway: Gateway) -> None:
    gateway.engines.replay = scoring(-3.5)
    body = gateway.post(SCORE, {"model": "acme/reward", "input": "hello"}).json()
    assert body["data"] == [{"index": 0, "object": "score", "score": -3.5}]


def test_pooled_values_are_numbers_or_base64(gateway: Gateway) -> None:
    body = {"model": "acme/tone", "input": "hello", "use_activation": False}
    (plain,) = gateway.post(POOLING, body).json()["data"]
    assert plain == {"index": 0, "object": "pooling", "data": list(SCORES)}
    (packed,) = gateway.post(POOLING, body | {"encoding_format": "base64"}).json()["data"]
    assert np.frombuffer(b64decode(packed["data"]), "<f4").tolist() == list(SCORES)


def test_a_chat_is_pooled_as_the_template_writes_it(gateway: Gateway) -> None:
    messages = [*chat()["messages"], {"role": "assistant", "content": "good day"}]
    answer = gateway.post(CLASSIFY, {"model": "acme/tone", "messages": messages})
    assert answer.is_success, answer.text
    encoder = demo_encoder()
    (ids,) = gateway.engines.encoded[-1].prompts
    assert encoder._template is not None
    text = encoder._template.render(messages, add_generation_prompt=False)
    assert encoder.backend.decode(list(ids), skip_special_tokens=False) == text


@pytest.mark.parametrize(("model", "left"), [("tone", 3), ("reward", 5)])
def test_padding_at_the_end_is_left_out(gateway: Gateway, model: str, left: int) -> None:
    gateway.engines.replay = scoring(1.0)
    gateway.post(POOLING, {"model": f"acme/{model}", "input": [[9, 3, 8, 3, 3], [3, 3]]})
    lengths = [len(ids) for ids in gateway.engines.encoded[-1].prompts]
    assert lengths == [left, 1 if model == "tone" else 2]


@pytest.mark.parametrize("path", PATHS)
def test_a_model_without_a_head_is_refused_by_name(gateway: Gateway, path: str) -> None:
    for model in ("acme/support", "tiny", "acme/support+acme/support@1"):
        error = error_of(gateway.post(path, {"model": model, "input": "hello"}), 400)
        assert error["param"] in ("model", "adapters")
    assert (
        "no classification head"
        in error_of(gateway.post(path, {"model": "tiny", "input": "hello"}), 400)["message"]
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat("acme/tone")),
        ("/v1/completions", {"model": "acme/tone", "prompt": "hello"}),
        ("/v1/responses", {"model": "acme/tone", "input": "hello"}),
    ],
)
def test_a_request_to_generate_is_refused_by_name(
    gateway: Gateway, path: str, body: dict[str, Any]
) -> None:
    error = error_of(gateway.post(path, body), 400)
    assert error["param"] == "model"
    assert "/v1/classify" in error["message"]


def test_an_adapter_with_a_head_is_not_composed(gateway: Gateway) -> None:
    body = chat("tiny", adapters=[{"name": "acme/tone"}, {"name": "acme/support"}])
    error = error_of(gateway.post("/v1/chat/completions", body), 400)
    assert "classification head" in error["message"]


def test_a_score_of_several_labels_is_refused_by_name(gateway: Gateway) -> None:
    ranked = {"query": "hello", "documents": ["a"]}
    for path, body in ((SCORE, {"input": "hello"}), ("/v1/rerank", ranked)):
        error = error_of(gateway.post(path, {"model": "acme/tone", **body}), 400)
        assert "has 3 labels" in error["message"]


def decoded(gateway: Gateway) -> list[str]:
    """Return the texts of the last call's prompts, without special tokens."""
    backend = demo_encoder().backend
    return [backend.decode(list(ids)) for ids in gateway.engines.encoded[-1].prompts]


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ({"text_1": "ab", "text_2": "cd"}, ["abcd"]),
        ({"queries": "ab", "documents": ["cd", {"text": "ef"}]}, ["abcd", "abef"]),
        ({"text_1": ["ab", "cd"], "text_2": "ef"}, ["abef", "cdef"]),
        ({"text_1": ["ab", "cd"], "text_2": ["ef", "gh"]}, ["abef", "cdgh"]),
    ],
)
def test_pairs_are_scored_as_one_text_with_probabilities(
    gateway: Gateway, body: dict[str, Any], texts: list[str]
) -> None:
    gateway.engines.replay = scoring(1.5)
    body = {"model": "acme/reward", **body}
    data = gateway.post("/score", body).json()["data"]
    assert decoded(gateway) == texts
    assert [each["score"] for each in data] == pytest.approx(sigmoid((1.5,)) * len(texts))
    (raw, *_) = gateway.post(SCORE, body | {"use_activation": False}).json()["data"]
    assert raw["score"] == 1.5


@pytest.mark.parametrize(
    "body",
    [
        {"text_1": "a"},
        {"text_1": "a", "documents": "b"},
        {"text_1": "a", "text_2": "b", "input": "c"},
        {"text_1": "a", "text_2": "b", "messages": chat()["messages"]},
        {"queries": ["a", "b"], "documents": ["c", "d", "e"]},
        {"queries": [], "documents": ["c"]},
        {"queries": [{"image": "a"}], "documents": ["c"]},
    ],
)
def test_texts_that_make_no_pairs_are_refused_by_name(
    gateway: Gateway, body: dict[str, Any]
) -> None:
    error = error_of(gateway.post(SCORE, {"model": "acme/reward", **body}), 400)
    assert error["param"] in ("input", "text_1", "queries")


LONG = "word " * 5000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (SCORE, {"input": LONG}, "input"),
        (SCORE, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        (SCORE, {"text_1": "a", "text_2": LONG}, "text_2"),
        (SCORE, {"queries": "a", "documents": ["b", LONG]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": [LONG]}, "documents"),
    ],
)
def test_a_prompt_beyond_the_context_is_blamed_on_the_field_that_was_sent(
    gateway: Gateway, path: str, body: dict[str, Any], param: str
) -> None:
    error = error_of(gateway.post(path, {"model": "acme/reward", **body}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)


def test_pairs_of_a_small_body_are_bounded_together(gateway: Gateway) -> None:
    long, short = "a " * 2**12, ["b"] * 2048
    for path, names in ((SCORE, ("text_1", "text_2")), ("/v1/rerank", ("query", "documents"))):
        body = {"model": "acme/reward", **dict(zip(names, (long, short), strict=True))}
        error = error_of(gateway.post(path, body), 413)
        assert "send fewer" in error["message"]


def by_length(call: Call) -> Items:
    """Answer each prompt with its length as the value of a head."""

    async def replay() -> Items:
        encoder = demo_encoder()
        prompts = encode_call(call, encoder, 4096).prompts
        answer = Answer(call, prompts, encoder.vocabulary, encoder.syntax)
        yield header(call)
        for index, prompt in enumerate(prompts):
            made = Tokens(call.request_id, index, (7,), FinishReason.LENGTH)
            pooled = Pooled(call.request_id, index, array("f", [len(prompt) / 4]))
            for item in answer.take([pooled, made]):
                yield item

    return replay()


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_ranked_in_the_shape_of_cohere_and_jina(gateway: Gateway, path: str) -> None:
    gateway.engines.replay = by_length
    documents = ["short", "the longest of the three documents", {"text": "the middle one"}]
    body = {"model": "acme/reward", "query": "which? ", "documents": documents}
    answer = gateway.post(path, body)
    assert answer.is_success, answer.text
    ranked = answer.json()
    assert ranked["id"] == f"rerank-{answer.headers['x-request-id']}"
    results = ranked["results"]
    assert [each["index"] for each in results] == [1, 2, 0]
    assert results[1]["document"] == {"text": "the middle one"}
    lengths = [len(ids) for ids in gateway.engines.encoded[-1].prompts]
    want = sigmoid(tuple(lengths[i] / 4 for i in (1, 2, 0)))
    assert [each["relevance_score"] for each in results] == pytest.approx(want)
    assert ranked["usage"]["prompt_tokens"] == ranked["usage"]["total_tokens"] == sum(lengths)
    fewer = {"top_n": 1, "return_documents": False, "use_activation": False}
    (only,) = gateway.post(path, body | fewer).json()["results"]
    assert only == {"index": 1, "relevance_score": lengths[1] / 4}


@pytest.mark.parametrize(
    "body", [{}, {"input": "a", "messages": chat()["messages"]}, {"input": []}, {"input": [[]]}]
)
def test_a_bad_input_is_named(gateway: Gateway, body: dict[str, Any]) -> None:
    for path in PATHS:
        error = error_of(gateway.post(path, {"model": "acme/reward", **body}), 400)
        assert error["param"] in ("input", "messages")


def test_tokens_count_against_the_limits_and_in_why(gateway: Gateway) -> None:
    gateway.engines.replay = scoring(1.0)
    answer = gateway.post(SCORE, {"model": "acme/reward", "input": "hello there"})
    why = gateway.request(
        "GET", f"/v1/requests/{answer.headers['x-request-id']}", gateway.keys["acme"]
    ).json()
    assert why["request"] == f"POST {SCORE}"
    assert why["model"] == "acme/reward"


def test_smoke_tests_are_refused_by_name(gateway: Gateway) -> None:
    answer = gateway.admin("POST", "/adapters/acme/tone/smoke", {})
    assert "does not generate" in error_of(answer, 400)["message"]


def test_a_version_shows_its_head(gateway: Gateway) -> None:
    shown = gateway.admin("GET", "/adapters/acme/tags").json()["versions"][0]["head"]
    assert shown == {"labels": [*TONES], "problem": Problem.MULTI_LABEL, "pad_token": 3}
