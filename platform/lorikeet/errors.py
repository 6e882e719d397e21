"""Every error the platform raises, and how the API answers it: the tree and the one table.

LorikeetError             `code` names the kind, `message` says what to do
├── InvalidSetting        a bad value or an unknown LORIKEET_ variable
├── InvalidInput          a request or a name that cannot be right; `param` names the field
│   ├── UnsupportedParameter  a field that is not served here
│   ├── RequestTooLarge   a body above the limit
│   ├── ContextLengthExceeded  a prompt that the model's context cannot hold
│   └── InvalidAdapter    an upload that is not an acceptable adapter
├── NotFound
│   ├── UnknownModel      no such model, or not this tenant's: the two look alike
│   ├── UnknownTenant
│   └── UnknownKey
├── InvalidKey            no key, or one that is not known
│   └── EndedKey          one that was revoked or has expired, for ever
├── Forbidden             a good key whose scopes do not allow this
├── Conflict              what is there does not allow this; read again, then decide
├── RateLimited           carries retry_after_s and how the limits stand
│   └── InsufficientQuota the month's budget is used up
├── Unavailable           the service cannot do this now; carries retry_after_s
│   └── Overloaded        it has more to do than it can
├── GenerationFailed      the engine failed this request
└── StoreError            the object store did not do what was asked
    ├── ObjectNotFound
    └── ObjectExists      an if-absent write found the object there

A client sees a code, which ERRORS gives its HTTP status and OpenAI's `type`; docs/openai.md lists
them. Three codes have no class: a replica's Refusal names two, and Starlette raises the third.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lorikeet_engine import errors as engine

_REQUEST, _SERVER = "invalid_request_error", "server_error"
_ROUNDING = 1e-6


class ErrorKind(NamedTuple):
    """How the API answers an error. type: OpenAI's word for the kind of it."""

    status: int
    type: str


ERRORS: Mapping[str, ErrorKind] = {
    "invalid_value": ErrorKind(400, _REQUEST),
    "unsupported_parameter": ErrorKind(400, _REQUEST),
    "context_length_exceeded": ErrorKind(400, _REQUEST),
    "invalid_api_key": ErrorKind(401, "authentication_error"),
    "forbidden": ErrorKind(403, "permission_error"),
    "not_found": ErrorKind(404, _REQUEST),
    "model_not_found": ErrorKind(404, _REQUEST),
    "tenant_not_found": ErrorKind(404, _REQUEST),
    "key_not_found": ErrorKind(404, _REQUEST),
    "method_not_allowed": ErrorKind(405, _REQUEST),
    "conflict": ErrorKind(409, _REQUEST),
    "request_too_large": ErrorKind(413, _REQUEST),
    "invalid_adapter": ErrorKind(422, _REQUEST),
    "rate_limit_exceeded": ErrorKind(429, "rate_limit_error"),
    "insufficient_quota": ErrorKind(429, "insufficient_quota"),
    "internal_error": ErrorKind(500, _SERVER),
    "invalid_setting": ErrorKind(500, _SERVER),
    "generation_failed": ErrorKind(500, _SERVER),
    "unavailable": ErrorKind(503, _SERVER),
    "overloaded": ErrorKind(503, _SERVER),
    # The adapter goes on coming; the caller would not wait for it.
    "adapter_not_ready": ErrorKind(503, _SERVER),
    # An adapter that was accepted once: its file or the way to it is broken, which may pass.
    "adapter_load_failed": ErrorKind(503, _SERVER),
    "store_error": ErrorKind(503, _SERVER),
}
"""By code."""

_ENGINE_CODES: Mapping[type, str] = {
    engine.EngineError: "generation_failed",
    engine.InvalidRequest: "invalid_value",  # unless the error names a code of its own
    engine.EngineClosed: "unavailable",
    engine.EngineOverloaded: "overloaded",
    engine.AdapterError: "adapter_load_failed",
    engine.AdapterNotReady: "adapter_not_ready",
    engine.AdapterTooLarge: "invalid_adapter",
}
"""By class of the engine's errors; a derived class has its base's code."""


def status_of(code: str) -> int:
    """The HTTP status of an error's code; one that is in no table is the service's own fault."""
    return ERRORS.get(code, ERRORS[LorikeetError.code]).status


