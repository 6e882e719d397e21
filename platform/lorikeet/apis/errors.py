"""Error bodies and HTTP statuses in the shapes of OpenAI's and Anthropic's APIs.

Tinker's API has OpenAI's bodies, and one status of its own.
"""

from enum import Enum
from typing import Any

from lorikeet.errors import ContextLengthExceeded, InsufficientQuota, kind_of
from lorikeet.protocol.messages import Call, Endpoint

MESSAGES = "/v1/messages"
TINKER = "/api/v1/"
_OVERLOADED = 529
_PAYMENT = 402


_RESPONSES_PARAMS = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
}
_PARAMS = {
    Endpoint.CHAT: {"prompt": "messages"},
    Endpoint.RESPONSES: _RESPONSES_PARAMS,
    Endpoint.INPUT_TOKENS: _RESPONSES_PARAMS,
    Endpoint.MESSAGES: {
        "prompt": "messages",
        "continue_final_message": "messages",
    },
    Endpoint.CLASSIFY: {"prompt": "input"},
    Endpoint.SCORE: {"prompt": "input"},
    Endpoint.POOLING: {"prompt": "input"},
    Endpoint.RERANK: {"prompt": "documents"},
    Endpoint.EMBEDDINGS: {"prompt": "input"},
}
"""Names of request fields at each endpoint, by the names that replicas and engines use in errors
for the same fields.
"""


class ClientApi(Enum):
    """API whose response shapes a client expects."""

    OPENAI = "OpenAI"
    ANTHROPIC = "Anthropic"
    TINKER = "Tinker"


def api_of_path(path: str) -> ClientApi:
    """Return the API of a route: Anthropic's for /v1/messages and below, Tinker's below /api/v1,
    else OpenAI's.
    """
    if path.startswith(TINKER):
        return ClientApi.TINKER
    below = path == MESSAGES or path.startswith(f"{MESSAGES}/")
    return ClientApi.ANTHROPIC if below else ClientApi.OPENAI


def error_status(code: str, api: ClientApi) -> int:
    """Return the HTTP status of an error's code, by the table in lorikeet/errors.py.

    Exceptions: an overloaded_error is 529 in Anthropic's API, and insufficient_quota is 402 in
    Tinker's, because their clients expect that.
    """
    kind = kind_of(code)
    if api is ClientApi.ANTHROPIC and kind.anthropic_type == "overloaded_error":
        return _OVERLOADED
    if api is ClientApi.TINKER and code == InsufficientQuota.code:
        return _PAYMENT
    return kind.status


def client_param(call: Call, param: str) -> str:
    """Return a field's name in the request, by its name in an error of a replica or an engine."""
    if param == "prompt" and call.prompt_field is not None:
        return call.prompt_field
    return _PARAMS.get(call.endpoint, {}).get(param, param)


def openai_error_body(code: str, message: str, param: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's shape: {"error": {…}} with message, type, param and code."""
    kind = kind_of(code).type
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def anthropic_error_body(code: str, message: str, request_id: str | None) -> dict[str, Any]:
    """Return an error in Anthropic's shape: {"type": "error", "error": {…}, "request_id": …}.

    `details` contains Lorikeet's error code. If the prompt is too long, the message begins with the
    words by which Anthropic's clients recognise that error.
    """
    if code == ContextLengthExceeded.code:
        message = f"prompt is too long: {message}"
    kind = kind_of(code).anthropic_type
    error = {"type": kind, "message": message, "details": {"error_code": code}}
    return {"type": "error", "error": error, "request_id": request_id}
