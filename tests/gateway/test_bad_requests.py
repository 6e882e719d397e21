"""Errors of bad requests, which never reach a replica."""

import asyncio
import gzip
import json
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from typing import Any

import openai
import pytest
from pydantic import ValidationError
from starlette.requests import Request

from lorikeet.apis.chat.request import ChatRequest
from lorikeet.apis.completions.request import CompletionRequest
from lorikeet.apis.request import GenerateRequest
from lorikeet.errors import InvalidInput, RequestTooLarge
from lorikeet.gateway.body import MAX_JSON_BYTES, read_body
from tests.gateway.conftest import Gateway, chat

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TURN = {"role": "user", "content": "hi"}


def error_of(answer: Any, status: int) -> dict[str, Any]:
    """Return an error's code, param, message and type, in the shape of either API."""
    assert answer.status_code == status, answer.text
    assert len(answer.headers["x-request-id"]) == 32
    body = answer.json()
    if "type" in body:
        return anthropics_error_of(answer)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


def anthropics_error_of(answer: Any) -> dict[str, Any]:
    body = answer.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    error = body["error"]
    assert set(error) == {"type", "message", "details"}
    code = error["details"]["error_code"]
    return {"code": code, "param": None, "message": error["message"], "type": error["type"]}


BAD_VALUES = [
    ({"messages": [TURN]}, "model", "required"),
    (chat(model=""), "model", "at least 1"),
    (chat(model="m" * 2049), "model", "at most 2048"),
    ({"model": "tiny"}, "messages", "required"),
    ({"model": "tiny", "messages": []}, "messages", "at least 1"),
    ({"model": "tiny", "messages": "hi"}, "messages", "valid"),
    ({"model": "tiny", "messages": [1, 2]}, "messages[0]", "object"),
    ({"model": "tiny", "messages": [{"role": "bot", "content": "x"}]}, "messages[0].role", "user"),
    ({"model": "tiny", "messages": [TURN, {"role": "user"}]}, "messages[1].content", "required"),
    (chat(content=5), "messages[0].content", "string"),  # type: ignore[arg-type]
    (chat(content=[{"type": "text"}]), "messages[0].content", "text"),  # type: ignore[arg-type]
    (chat(max_tokens=0), "max_tokens", "greater than or equal to 1"),
    (chat(max_tokens=2**31), "max_tokens", "less than"),
    (chat(max_tokens=1.5), "max_tokens", "integer"),
    (chat(max_tokens="9"), "max_tokens", "integer"),
    (chat(max_tokens=1, max_completion_tokens=2), "max_tokens", "not both"),
    (chat(max_tokens=3, min_tokens=4), "min_tokens", "at most max_tokens (3)"),
    (chat(min_tokens=-1), "min_tokens", "greater"),
    (chat(temperature=-0.1), "temperature", "greater"),
    (chat(temperature=2.1), "temperature", "less"),
    (chat(temperature="hot"), "temperature", "number"),
    (chat(top_p=0), "top_p", "greater than 0"),
    (chat(top_p=1.1), "top_p", "less"),
    (chat(top_k=-2), "top_k", "greater"),
    (chat(top_k=2**40), "top_k", "less"),
    (chat(min_p=-0.01), "min_p", "greater"),
    (chat(min_p=1.01), "min_p", "less"),
    (chat(min_p=False), "min_p", "number"),
    (chat(repetition_penalty=0), "repetition_penalty", "greater"),
    (chat(repetition_penalty=1000), "repetition_penalty", "less"),
    (chat(repetition_penalty="high"), "repetition_penalty", "number"),
    (chat(seed=2**63), "seed", "less"),
    (chat(n=0), "n", "greater"),
    (chat(n=129), "n", "less than or equal to 128"),
    (chat(n=True), "n", "integer"),
    (chat(stop=["a"] * 17), "stop", "at most 16"),
    (chat(stop=""), "stop", "1 to 256"),
    (chat(stop=[1]), "stop", "strings"),
    (chat(stop={}), "stop", "string or a list"),
    (chat(stream="yes"), "stream", "boolean"),
    (chat(stream_options={"include_usage": True}), "stream_options", "stream"),
    (chat(metadata={"a": 1}), "metadata", "strings"),
    (chat(metadata=[]), "metadata", "at most 16"),
    (chat(metadata={str(i): "" for i in range(17)}), "metadata", "at most 16"),
    (chat(metadata={"k" * 65: ""}), "metadata", "at most 64"),
    (chat(metadata={"k": "v" * 513}), "metadata", "at most 512"),
    ({"model": "tiny", "messages": [TURN] * 4097}, "messages", "at most 4096"),
]


