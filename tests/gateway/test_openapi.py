"""Every request that the OpenAPI document describes may be sent; answers are of official types."""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from lorikeet.apis.errors import TINKER
from lorikeet.catalog.records import Scope
from lorikeet.gateway.routes.openapi import document
from lorikeet.gateway.tinker.requests import SAMPLE, sampling_session_id
from lorikeet.gateway.vllm.requests import LOAD, NO_OPS, QUESTIONS, REFUSED, SKYRL_LOAD, UNLOAD
from tests.gateway.conftest import Gateway, chat
from tests.gateway.official_types import validate_as, validate_error, validate_models

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
# Hypothesis draws names of headers from our own source, and with a content-length that is no number
# the server refuses a request before the gateway sees it.
FRAMING = {
    *("connection", "content-length", "expect", "host"),
    *("te", "trailer", "transfer-encoding", "upgrade"),
}
ANSWERS = {
    ("POST", "/v1/chat/completions"): "ChatCompletion",
    ("POST", "/v1/completions"): "Completion",
    ("POST", "/v1/responses"): "Response",
    ("GET", "/v1/responses/{response_id}"): "Response",
    ("POST", "/v1/files"): "FileObject",
    ("GET", "/v1/files/{file_id}"): "FileObject",
    ("POST", "/v1/batches"): "Batch",
    ("GET", "/v1/batches/{batch_id}"): "Batch",
    ("POST", "/v1/batches/{batch_id}/cancel"): "Batch",
    ("POST", "/v1/messages"): "Message",
    ("POST", "/v1/messages/count_tokens"): "MessageTokensCount",
}
DOCUMENT = document(with_vllm=True, with_tinker=True)
OPERATIONS = [
    (path, method.upper()) for path, methods in DOCUMENT["paths"].items() for method in methods
]


PUBLISHED = {LOAD, SKYRL_LOAD, UNLOAD, *QUESTIONS, *NO_OPS, *REFUSED}
"""Paths for publish keys."""


@pytest.fixture(scope="module")
def publish_key(unchanged: Gateway) -> str:
    _, key = unchanged.catalog.create_key("acme", {Scope.PUBLISH}, adapters=("*",), actor="test")
    return key


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_any_request_gets_a_described_answer(
    unchanged: Gateway, publish_key: str, path: str, method: str
) -> None:
    key = publish_key if path in PUBLISHED else unchanged.keys["acme"]
    fixed = not {"parameters", "requestBody"} & DOCUMENT["paths"][path][method.lower()].keys()
    send_many(unchanged.url, key, "tiny", path, method, examples=3 if fixed else 15)


@pytest.mark.soak
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_any_of_many_requests_gets_a_described_answer(
    unchanged: Gateway, publish_key: str, path: str, method: str
) -> None:
    key = publish_key if path in PUBLISHED else unchanged.keys["acme"]
    send_many(unchanged.url, key, "tiny", path, method, examples=1000)


def send_many(url: str, key: str, model: str, path: str, method: str, examples: int) -> None:
    """Send described requests, others, and some that are likely to be answered."""
    operation = schemathesis.openapi.from_dict(DOCUMENT)[path][method]
    kinds = st.one_of(*(operation.as_strategy(mode) for mode in GenerationMode))
    described = operation.as_strategy(GenerationMode.POSITIVE)
    headers = {"authorization": f"Bearer {key}"}
    known = {"model": model, "name": "support", "digest": "0" * 64, "session_id": "0" * 32}
    known |= {"sampler_id": sampling_session_id(model)}
    if "{" in path:
        known |= known_ids(url, headers, model)
    likely = described.flatmap(partial(likely_answered, known))

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.one_of(likely, kinds))
    def send(case: Any) -> None:
        validate(case, url, headers)

    send()


def validate(case: Any, url: str, headers: Mapping[str, str]) -> None:
    """Send a request, without headers that frame HTTP itself, and check its answer."""
    for name in [name for name in case.headers or () if name.lower() in FRAMING]:
        del case.headers[name]
    answer = case.call_and_validate(base_url=url, headers=headers, checks=CHECKS, timeout=120)
    if answer.headers["content-type"] != ["application/json"]:
        return
    if answer.status_code >= 400:
        validate_error(answer.json())
    elif name := ANSWERS.get((case.method.upper(), case.path)):
        validate_as(name, answer.json())
    elif case.path.startswith("/v1/models"):
        validate_models(answer.json())


def test_headers_that_frame_http_are_left_out(unchanged: Gateway) -> None:
    operation = schemathesis.openapi.from_dict(document())["/v1/models"]["GET"]
    case = operation.Case(headers={"Content-Length": "m,qZnd|eddw", "x-other": "1"})
    validate(case, unchanged.url, {"authorization": f"Bearer {unchanged.keys['acme']}"})
    assert list(case.headers) == ["x-other"]


