"""Every error the platform raises, and how the API answers it: the tree and the one table.

LorikeetError             `code` names the kind, `message` says what to do
├── InvalidSetting        a bad value or an unknown LORIKEET_ variable
├── InvalidInput          a request or a name that cannot be right; `param` names the field
│   ├── UnsupportedParameter  a field that is not served here
│   │   └── ThreadsUnsupported  one by which Anthropic's clients have conversations stored
│   ├── UnknownPreviousResponse  no such response to go on from, or not this tenant's
│   ├── RequestTooLarge   a body above the limit
│   ├── RequestTimeout    a body that did not come in time
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
    ├── StoreRefused      the store answers: refused, no bucket, or a newer release's catalog
    │   └── NoCatalog     the store answers, and holds none
    ├── ObjectNotFound
    └── ObjectExists      an if-absent write found the object there

A client sees a code, which ERRORS gives its HTTP status, and what OpenAI and Anthropic call its
kind; docs/openai.md lists them. Three codes have no class: a replica's Refusal names two, and
Starlette raises the third.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lorikeet_engine import errors as engine

_REQUEST, _SERVER, _API = "invalid_request_error", "server_error", "api_error"
_NOT_FOUND, _RATE = "not_found_error", "rate_limit_error"


class ErrorKind(NamedTuple):
    """How the API answers an error. type, anthropic_type: what the two APIs call its kind."""

    status: int
    type: str
    anthropic_type: str


ERRORS: Mapping[str, ErrorKind] = {
    "invalid_value": ErrorKind(400, _REQUEST, _REQUEST),
    "unsupported_parameter": ErrorKind(400, _REQUEST, _REQUEST),
    "thread_unsupported_request": ErrorKind(400, _REQUEST, _REQUEST),
    "context_length_exceeded": ErrorKind(400, _REQUEST, _REQUEST),
    "previous_response_not_found": ErrorKind(400, _REQUEST, _REQUEST),
    "invalid_api_key": ErrorKind(401, "authentication_error", "authentication_error"),
    "forbidden": ErrorKind(403, "permission_error", "permission_error"),
    "not_found": ErrorKind(404, _REQUEST, _NOT_FOUND),
    "model_not_found": ErrorKind(404, _REQUEST, _NOT_FOUND),
    "tenant_not_found": ErrorKind(404, _REQUEST, _NOT_FOUND),
    "key_not_found": ErrorKind(404, _REQUEST, _NOT_FOUND),
    "method_not_allowed": ErrorKind(405, _REQUEST, _REQUEST),
    "request_timeout": ErrorKind(408, _REQUEST, _REQUEST),
    "conflict": ErrorKind(409, _REQUEST, "conflict_error"),
    "request_too_large": ErrorKind(413, _REQUEST, "request_too_large"),
    "invalid_adapter": ErrorKind(422, _REQUEST, _REQUEST),
    "rate_limit_exceeded": ErrorKind(429, _RATE, _RATE),
    "insufficient_quota": ErrorKind(429, "insufficient_quota", _RATE),
    "internal_error": ErrorKind(500, _SERVER, _API),
    "invalid_setting": ErrorKind(500, _SERVER, _API),
    "generation_failed": ErrorKind(500, _SERVER, _API),
    "unavailable": ErrorKind(503, _SERVER, _API),
    "overloaded": ErrorKind(503, _SERVER, "overloaded_error"),
    # The adapter goes on coming; the caller would not wait for it.
    "adapter_not_ready": ErrorKind(503, _SERVER, _API),
    # An adapter that was accepted once: its file or the way to it is broken, which may pass.
    "adapter_load_failed": ErrorKind(503, _SERVER, _API),
    "store_error": ErrorKind(503, _SERVER, _API),
}
"""Each code's HTTP status and types."""

_ENGINE_CODES: Mapping[type, str] = {
    engine.EngineError: "generation_failed",
    engine.InvalidRequest: "invalid_value",  # unless the error names a code of its own
    engine.EngineClosed: "unavailable",
    engine.EngineOverloaded: "overloaded",
    engine.AdapterError: "adapter_load_failed",
    engine.AdapterNotReady: "adapter_not_ready",
    engine.AdapterTooLarge: "invalid_adapter",
}
"""The code of each class of the engine's errors; a derived class has its base's."""


def kind_of(code: str) -> ErrorKind:
    """An error's row, by its code; one that is in no table is the service's own fault."""
    return ERRORS.get(code, ERRORS[LorikeetError.code])


def status_of(code: str) -> int:
    """The HTTP status of an error's code."""
    return kind_of(code).status


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


class ThreadsUnsupported(UnsupportedParameter):
    """A field to have conversations stored; at its code Anthropic's clients go on without."""

    code = "thread_unsupported_request"


class UnknownPreviousResponse(InvalidInput):
    """No such stored response to go on from; OpenAI's clients know it by its code."""

    code = "previous_response_not_found"


class RequestTooLarge(InvalidInput):
    """A body above the limit."""

    code = "request_too_large"


class RequestTimeout(InvalidInput):
    """A body that did not come in time."""

    code = "request_timeout"


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
    """How a limit per minute stands. kind: "requests", "tokens" or "bytes".

    remaining: what may pass at once; reset_s: until all may again that may at once.
    """

    kind: str
    limit: int
    remaining: int
    reset_s: float


class RateLimited(LorikeetError):
    """A limit of the tenant or the key is reached."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.limits: Sequence[LimitStatus] = ()


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


class StoreRefused(StoreError):
    """The store answers, and asking again is of no use before somebody has mended something."""


class NoCatalog(StoreRefused):
    """The store answers, and holds no catalog."""


class ObjectNotFound(StoreError):
    """No object at this key."""


class ObjectExists(StoreError):
    """An if-absent write found the object there."""