@pytest.mark.parametrize(("body", "param", "says"), BAD_VALUES)
def test_a_bad_value_is_named(
    unchanged: Gateway, body: dict[str, Any], param: str, says: str
) -> None:
    error = error_of(unchanged.post(CHAT, body), 400)
    assert (error["code"], error["type"]) == ("invalid_value", "invalid_request_error")
    assert error["param"] == param
    assert says in error["message"]
    assert unchanged.engines.calls == []


@pytest.mark.parametrize(
    "prompt", [[], [[]], [1, "a"], [-1], [2**31], 5, {}, [True], [[1], "a"], ["a", None]]
)
def test_a_prompt_is_text_or_token_ids(unchanged: Gateway, prompt: Any) -> None:
    error = error_of(unchanged.post(COMPLETIONS, {"model": "tiny", "prompt": prompt}), 400)
    assert error["param"] == "prompt"
    assert "want a string" in error["message"]


def test_prompts_times_n_is_bounded(unchanged: Gateway) -> None:
    body = {"model": "tiny", "prompt": ["a"] * 65, "n": 2}
    assert "at most 128" in error_of(unchanged.post(COMPLETIONS, body), 400)["message"]


MANY = 100_000
FLOODS: list[tuple[type[GenerateRequest], dict[str, Any]]] = [
    (ChatRequest, chat(metadata={str(i): i for i in range(MANY)})),
    (ChatRequest, chat(stop=[1] * MANY)),
    (ChatRequest, chat(stream_options={str(i): i for i in range(MANY)})),
    (ChatRequest, chat(content=[{}] * MANY)),  # type: ignore[arg-type]
    (ChatRequest, {"model": "tiny", "messages": [1] * MANY}),
    (ChatRequest, chat(tools=[1] * MANY)),
    (ChatRequest, chat(logit_bias={str(i): "" for i in range(MANY)})),
    (ChatRequest, {"model": "tiny", "messages": [TURN | {"tool_calls": [1] * MANY}]}),
    (ChatRequest, {"model": "tiny", "messages": [TURN] * MANY}),
    (ChatRequest, chat(guided_choice=[1] * MANY)),
    (ChatRequest, chat(functions=[1] * MANY)),
    (ChatRequest, chat(chat_template_kwargs={str(i): i for i in range(MANY)})),
    (CompletionRequest, {"model": "tiny", "prompt": [[1]] * MANY}),
    (CompletionRequest, {"model": "tiny", "prompt": ["a"] * MANY}),
    (CompletionRequest, {"model": "tiny", "prompt": [{}] * MANY}),
]


@pytest.mark.parametrize(("schema", "body"), FLOODS, ids=range(len(FLOODS)))
def test_a_flood_of_bad_values_is_one_error(
    schema: type[GenerateRequest], body: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError) as refused:
        schema.model_validate_json(json.dumps(body))
    assert refused.value.error_count() == 1