def known_ids(url: str, headers: Mapping[str, str], model: str) -> dict[str, str]:
    """Return existing ids for path parameters."""
    body = {"model": model, "input": "hello there", "max_output_tokens": 20}
    answer = httpx.post(f"{url}/v1/responses", headers=headers, json=body, timeout=120)
    request_id = answer.headers["x-request-id"]
    upload = {"files": {"file": ("lines.jsonl", b"{}")}, "data": {"purpose": "batch"}}
    file_id = httpx.post(f"{url}/v1/files", headers=headers, timeout=120, **upload).json()["id"]
    body = {
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        "input_file_id": file_id,
    }
    batch = httpx.post(f"{url}/v1/batches", headers=headers, timeout=120, json=body).json()
    return {
        "request_id": request_id,
        "response_id": f"resp_{request_id}",
        "file_id": file_id,
        "batch_id": batch["id"],
    }


def likely_answered(known: Mapping[str, str], case: Any) -> st.SearchStrategy[Any]:
    """Draw requests for known ids with few of their fields, because most do not fit together."""
    for name in case.path_parameters or ():
        case.path_parameters[name] = known[name]
    if not isinstance(case.body, dict) or {"lora_name", "input_file_id"} & case.body.keys():
        return st.just(case)
    if case.path.startswith(TINKER):
        case.body |= likely_tinkers(known) if case.path == SAMPLE else {}
        return st.just(case)
    texts = [name for name in ("prompt", "input") if name in case.body]
    asked = dict.fromkeys(texts, "hello there") or chat()
    if "tokens" in case.body:
        asked = {"tokens": [4, 5]}
    limits = {"max_output_tokens" if "input" in texts else "max_tokens": 20}
    if case.path.endswith(
        ("/count_tokens", "tokenize", "/classify", "/score", "/pooling", "/embeddings")
    ):
        limits = {}

    def reduce(kept: set[str]) -> Any:
        body = {name: case.body[name] for name in kept} | asked | {"model": known["model"]}
        case.body = limits | body
        return case

    return st.sets(st.sampled_from(sorted(case.body)), max_size=3).map(reduce)


def likely_tinkers(known: Mapping[str, str]) -> dict[str, Any]:
    return {
        "sampling_session_id": known["sampler_id"],
        "prompt": {"chunks": [{"tokens": [4, 5]}]},
        "sampling_params": {"max_tokens": 20},
    }


def test_any_key_can_read_the_document(unchanged: Gateway) -> None:
    path = "/v1/openapi.json"
    assert unchanged.request("GET", path, None).status_code == 401
    answer = unchanged.request("GET", path, unchanged.keys["globex"])
    assert answer.json() == DOCUMENT


def test_messages_whole_and_streamed_are_of_anthropics_types(unchanged: Gateway) -> None:
    body = chat(max_tokens=20)
    validate_as("Message", unchanged.post("/v1/messages", body).json())
    counted = unchanged.post("/v1/messages/count_tokens", chat())
    validate_as("MessageTokensCount", counted.json())
    stream = unchanged.post("/v1/messages", body | {"stream": True})
    events = [event.split("\ndata: ") for event in stream.text.split("\n\n") if event]
    assert len(events) > 6
    for _, event in events:
        validate_as("RawMessageStreamEvent", json.loads(event))
    refused = unchanged.post("/v1/messages", chat())
    assert refused.json()["type"] == "error"
    validate_error(refused.json())


@pytest.mark.parametrize("endpoint", ["chat/completions", "completions"])
def test_answers_whole_and_streamed_are_of_openais_types(unchanged: Gateway, endpoint: str) -> None:
    is_chat = endpoint.startswith("chat")
    body = chat() if is_chat else {"model": "tiny", "prompt": "hello there"}
    whole = unchanged.post(f"/v1/{endpoint}", body)
    validate_as("ChatCompletion" if is_chat else "Completion", whole.json())
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    stream = unchanged.post(f"/v1/{endpoint}", body | streaming)
    events = [line[6:] for line in stream.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    assert len(events) > 3
    for event in events:
        validate_as("ChatCompletionChunk" if is_chat else "Completion", json.loads(event))


def test_models_are_of_the_types_of_the_clients_api(unchanged: Gateway) -> None:
    key = unchanged.keys["globex"]  # the other tests may have used up acme's reads
    for headers in ({}, {"anthropic-version": "2023-06-01"}):
        for path in ("/v1/models", "/v1/models/tiny"):
            validate_models(unchanged.request("GET", path, key, headers).json())
