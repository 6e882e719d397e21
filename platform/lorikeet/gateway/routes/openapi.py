"""GET /v1/openapi.json: description of the tenants' API, with the schemas that parse requests."""

import asyncio
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request
from pydantic import TypeAdapter
from starlette.responses import Response

from lorikeet.apis.body import Body
from lorikeet.apis.chat.request import ChatRequest
from lorikeet.apis.completions.request import CompletionRequest
from lorikeet.apis.errors import MESSAGES, TINKER
from lorikeet.apis.messages.request import CountTokensRequest, MessagesRequest
from lorikeet.apis.pooling.request import (
    ClassifyRequest,
    EmbeddingsRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from lorikeet.apis.responses.request import InputTokensRequest, ResponsesRequest
from lorikeet.gateway.generate import UNVERSIONED
from lorikeet.gateway.reads import TenantReads
from lorikeet.gateway.routes.batches import BatchRequest
from lorikeet.gateway.tinker import requests as tinker
from lorikeet.gateway.vllm.generate_request import InferenceRequest
from lorikeet.gateway.vllm.requests import (
    DETOKENIZE,
    GENERATE,
    LOAD,
    NO_OPS,
    QUESTIONS,
    REFUSED,
    SKYRL_LOAD,
    TOKENIZE,
    UNLOAD,
    DetokenizeRequest,
    LoadRequest,
    SkyrlLoadRequest,
    TokenizeRequest,
    UnloadRequest,
)

_REF = "#/components/schemas/{model}"
_REQUESTS = (
    *(ChatRequest, CompletionRequest, ResponsesRequest, InputTokensRequest),
    *(MessagesRequest, CountTokensRequest, BatchRequest),
    *(ClassifyRequest, ScoreRequest, PoolingRequest, RerankRequest, EmbeddingsRequest),
    *(LoadRequest, SkyrlLoadRequest, UnloadRequest, TokenizeRequest, DetokenizeRequest),
    *(tinker.SamplingSessionRequest, tinker.WeightsInfoRequest),
    *(tinker.SampleRequest, tinker.FutureRequest, InferenceRequest),
)
_ERRORS = {
    "400": "A field is wrong or not supported; `param` names the field.",
    "401": "The key is missing or unknown.",
    "403": "The key's scopes do not allow this.",
    "404": "The model does not exist, or belongs to another tenant.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "422": "The adapter cannot be served, or the request may be what ends replicas.",
    "429": "A limit or the budget is reached; Retry-After says when to try again.",
    "500": "The service failed.",
    "503": "The service cannot do this now; Retry-After says when to try again.",
}
_ANTHROPIC_ERRORS = {"529": "The service is overloaded; Retry-After says when to try again."}
_CONFLICT = {"409": "The version exceeds the tenant's limits."}
_TINKER_ERRORS = {
    "402": "The month's budget is used up.",
    "408": "The body did not arrive in time, or the samples are not ready.",
    "410": "The samples are no longer kept: send the request for them again.",
}
_OBJECT = {"schema": {"type": "object"}}
_JSON = {"application/json": _OBJECT}
_MESSAGE = _JSON | {"application/x-protobuf": {"schema": {"type": "string"}}}
_TEXT = {"text/plain": {"schema": {"type": "string"}}}
_JSON_OR_EVENTS = _JSON | {"text/event-stream": _OBJECT}


def openapi_routes(
    reads: TenantReads, *, with_vllm: bool = False, with_tinker: bool = False
) -> APIRouter:
    """Return the route GET /v1/openapi.json, for callers with a key.

    reads: check of each request's key and of its tenant's limit on reads.
    with_vllm: describe vLLM's endpoints for trainers, too.
    with_tinker: describe the sampling side of Tinker's API, too.
    """
    router = APIRouter(prefix="/v1")

    @router.get("/openapi.json")
    async def openapi(request: Request) -> Response:
        async with reads.admitted(request):
            text = await asyncio.to_thread(_document_json, with_vllm, with_tinker)  # made once
            return Response(text, media_type="application/json")

    return router


@cache
def _document_json(with_vllm: bool, with_tinker: bool) -> bytes:
    described = document(with_vllm=with_vllm, with_tinker=with_tinker)
    return json.dumps(described, separators=(",", ":")).encode()


@cache
def document(*, with_vllm: bool = False, with_tinker: bool = False) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document, which callers must not change.

    with_vllm: describe vLLM's endpoints for trainers, too.
    with_tinker: describe the sampling side of Tinker's API, too.

    Requests have full schemas. Responses are plain objects: the packages of OpenAI's and
    Anthropic's clients define their shapes.
    """
    return {
        "openapi": "3.1.0",
        "info": {"title": "Lorikeet", "version": version("lorikeet-serve")},
        "security": [{"key": []}, {"x-api-key": []}],
        "paths": {
            **_generating(),
            **_stored_responses(),
            **_files(),
            **_batches(),
            "/v1/models": _get("list_models", "List models"),
            "/v1/models/{model}": _get(
                "get_model",
                "Look up a model",
                _path("model", "tenant/name, tenant/name@version or a base model"),
            ),
            "/v1/limits": _get("get_limits", "Show limits, and how much of them is used"),
            "/v1/requests": _get("list_requests", "Explain the last requests"),
            "/v1/requests/{request_id}": _get(
                "explain_request",
                "Explain where a request's time went",
                _path("request_id", "x-request-id, or the answer's own id"),
            ),
            "/v1/adapters/{name}/versions/{digest}": _pushing(),
            "/v1/usage": _get(
                "get_usage",
                "Sum up usage",
                _query("from", "date", "first day, UTC; else the first of this month"),
                _query("to", "date", "last day, included; else today"),
                _query("by", "", "some of day, month and adapter, with commas between"),
            ),
            "/v1/openapi.json": _get("get_openapi", "Describe the API"),
            **(_vllm() if with_vllm else {}),
            **(_tinker() if with_tinker else {}),
        },
        "components": {
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": _schemas(),
        },
    }


def _generating() -> dict[str, Any]:
    messages = _ERRORS | _ANTHROPIC_ERRORS
    return {
        "/v1/chat/completions": _generate("Answer a chat", "ChatRequest"),
        "/v1/completions": _generate("Continue prompts", "CompletionRequest"),
        "/v1/responses": _generate("Answer with a response", "ResponsesRequest"),
        "/v1/responses/input_tokens": _generate(
            "Count the tokens of a response's prompt", "InputTokensRequest", _JSON
        ),
        MESSAGES: _generate("Answer with a message", "MessagesRequest", errors=messages),
        f"{MESSAGES}/count_tokens": _generate(
            "Count the tokens of a message's prompt", "CountTokensRequest", _JSON, messages
        ),
        "/v1/classify": _generate("Classify texts", "ClassifyRequest", _JSON),
        "/v1/score": _generate("Score texts with a reward model", "ScoreRequest", _JSON),
        "/v1/embeddings": _generate("Embed texts", "EmbeddingsRequest", _JSON),
        "/v1/pooling": _generate("Compute a head's values", "PoolingRequest", _JSON),
        "/v1/rerank": _generate("Rank documents", "RerankRequest", _JSON),
        **_unversioned(),
    }


def _unversioned() -> dict[str, Any]:
    described = {}
    for path, schema in UNVERSIONED.items():
        summary, name = f"Alias of /v1/{path.rpartition('/')[2]}", path[1:].replace("/", "_")
        described[path] = _generate(summary, schema.__name__, _JSON, name=name)
    return described


def _stored_responses() -> dict[str, Any]:
    response_id = _path("response_id", "an answer's id, resp_ and 32 hexadecimal digits")
    path = "/v1/responses/{response_id}"
    get = _get("get_response", "Look up a stored response", response_id)
    delete = _operation("delete_response", "Delete a stored response", response_id)
    listed = _get(
        "list_input_items",
        "List the conversation that a stored response answers",
        response_id,
        *_page("items"),
    )
    return {path: get | {"delete": delete}, f"{path}/input_items": listed}


def _files() -> dict[str, Any]:
    file_id = _path("file_id", "a file's id, file- and 24 hexadecimal digits")
    one, text = "/v1/files/{file_id}", {"type": "string"}
    get = _get("get_file", "Look up a file", file_id)
    delete = _operation("delete_file", "Delete a file", file_id)
    content = _get("get_file_content", "Read a file", file_id)
    read = content["get"]["responses"]["200"]
    read["content"] = {"application/octet-stream": {"schema": text}}
    listed = _get(
        "list_files",
        "List files, a hundred in a page",
        _query("purpose", "", "batch or batch_output; else both"),
        *_page("files"),
    )
    form = {
        "type": "object",
        "required": ["file", "purpose"],
        "properties": {
            "file": text | {"format": "binary"},
            "purpose": text | {"enum": ["batch"]},
            "expires_after[anchor]": text | {"enum": ["created_at"]},
            "expires_after[seconds]": {"type": "integer"},
        },
    }
    upload = {
        "operationId": "upload_file",
        "summary": "Upload the input of a batch",
        "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}},
        "responses": _responses(_JSON, _ERRORS),
    }
    return {
        "/v1/files": listed | {"post": upload},
        one: get | {"delete": delete},
        f"{one}/content": content,
    }


def _batches() -> dict[str, Any]:
    batch_id = _path("batch_id", "a batch's id, batch_ and 24 hexadecimal digits")
    cancel = _operation("cancel_batch", "Cancel a batch", batch_id)
    cancel["responses"] |= _responses(_JSON, {"409": "The batch has ended."})
    return {
        "/v1/batches": {
            **_get("list_batches", "List batches, the newest first", *_page("batches")[:2]),
            **_generate("Run the requests of a file", "BatchRequest", _JSON),
        },
        "/v1/batches/{batch_id}": _get("get_batch", "Look up a batch", batch_id),
        "/v1/batches/{batch_id}/cancel": {"post": cancel},
    }


def _pushing() -> dict[str, Any]:
    named = _path("name", "an adapter's name"), _path("digest", "SHA-256 of its blob")
    get = _get("show_version", "Show the state of a pushed version", *named)
    responses = {
        "201": "The version is new.",
        "202": "The version has not reached the state that `wait` names yet.",
        **_CONFLICT,
    }
    put = {
        "operationId": "push_version",
        "summary": "Push a version of an adapter",
        "parameters": [
            *named,
            _query("alias", "", "alias that moves to the version"),
            _query("base_model", "", "base model it was trained on; else the one the blob names"),
            _query("wait", "", "state to wait for: none, ready or durable; else ready"),
            _query("lifetime_s", "", "seconds until it expires, never durable, 1 to 86400"),
            _query("keep", "", "with lifetime_s: number of newest expiring versions kept, 1 to 15"),
            _query("defaults_of", "", "version or alias with the request defaults that it gets"),
            _query("probes_bytes", "", "size of the probes' JSON, which precedes the blob"),
            _query("warn_above", "", "nats above which the parity proof warns; else 0.05"),
            _query("refuse_above", "", "nats above which it refuses; else 0.5"),
            _query("timeout_s", "", "seconds to wait for that state, 0 to 600; else 60"),
        ],
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string"}}},
        },
        "responses": _responses(_JSON, _ERRORS | responses),
    }
    return get | {"put": put}


def _vllm() -> dict[str, Any]:
    """Return the operations of vLLM's endpoints for trainers."""
    errors = _ERRORS | _CONFLICT
    nothing = "Do nothing: requests keep the version of an adapter with which they began"
    refused = "Refuse to change the base model's weights"
    posts = dict.fromkeys(NO_OPS, nothing) | dict.fromkeys(REFUSED, refused)
    return {
        LOAD: _generate("Load an adapter from a folder", "LoadRequest", _TEXT, errors),
        SKYRL_LOAD: _generate("Load an adapter for SkyRL", "SkyrlLoadRequest", _JSON, errors),
        UNLOAD: _generate("Unload an adapter", "UnloadRequest", _TEXT),
        TOKENIZE: _generate("Convert a prompt to token ids", "TokenizeRequest", _JSON),
        DETOKENIZE: _generate("Convert token ids to text", "DetokenizeRequest", _JSON),
        GENERATE: _generate("Continue token ids", "InferenceRequest", _JSON),
        **{path: _get(path.strip("/"), "Describe the server") for path in QUESTIONS},
        **{path: {"post": _operation(path.strip("/"), told)} for path, told in posts.items()},
    }


def _tinker() -> dict[str, Any]:
    """Return the operations of Tinker's API for sampling."""
    errors = _ERRORS | _TINKER_ERRORS
    parameters = {"session_id": "a session's id", "sampler_id": "a sampling session's id"}

    def operation(path: str, summary: str) -> dict[str, Any]:
        name = re.sub(r"\W+", "_", path.removeprefix(TINKER)).strip("_")
        given = [_path(each, parameters[each]) for each in re.findall(r"{(\w+)}", path)]
        return _operation(name, summary, *given) | {"responses": _responses(_JSON, errors)}

    def post(summary: str, request: type[Body], name: str | None = None) -> dict[str, Any]:
        answer = _MESSAGE if name == "retrieve_future" else _JSON
        return _generate(summary, request.__name__, answer, errors, name)

    gets = {
        tinker.SAMPLER: "Describe a sampling session",
        tinker.CAPABILITIES: "List the base models",
        tinker.HEALTH: "Tell that the service answers",
    }
    bare_posts = {
        tinker.CONFIG: "Configure the client",
        tinker.DYNAMIC_CONFIG: "Configure the running client",
        tinker.CREATE_SESSION: "Create a session",
        tinker.HEARTBEAT: "Do nothing: retrieving a sample keeps it alive",
        tinker.FINISH_SESSION: "Do nothing",
        tinker.TELEMETRY: "Drop the client's telemetry",
        **dict.fromkeys(tinker.TRAINING, "Refuse to train"),
    }
    return {
        **{path: {"get": operation(path, summary)} for path, summary in gets.items()},
        **{path: {"post": operation(path, summary)} for path, summary in bare_posts.items()},
        tinker.CREATE_SAMPLING_SESSION: post(
            "Fix the version to sample from", tinker.SamplingSessionRequest
        ),
        tinker.WEIGHTS_INFO: post("Describe an adapter", tinker.WeightsInfoRequest),
        tinker.SAMPLE: post("Start samples", tinker.SampleRequest),
        tinker.RETRIEVE: post("Retrieve samples", tinker.FutureRequest, "retrieve_future"),
        tinker.CANCEL: post("Cancel samples", tinker.FutureRequest, "cancel_future"),
    }


def _generate(
    summary: str,
    request: str,
    answer: Mapping[str, Any] = _JSON_OR_EVENTS,
    errors: Mapping[str, str] = _ERRORS,
    name: str | None = None,
) -> dict[str, Any]:
    body = {"application/json": {"schema": {"$ref": _REF.format(model=request)}}}
    post = {
        "operationId": name or request,
        "summary": summary,
        "requestBody": {"required": True, "content": body},
        "responses": _responses(answer, errors),
    }
    return {"post": post}


def _get(name: str, summary: str, *parameters: dict[str, Any]) -> dict[str, Any]:
    return {"get": _operation(name, summary, *parameters)}


def _operation(name: str, summary: str, *parameters: dict[str, Any]) -> dict[str, Any]:
    """Return an OpenAPI operation whose request has no body.

    name: the operation's operationId.
    parameters: its parameters in path and query.
    """
    described = {"operationId": name, "summary": summary, "responses": _responses(_JSON, _ERRORS)}
    return described | ({"parameters": list(parameters)} if parameters else {})


def _path(name: str, description: str) -> dict[str, Any]:
    schema = {"type": "string", "minLength": 1}
    given = {"name": name, "in": "path", "required": True}
    return given | {"description": description, "schema": schema}


def _query(name: str, form: str, description: str) -> dict[str, Any]:
    schema = {"type": "string"} | ({"format": form} if form else {})
    return {"name": name, "in": "query", "description": description, "schema": schema}


def _page(things: str) -> list[dict[str, Any]]:
    """Return the query parameters of a list that is returned in pages.

    things: name of the list's entries, for the description.
    """
    return [
        _query("limit", "", f"{things} of a page, from 1 to 100"),
        _query("after", "", "the id before the page"),
        _query("order", "", "asc or desc; else desc, the newest first"),
    ]


def _responses(answer: Mapping[str, Any], others: Mapping[str, str]) -> dict[str, Any]:
    """Return the responses of an operation, by HTTP status.

    answer: content of the response with status 200, by media type.
    others: descriptions of the responses with other statuses, all of which are JSON.
    """
    described = {status: {"description": text, "content": _JSON} for status, text in others.items()}
    return {"200": {"description": "The answer.", "content": answer}} | described


def _schemas() -> dict[str, Any]:
    _, schemas = TypeAdapter.json_schemas(
        [(kind.__name__, "validation", TypeAdapter(kind)) for kind in _REQUESTS], ref_template=_REF
    )
    definitions: dict[str, Any] = schemas["$defs"]
    return definitions