@pytest.mark.parametrize(
    "field",
    [
        *("audio", "echo", "modalities", "moderation", "prediction", "prompt", "suffix"),
        *("store", "web_search_options", "made_up"),
    ],
)
def test_an_unsupported_field_is_refused_by_name(unchanged: Gateway, field: str) -> None:
    error = error_of(unchanged.post(CHAT, chat(**{field: 1})), 400)
    assert error["code"] == "unsupported_parameter"
    assert error["param"] == field
    assert field in error["message"]


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (CHAT, "modalities", ["text", "audio"]),
        (CHAT, "store", True),
        (CHAT, "best_of", 2),
        (CHAT, "echo", True),
        (CHAT, "length_penalty", 1.1),
        (CHAT, "skip_special_tokens", False),
        (COMPLETIONS, "add_special_tokens", False),
        (CHAT, "tool_choice", {"type": "custom"}),
        (COMPLETIONS, "best_of", 2),
        (COMPLETIONS, "suffix", "!"),
        (COMPLETIONS, "tools", []),
    ],
)
def test_a_no_op_field_with_another_value_is_refused_by_name(
    unchanged: Gateway, path: str, field: str, value: Any
) -> None:
    body = chat() if path == CHAT else {"model": "tiny", "prompt": "a"}
    error = error_of(unchanged.post(path, body | {field: value}), 400)
    assert (error["code"], error["param"]) == ("unsupported_parameter", field)


@pytest.mark.parametrize(
    ("path", "table"), [(CHAT, ChatRequest.no_ops), (COMPLETIONS, CompletionRequest.no_ops)]
)
def test_no_op_values_are_accepted(
    unchanged: Gateway, path: str, table: Mapping[str, Sequence[Any]]
) -> None:
    body = chat() if path == CHAT else {"model": "tiny", "prompt": "a"}
    body |= {field: values[-1] for field, values in table.items()}
    body |= {"stream": True, "stream_options": {"include_obfuscation": False}}
    assert unchanged.post(path, body).status_code == 200
    told = {
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "skip_special_tokens": True,
    }  # as guidellm sends
    assert unchanged.post(path, body | told).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "says"),
    [
        ("POST", "/v1/conversations", "ask /v1/chat/completions"),
        ("POST", "/v1/messages/batches", "one by one"),
        ("POST", "/v1/images/edits", "this service generates text"),
        ("POST", "/v1/audio/speech", "this service generates text"),
        ("GET", "/v1/fine_tuning/jobs", "this service generates text"),
        ("POST", "/embeddings", "base_url must end in /v1, for /v1/embeddings"),
        ("POST", "/chat/completions", "base_url must end in /v1"),
        ("POST", "/responses", "base_url must end in /v1"),
        ("GET", "/models", "base_url must end in /v1"),
        ("POST", "/v1/v1/chat/completions", "base_url has /v1 twice"),
        ("POST", "/v1/chat/completions/", "leave out the last /"),
        ("GET", "/", "their page is /ui"),
        ("GET", "/docs", "/metrics and /admin/v1 are at the admin listener"),
        ("POST", "/api/chat", "tenants' paths begin with /v1"),
        ("GET", "/v1", "such as /v1/chat/completions"),
        ("GET", "/v1/", "such as /v1/chat/completions"),
    ],
)
def test_a_missing_endpoint_names_the_one_to_use(
    unchanged: Gateway, method: str, path: str, says: str
) -> None:
    answer = unchanged.request(method, path, unchanged.keys["acme"])
    error = error_of(answer, 404)
    assert error["code"] == "not_found"
    assert says in error["message"]


def test_a_wrong_method_names_the_right_one(unchanged: Gateway) -> None:
    answer = unchanged.request("GET", CHAT, unchanged.keys["acme"])
    assert error_of(answer, 405)["message"] == "GET does not work here: want POST"


@pytest.mark.parametrize("raw", [b"[]", b"null", b'"hello"'])
def test_a_body_that_is_no_object_is_refused(unchanged: Gateway, raw: bytes) -> None:
    error = error_of(unchanged.post(CHAT, raw), 400)
    assert error["message"] == "the body: Input should be an object"


def test_a_body_for_another_endpoint_names_that_endpoint(unchanged: Gateway) -> None:
    error = error_of(unchanged.post(CHAT, {"model": "tiny", "prompt": "a"}), 400)
    assert "/v1/completions" in error["message"]
    error = error_of(unchanged.post(COMPLETIONS, chat()), 400)
    assert "/v1/chat/completions" in error["message"]


