"""GET /v1/openapi.json: the tenants' API, described from the types that make it."""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request
from pydantic import TypeAdapter
from starlette.responses import JSONResponse

from lorikeet.dialects import MESSAGES
from lorikeet.gateway.apis.anthropic_request import CountTokensRequest, MessagesRequest
from lorikeet.gateway.apis.anthropic_types import (
    MessageError,
    MessageObject,
    MessageStreamEvent,
    ModelInfo,
    ModelInfoList,
    TokenCount,
)
from lorikeet.gateway.apis.chat_request import ChatRequest
from lorikeet.gateway.apis.completion_request import CompletionRequest
from lorikeet.gateway.apis.response_types import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Error,
    ModelCard,
    ModelList,
)
from lorikeet.gateway.apis.responses_request import ResponsesRequest
from lorikeet.gateway.apis.responses_types import (
    DeletedResponse,
    InputItemList,
    ResponseObject,
    ResponseStreamEvent,
)
from lorikeet.gateway.auth import RequestAuthenticator

_REF = "#/components/schemas/{model}"
_TYPES: Sequence[Any] = (
    ChatRequest,
    CompletionRequest,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ResponsesRequest,
    ResponseObject,
    ResponseStreamEvent,
    DeletedResponse,
    InputItemList,
    MessagesRequest,
    MessageObject,
    MessageStreamEvent,
    CountTokensRequest,
    TokenCount,
    MessageError,
    ModelInfo,
    ModelInfoList,
    ModelCard,
    ModelList,
    Error,
)
_ERRORS = {
    "400": "A field is not right or not supported; `param` names it.",
    "401": "No key, or none that is known.",
    "403": "The key's scopes do not allow this.",
    "404": "No such model, or not this tenant's.",
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "422": "The adapter cannot be served.",
    "429": "A limit is reached, or the budget; Retry-After says when to come back.",
    "500": "The service failed.",
    "503": "The service cannot do this now; Retry-After says when to come back.",
}
_ANTHROPICS_ERRORS = {
    "529": "The service has more to do than it can; Retry-After says when to come back."
}

_OBJECT = {"application/json": {"schema": {"type": "object"}}}


def openapi_routes(authenticator: RequestAuthenticator) -> APIRouter:
    """The route of the document, for callers with a key."""
    router = APIRouter(prefix="/v1")

    @router.get("/openapi.json")
    async def openapi(request: Request) -> JSONResponse:
        await authenticator.tenant(request)
        return JSONResponse(document())

    return router


@cache
def document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document. Callers must not change it."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "Lorikeet", "version": version("lorikeet-serve")},
        "security": [{"key": []}, {"x-api-key": []}],
        "paths": {
            **_generating(),
            **_stored_responses(),
            "/v1/models": _get("list_models", "List models", _json("ModelList", "ModelInfoList")),
            "/v1/models/{model}": _get(
                "get_model",
                "Look up a model",
                _json("ModelCard", "ModelInfo"),
                _path("model", "tenant/name, tenant/name@version or a base model"),
            ),
            "/v1/requests/{request_id}": _get(
                "explain_request",
                "Tell what became of a request",
                _OBJECT,
                _path("request_id", "x-request-id, or the answer's own id"),
            ),
            "/v1/adapters/{name}/versions/{digest}": _pushing(),
            "/v1/usage": _get(
                "get_usage",
                "Sum up what was used",
                _OBJECT,
                _query("from", "date", "the first day, UTC; else the month's"),
                _query("to", "date", "the last day, included; else today"),
                _query("by", "", "adapter, day, or both with a comma between"),
            ),
            "/v1/openapi.json": _get("get_openapi", "Describe the API", _OBJECT),
        },
        "components": _components(),
    }


def _components() -> dict[str, Any]:
    return {
        "securitySchemes": {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        },
        "schemas": _schemas(),
    }


def _generating() -> dict[str, Any]:
    return {
        "/v1/chat/completions": _generate(
            "Answer a chat", "ChatRequest", "ChatCompletion", "ChatCompletionChunk"
        ),
        "/v1/completions": _generate(
            "Continue prompts", "CompletionRequest", "Completion", "Completion"
        ),
        "/v1/responses": _generate(
            "Answer with a response",
            "ResponsesRequest",
            "ResponseObject",
            "ResponseStreamEvent",
        ),
        MESSAGES: _generate(
            "Answer with a message",
            "MessagesRequest",
            "MessageObject",
            "MessageStreamEvent",
            error="MessageError",
        ),
        f"{MESSAGES}/count_tokens": _generate(
            "Count the tokens of a message's prompt",
            "CountTokensRequest",
            "TokenCount",
            error="MessageError",
        ),
    }


