"""Errors as HTTP responses, in the shape of the client's API (lorikeet/apis/errors.py)."""

from collections.abc import Mapping

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from lorikeet.apis.body import input_error
from lorikeet.apis.errors import (
    TINKER,
    ClientApi,
    anthropic_error_body,
    api_of_path,
    client_param,
    error_status,
    openai_error_body,
)
from lorikeet.errors import (
    InsufficientQuota,
    LorikeetError,
    RateLimited,
    RequestTimeout,
    status_of,
)
from lorikeet.protocol.messages import Call, Refusal
from lorikeet.retry_after import whole_seconds
from lorikeet.tenancy.rate_limiter import limit_headers

OK = 200
CREATED = 201
ACCEPTED = 202

_LONGEST_RETRY_S = 60
"""Longest Retry-After, in seconds, after which clients should retry automatically.

With a longer Retry-After, x-should-retry: false makes OpenAI's and Anthropic's clients raise the
error at once.
"""

_INTERNAL = "the service failed, not this request: send it again, or give your admin x-request-id"

_NO_WEBSOCKETS = "there are no WebSockets here: send the request over HTTP, with stream for events"
_CHAT = ": ask /v1/chat/completions (most clients have a setting for it)"
_ONE_BY_ONE = ": messages are sent one by one, to /v1/messages"
_TEXT = (
    ": this service generates text (/v1/chat/completions), classifies it (/v1/classify) and embeds "
    "it (/v1/embeddings)"
)
_BELOW = ": ask a path below it, such as /v1/chat/completions or /v1/models"
_LISTENERS = (
    ": tenants' paths begin with /v1, their page is /ui; "
    "/metrics and /admin/v1 are at the admin listener"
)
_LOADS = ": the operator switches it on by LORIKEET_LOAD_FROM; or push to /v1/adapters"
_TINKER = (
    ": the sampling side of Tinker's API is switched on by LORIKEET_TINKER, and nothing else of "
    "the API is served"
)
_ENDPOINTS = {
    "": _BELOW,
    **dict.fromkeys(("chat", "completions", "models", "responses", "files", "batches"), ""),
    **dict.fromkeys(("classify", "score", "pooling", "rerank", "embeddings"), ""),
    "conversations": _CHAT,
    "messages": _ONE_BY_ONE,
    **dict.fromkeys(("load_lora_adapter", "unload_lora_adapter"), _LOADS),
    **dict.fromkeys(("moderations", "audio", "images"), _TEXT),
    **dict.fromkeys(("uploads", "fine_tuning", "assistants", "threads"), _TEXT),
}
"""Advice in the 404 for endpoints that do not exist but that clients may call, by the first part of
the path after /v1.
"""
_LIKE_IDS = {
    "/v1/responses/compact": ": conversations are not compacted here, send the turns that the model"
    " is to see, or ask the model itself for a summary of earlier ones",
}
"""Advice, by path, in the 404 for missing endpoints whose path looks like an object's path."""


class Refused(LorikeetError):
    """A replica's Refusal as an exception.

    Its `param` is renamed as the client's endpoint calls the field: max_tokens becomes
    max_output_tokens at /v1/responses.

    call: the refused call; None: the name is kept.
    """

    def __init__(self, refusal: Refusal, call: Call | None = None) -> None:
        param = refusal.param
        if call is not None and param is not None:
            param = client_param(call, param)
        super().__init__(refusal.message, param=param, retry_after_s=refusal.retry_after_s)
        self.code = refusal.code


def client_api(scope: Scope) -> ClientApi:
    """Return the API whose client sent a request: Anthropic's if the request has the header
    anthropic-version, else the path's.
    """
    if any(name == b"anthropic-version" for name, _ in scope["headers"]):
        return ClientApi.ANTHROPIC
    return api_of_path(scope["path"].removeprefix(scope.get("root_path", "")))


def add_error_handlers(app: FastAPI) -> None:
    """Make the application answer every error in the shape of the client's API."""
    app.add_exception_handler(LorikeetError, _on_lorikeet_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_error)


def error_response(error: LorikeetError, scope: Scope) -> Response:
    """Return a LorikeetError as a response, with Retry-After for 429 and 503."""
    status = status_of(error.code)
    headers = dict[str, str]()
    if status in (429, 503):
        wait_s = whole_seconds(error.retry_after_s)
        headers["retry-after"] = str(wait_s)
        if wait_s > _LONGEST_RETRY_S:
            headers["x-should-retry"] = "false"
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.code == RequestTimeout.code:
        headers["connection"] = "close"  # the rest of the body is useless
    if isinstance(error, RateLimited):
        headers |= limit_headers(error.limits)
    if isinstance(error, InsufficientQuota):
        headers["x-should-retry"] = "false"
    return _response(scope, error.code, error.message, error.param, headers=headers)


def internal_error_response(scope: Scope) -> Response:
    """Return the response to an unexpected exception. The response tells nothing about the
    exception.
    """
    return _response(scope, LorikeetError.code, _INTERNAL)


def websocket_refusal(scope: Scope) -> Response:
    """Return the refusal of a request for a WebSocket.

    On status 426 Codex sends its requests over HTTP at once; on any other it tries seven times,
    for nine seconds.
    """
    return _response(scope, "upgrade_required", _NO_WEBSOCKETS, headers={"upgrade": "HTTP/1.1"})


async def _on_lorikeet_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, LorikeetError)
    return error_response(error, request.scope)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    """Respond to an error that FastAPI found in a path or query parameter."""
    assert isinstance(error, RequestValidationError)
    problem = input_error([{**p, "loc": p["loc"][1:]} for p in error.errors()])
    return error_response(problem, request.scope)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code, message, path = LorikeetError.code, _INTERNAL, request.url.path
    if error.status_code == 404 or path in _LIKE_IDS:
        code, message = "not_found", f"there is no {path} here{_instead_of(path)}"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{request.method} does not work here: want {allowed}"
        code = "method_not_allowed"
    headers = None if code == "not_found" else error.headers
    return _response(request.scope, code, message, headers=headers)


def _response(
    scope: Scope,
    code: str,
    message: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    api = client_api(scope)
    if api is ClientApi.ANTHROPIC:
        body = anthropic_error_body(code, message, scope.get("state", {}).get("request_id"))
    else:
        body = openai_error_body(code, message, param)
    return JSONResponse(body, error_status(code, api), headers)


def _instead_of(path: str) -> str:
    """Return advice on the right path, to append to the 404 for a path that does not exist."""
    first, _, rest = path.strip("/").partition("/")
    if path.startswith(TINKER):
        return _TINKER
    if first != "v1":
        known = first and first in _ENDPOINTS
        return f": base_url must end in /v1, for /v1{path}" if known else _LISTENERS
    if rest and path.endswith("/"):
        return ": leave out the last /"
    if path in _LIKE_IDS:
        return _LIKE_IDS[path]
    endpoint, _, _ = rest.partition("/")
    return ": base_url has /v1 twice" if endpoint == "v1" else _ENDPOINTS.get(endpoint, "")