def test_a_nested_unsupported_field_is_named_by_its_path(unchanged: Gateway) -> None:
    body = {"model": "tiny", "messages": [TURN, {**TURN, "audio": {"id": "a"}}]}
    assert error_of(unchanged.post(CHAT, body), 400)["param"] == "messages[1].audio"
    body = chat(stream=True, stream_options={"include_obfuscation": True})
    assert (
        error_of(unchanged.post(CHAT, body), 400)["param"] == "stream_options.include_obfuscation"
    )


def test_a_flood_of_unknown_fields_is_a_short_answer(unchanged: Gateway) -> None:
    flood = {f"field_{i}" + "x" * 200: i for i in range(20_000)}
    error = error_of(unchanged.post(CHAT, {**chat(), **flood}), 400)
    assert error["code"] == "unsupported_parameter"
    assert len(error["message"]) < 500


@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b"hello",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800", "messages": []}',
        b"[" * 60_000,
        b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "top_p": 1e}',
    ],
)
def test_a_body_that_is_no_json_is_refused(unchanged: Gateway, raw: bytes) -> None:
    error = error_of(unchanged.post(CHAT, raw), 400)
    assert error["message"].startswith("the body is not JSON: ")


@pytest.mark.parametrize("raw", [b"", b"[]", b"null", b'"x"', b"5"])
def test_json_that_is_no_request_is_refused(unchanged: Gateway, raw: bytes) -> None:
    error_of(unchanged.post(CHAT, raw), 400)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_are_finite(unchanged: Gateway, number: str) -> None:
    raw = json.dumps(chat(temperature=1)).replace('"temperature": 1', f'"temperature": {number}')
    assert error_of(unchanged.post(CHAT, raw.encode()), 400)["param"] == "temperature"


def named(path: str, number: str) -> list[tuple[dict[str, Any], str]]:
    """Requests with a number in a field of any JSON value, each with the param of its error."""
    schema = {"type": "object", "x": number}
    if path == "/v1/messages":
        use = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": number}}
        result = {"type": "tool_result", "tool_use_id": "a"}
        asked = {"role": "assistant", "content": [use]}
        turns = [TURN, asked, {"role": "user", "content": [result]}]
        base: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": turns}
        plain = base | {"messages": [TURN]}
        return [
            (base, "messages[1].content[0].input"),
            (plain | {"tools": [{"name": "f", "input_schema": schema}]}, "tools"),
            (
                plain | {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
                "output_config.format.schema",
            ),
        ]
    if path == "/v1/responses":
        base = {"model": "tiny", "input": "hi"}
        tool = {"type": "function", "name": "f", "parameters": schema}
        text = {"format": {"type": "json_schema", "name": "f", "schema": schema}}
        return [(base | {"tools": [tool]}, "tools"), (base | {"text": text}, "text.format.schema")]
    function = {"name": "f", "arguments": json.dumps({"x": number})}
    called = {"id": "a", "type": "function", "function": function}
    turns = [TURN, {"role": "assistant", "tool_calls": [called]}]
    wanted = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return [
        (chat(tools=[tool]), "tools"),
        (chat(functions=[tool["function"]]), "functions"),
        (chat(response_format=wanted), "response_format.json_schema.schema"),
        (chat(guided_json=schema), "guided_json"),
        (chat(chat_template_kwargs=schema), "chat_template_kwargs"),
        ({"model": "tiny", "messages": turns}, "messages[1].tool_calls[0].function.arguments"),
    ]


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
def test_numbers_are_finite_in_fields_of_any_value(
    unchanged: Gateway, path: str, number: str
) -> None:
    for body, field in named(path, "number"):
        raw = json.dumps(body).replace('"number"', number).replace('\\"number\\"', number)
        answer = unchanged.post(path, raw.encode())
        assert error_of(answer, 400)["message"] == f"{field}: want finite numbers"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat()),
        ("/v1/responses", {"model": "tiny", "input": "hello there"}),
        ("/v1/messages", chat(max_tokens=9)),
    ],
)
def test_a_compressed_body_is_refused(unchanged: Gateway, path: str, body: dict[str, Any]) -> None:
    raw, key = json.dumps(body).encode(), unchanged.keys["acme"]

    def sent(content: bytes, encoding: str) -> Any:
        headers = {"content-encoding": encoding}
        return unchanged.request("POST", path, key, headers, content=content)

    error = error_of(sent(gzip.compress(raw), "gzip"), 400)
    assert error["message"].startswith("Content-Encoding: want an uncompressed body")
    assert error["param"] == (None if path == "/v1/messages" else "content-encoding")
    assert sent(raw, "identity").status_code == 200
    assert sent(BOM_UTF8 + raw, "identity").status_code == 200
    assert (
        "not JSON" in error_of(sent(json.dumps(body).encode("utf-16"), "identity"), 400)["message"]
    )