def error_body(code: str, message: str, param: str | None = None) -> dict[str, Any]:
    """{"error": {…}} as OpenAI shapes it: message, type, param and code."""
    kind = ERRORS.get(code, ERRORS[LorikeetError.code]).type
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def engine_code(error: engine.EngineError) -> str:
    """The code of an error that the engine raised."""
    code = next(_ENGINE_CODES[kind] for kind in type(error).__mro__ if kind in _ENGINE_CODES)
    return str(error.fields.get("code", code))


class LorikeetError(Exception):
    """Base of the tree."""

    code = "internal_error"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidSetting(LorikeetError):
    """A bad value or an unknown LORIKEET_ variable."""

    code = "invalid_setting"


class InvalidInput(LorikeetError):
    """A request or a name that cannot be right."""

    code = "invalid_value"


class UnsupportedParameter(InvalidInput):
    """A field that is not served here."""

    code = "unsupported_parameter"


class RequestTooLarge(InvalidInput):
    """A body above the limit."""

    code = "request_too_large"


class ContextLengthExceeded(InvalidInput):
    """A prompt that does not fit into the model's context."""

    code = "context_length_exceeded"


class InvalidAdapter(InvalidInput):
    """An upload that is not an acceptable adapter."""

    code = "invalid_adapter"


class NotFound(LorikeetError):
    """Something named is not there."""

    code = "not_found"


class UnknownModel(NotFound):
    """No such model, or not this tenant's."""

    code = "model_not_found"


class UnknownTenant(NotFound):
    """No such tenant."""

    code = "tenant_not_found"


class UnknownKey(NotFound):
    """No such key id."""

    code = "key_not_found"


class InvalidKey(LorikeetError):
    """No key, or one that is not known."""

    code = "invalid_api_key"


class EndedKey(InvalidKey):
    """A key that was revoked or has expired, for ever."""


class Forbidden(LorikeetError):
    """A good key whose scopes do not allow this."""

    code = "forbidden"


class Conflict(LorikeetError):
    """What is there does not allow this: someone changed it first, or it already exists."""

    code = "conflict"


class LimitStatus(NamedTuple):
    """How a limit per minute stands. kind: "requests" or "tokens".

    remaining: what may pass at once; reset_s: until all may again that may at once.
    """

    kind: str
    limit: int
    remaining: int
    reset_s: float

    def headers(self) -> dict[str, str]:
        """The status as OpenAI's headers, of an answer as of a refusal."""
        return {
            f"x-ratelimit-limit-{self.kind}": str(self.limit),
            f"x-ratelimit-remaining-{self.kind}": str(self.remaining),
            f"x-ratelimit-reset-{self.kind}": _duration(self.reset_s),
        }


class RateLimited(LorikeetError):
    """A limit of the tenant or the key is reached."""

    code = "rate_limit_exceeded"

    def __init__(
        self, message: str, *, retry_after_s: float, limits: Sequence[LimitStatus] = ()
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.limits = limits


class InsufficientQuota(RateLimited):
    """The budget of this month is used up."""

    code = "insufficient_quota"


class Unavailable(LorikeetError):
    """The service cannot do this now."""

    code = "unavailable"


class Overloaded(Unavailable):
    """The service has more to do than it can."""

    code = "overloaded"


class GenerationFailed(LorikeetError):
    """The engine failed this request."""

    code = "generation_failed"


class StoreError(LorikeetError):
    """The object store did not do what was asked."""

    code = "store_error"


class ObjectNotFound(StoreError):
    """No object at this key."""


class ObjectExists(StoreError):
    """An if-absent write found the object there."""


def _duration(seconds: float) -> str:
    """Return a duration as OpenAI writes it: 120ms, 1s, 6m0s, 1h0m0s; rounded up."""
    milliseconds = math.ceil(1000 * seconds - _ROUNDING)
    if milliseconds < 1000:
        return f"{max(0, milliseconds)}ms"
    minutes, rest_s = divmod(math.ceil(seconds - _ROUNDING), 60)
    hours, minutes_left = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes_left}m{rest_s}s"
    return f"{minutes}m{rest_s}s" if minutes else f"{rest_s}s"
