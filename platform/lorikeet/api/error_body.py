"""The shape of an error in an answer: OpenAI's."""

from typing import Any

_KINDS = {
    "invalid_api_key": "authentication_error",
    "forbidden": "permission_error",
    "rate_limit_exceeded": "rate_limit_error",
    "insufficient_quota": "insufficient_quota",
    "internal_error": "server_error",
    "invalid_setting": "server_error",
    "unavailable": "server_error",
    "overloaded": "server_error",
    "adapter_not_ready": "server_error",
    "generation_failed": "server_error",
    "adapter_load_failed": "server_error",
    "store_error": "server_error",
}


def error_body(code: str, message: str, param: str | None = None) -> dict[str, Any]:
    """{"error": {…}}: message, type, param and code. `code` is a LorikeetError's or a Refusal's."""
    kind = _KINDS.get(code, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
