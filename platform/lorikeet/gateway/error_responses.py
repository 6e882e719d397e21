"""Errors as HTTP responses."""

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lorikeet.errors import (
    InsufficientQuota,
    LorikeetError,
    RateLimited,
    error_body,
    status_of,
)
from lorikeet.gateway.body import describe
from lorikeet.protocol.messages import Refusal
from lorikeet.retry_after import whole_seconds

OK = 200
CREATED = 201

_INTERNAL = "the service failed, not this request: send it again, or give your admin x-request-id"


class Refused(LorikeetError):
    """A replica's Refusal, raised."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message, param=refusal.param, retry_after_s=refusal.retry_after_s)
        self.code = refusal.code


def add_error_handlers(app: FastAPI) -> None:
    """Respond to every error in OpenAI's shape."""
    app.add_exception_handler(LorikeetError, _on_lorikeet_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_error)


def error_response(error: LorikeetError) -> Response:
    """Return a LorikeetError as a response, with Retry-After where a retry makes sense."""
    status = status_of(error.code)
    headers = {}
    if status in (429, 503):
        headers["retry-after"] = str(whole_seconds(error.retry_after_s))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, RateLimited):
        for limit in error.limits:
            headers |= limit.headers()
    if isinstance(error, InsufficientQuota):
        headers["x-should-retry"] = "false"  # OpenAI's clients heed it
    return JSONResponse(error_body(error.code, error.message, error.param), status, headers)


def internal_error_response() -> Response:
    """Return the response to an unexpected exception; it says nothing of the exception."""
    return JSONResponse(error_body(LorikeetError.code, _INTERNAL), 500)


async def _on_lorikeet_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, LorikeetError)
    return error_response(error)


async def _on_validation_error(_: Request, error: Exception) -> Response:
    """Respond to FastAPI's own checks of paths and queries; `loc` begins with which it was."""
    assert isinstance(error, RequestValidationError)
    return error_response(describe([{**p, "loc": p["loc"][1:]} for p in error.errors()]))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        body = error_body("not_found", f"there is no {request.url.path} here")
    elif error.status_code == 405:
        body = error_body("method_not_allowed", f"{request.method} does not work here")
    else:
        body = error_body(LorikeetError.code, _INTERNAL)
    return JSONResponse(body, error.status_code, error.headers)