def _stored_responses() -> dict[str, Any]:
    response_id = _path("response_id", "an answer's id, resp_ and 32 hexadecimal digits")
    path = "/v1/responses/{response_id}"
    get = _get("get_response", "Look up a stored response", _json("ResponseObject"), response_id)
    delete = _get(
        "delete_response", "Delete a stored response", _json("DeletedResponse"), response_id
    )
    listed = _get(
        "list_input_items",
        "List the conversation that a stored response answers",
        _json("InputItemList"),
        response_id,
        _query("limit", "", "items of a page, from 1 to 100; else 20"),
        _query("after", "", "the id of the item before the page"),
        _query("order", "", "asc or desc; else desc, the newest first"),
    )
    return {path: get | {"delete": delete["get"]}, f"{path}/input_items": listed}


def _pushing() -> dict[str, Any]:
    named = _path("name", "an adapter's name"), _path("digest", "SHA-256 of its blob")
    get = _get("show_version", "Tell how far a pushed version is", _OBJECT, *named)
    answers = _answers(_OBJECT)
    put = {
        "operationId": "push_version",
        "summary": "Push a version of an adapter",
        "parameters": [
            *named,
            _query("alias", "", "the alias that moves to it"),
            _query("base_model", "", "the base model it was trained on; else what the blob says"),
            _query("wait", "", "none, ready or durable; else ready"),
            _query("lifetime_s", "", "seconds after which it goes, never durable, 1 to 86400"),
            _query("keep", "", "with lifetime_s: how many of the newest such ones stay, 1 to 15"),
            _query("timeout_s", "", "seconds to wait for that, 0 to 600; else 60"),
        ],
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string"}}},
        },
        "responses": {
            **answers,
            "201": {**answers["200"], "description": "It is new."},
            "202": {**answers["200"], "description": "It is not as far yet as was waited for."},
            "409": {**answers["404"], "description": "The tenant's limits have no room for it."},
        },
    }
    return get | {"put": put}


def _generate(
    summary: str, request: str, answer: str, event: str | None = None, error: str = "Error"
) -> dict[str, Any]:
    events = {"text/event-stream": {"schema": _event(event, error)}} if event else {}
    post = {
        "operationId": request,
        "summary": summary,
        "requestBody": {"required": True, "content": _json(request)},
        "responses": _answers(_json(answer) | events, error),
    }
    return {"post": post}


def _get(
    operation: str, summary: str, answer: Mapping[str, Any], *parameters: dict[str, Any]
) -> dict[str, Any]:
    asked = {"parameters": list(parameters)} if parameters else {}
    described = {"operationId": operation, "summary": summary, "responses": _answers(answer)}
    return {"get": described | asked}


def _path(name: str, description: str) -> dict[str, Any]:
    schema = {"type": "string", "minLength": 1}
    given = {"name": name, "in": "path", "required": True}
    return given | {"description": description, "schema": schema}


def _query(name: str, form: str, description: str) -> dict[str, Any]:
    schema = {"type": "string"} | ({"format": form} if form else {})
    return {"name": name, "in": "query", "description": description, "schema": schema}


def _event(model: str, error: str) -> dict[str, Any]:
    references = [{"$ref": _REF.format(model=name)} for name in (model, error)]
    described = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": references},
        "description": f"A {error} where the stream failed.",
    }
    last = {"const": "[DONE]", "description": "The last event."}
    data = {"anyOf": [last, described]}
    return {"type": "object", "required": ["data"], "properties": {"data": data}}


def _answers(content: Mapping[str, Any], error: str = "Error") -> dict[str, Any]:
    described = _ERRORS if error == "Error" else _ERRORS | _ANTHROPICS_ERRORS
    errors = {
        status: {"description": description, "content": _json(error)}
        for status, description in described.items()
    }
    return {"200": {"description": "The answer.", "content": content}} | errors


def _json(model: str, anthropics: str | None = None) -> dict[str, Any]:
    """Return JSON of a type; anthropics: what clients get who send the header anthropic-version."""
    schema: dict[str, Any] = {"$ref": _REF.format(model=model)}
    if anthropics is not None:
        schema = {"anyOf": [schema, {"$ref": _REF.format(model=anthropics)}]}
    return {"application/json": {"schema": schema}}


def _schemas() -> dict[str, Any]:
    _, schemas = TypeAdapter.json_schemas(
        [(kind.__name__, "validation", TypeAdapter(kind)) for kind in _TYPES], ref_template=_REF
    )
    definitions: dict[str, Any] = schemas["$defs"]
    return definitions