def test_a_body_above_the_limit_is_refused(unchanged: Gateway) -> None:
    error = error_of(unchanged.post(CHAT, b" " * (MAX_JSON_BYTES + 1)), 413)
    assert error["code"] == "request_too_large"
    assert str(MAX_JSON_BYTES) in error["message"]


def test_a_body_of_undeclared_length_is_cut_off_too(unchanged: Gateway) -> None:
    parts = (b" " * 2**20 for _ in range(MAX_JSON_BYTES // 2**20 + 1))
    answer = unchanged.request("POST", CHAT, unchanged.keys["acme"], content=parts)
    error_of(answer, 413)


@pytest.mark.parametrize(
    "length", ["", "-1", "+5", "1_0", "1e3", "0x10", "\xb2", "2, 2", "9" * 4301]
)
def test_a_length_that_is_no_number_is_refused(length: str) -> None:
    with pytest.raises(InvalidInput, match="want the body's size in bytes") as refused:
        asyncio.run(read_body(declaring(length)))
    assert refused.value.param == "content-length"


def test_a_body_is_refused_by_its_declared_length() -> None:
    with pytest.raises(RequestTooLarge, match=str(MAX_JSON_BYTES)):
        asyncio.run(read_body(declaring(str(MAX_JSON_BYTES + 1))))


def declaring(length: str) -> Request:
    """Send a request with a Content-Length whose body is never read."""
    headers = [(b"content-length", length.encode("latin-1"))]
    return Request({"type": "http", "method": "POST", "headers": headers})


@pytest.mark.parametrize(
    "model",
    [
        *("acme/absent", "acme/support@2", "acme/support@beta", "acme/support@", "acme/support@-1"),
        *(
            "acme/support@01",
            "absent",
            "acme",
            "acme/",
            "/support",
            "../../etc/passwd",
            "acme/../x",
        ),
        *("Acme/support", "acme/support@@1", "acme/support/x", "tiny@1", "acme/support\n", "雀/雀"),
    ],
)
def test_a_model_that_is_not_there_is_404(unchanged: Gateway, model: str) -> None:
    error = error_of(unchanged.post(CHAT, chat(model)), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_an_unknown_route_and_a_wrong_method_have_the_same_shape(unchanged: Gateway) -> None:
    key = unchanged.keys["acme"]
    unknown = error_of(unchanged.request("GET", "/v2/nothing", key), 404)
    assert unknown["code"] == "not_found"
    wrong = unchanged.request("GET", CHAT, key)
    assert error_of(wrong, 405)["code"] == "method_not_allowed"
    assert wrong.headers["allow"] == "POST"


def test_openais_client_raises_its_own_errors(unchanged: Gateway) -> None:
    client = unchanged.openai()
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**chat("acme/absent"))
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**chat(temperature=9))
    assert bad.value.param == "temperature"


def test_no_documentation_is_served_without_a_key(unchanged: Gateway) -> None:
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert unchanged.request("GET", path, None).status_code == 404
    assert unchanged.request("GET", "/healthz", None).json() == {"status": "ok"}
