"""Whose API a client speaks, and the shape that errors have there."""

from enum import Enum
from typing import Any

from lorikeet.errors import ContextLengthExceeded, kind_of

MESSAGES = "/v1/messages"
_OVERLOADED = 529


class ClientApi(Enum):
    """Whose API a client speaks."""

    OPENAI = "OpenAI"
    ANTHROPIC = "Anthropic"


def api_of_path(path: str) -> ClientApi:
    """Return the api of a route: Anthropic's has /v1/messages and what is below it."""
    below = path == MESSAGES or path.startswith(f"{MESSAGES}/")
    return ClientApi.ANTHROPIC if below else ClientApi.OPENAI


def error_status(code: str, api: ClientApi) -> int:
    """Return the HTTP status of an error's code.

    It is the table's (lorikeet/errors.py), but for an overloaded_error, which Anthropic's clients
    know by a status of its own.
    """
    kind = kind_of(code)
    if api is ClientApi.ANTHROPIC and kind.anthropic_type == "overloaded_error":
        return _OVERLOADED
    return kind.status


def openai_error_body(code: str, message: str, param: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's shape: {"error": {…}} with message, type, param and code."""
    kind = kind_of(code).type
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def anthropic_error_body(code: str, message: str, request_id: str | None) -> dict[str, Any]:
    """Return an error in Anthropic's shape: {"type": "error", "error": {…}, "request_id": …}.

    Its clients read our code from `details`, and know a prompt that is too long by the first words
    of the message.
    """
    if code == ContextLengthExceeded.code:
        message = f"prompt is too long: {message}"
    kind = kind_of(code).anthropic_type
    error = {"type": kind, "message": message, "details": {"error_code": code}}
    return {"type": "error", "error": error, "request_id": request_id}
