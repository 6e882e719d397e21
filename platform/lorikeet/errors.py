"""All errors of the platform: the tree of classes, and the table of the API's answers.

LorikeetError             `code` names the kind, `message` says what to do
├── InvalidSetting        invalid value or unknown name of a LORIKEET_ variable
├── InvalidInput          invalid request or name; `param` names the field
│   ├── UnsupportedParameter  field that this service does not support
│   │   └── ThreadsUnsupported  field by which Anthropic's clients ask to store a conversation
│   ├── UnknownPreviousResponse  no such stored response, or another tenant's
│   ├── RequestTooLarge   body above the size limit
│   ├── RequestTimeout    body that did not arrive in time
│   ├── ContextLengthExceeded  prompt too long for the model's context
│   └── InvalidAdapter    upload that is not an acceptable adapter
├── NotFound
│   ├── Expired           sample that is no longer kept
│   ├── UnknownModel      no such model, or another tenant's: clients cannot tell them apart
│   ├── UnknownTenant
│   └── UnknownKey
├── StillRunning          samples that have not ended
├── InvalidKey            missing or unknown API key
│   └── EndedKey          API key that was revoked or has expired, for ever
├── Forbidden             valid key whose scopes do not allow the operation
├── Conflict              the current state does not allow the operation; read it again
├── RateLimited           limit reached; carries retry_after_s and the limits' status
│   └── InsufficientQuota the month's budget is used up
├── Unavailable           the service cannot do this now; carries retry_after_s
│   └── Overloaded        too many requests
├── GenerationFailed      the engine failed the request
├── ReplicasLost          the request may be what ends replicas
└── StoreError            an operation of the object store failed
    ├── StoreRefused      the store answered: access denied, no bucket, or a newer catalog format
    │   └── NoCatalog     the store answered and holds no catalog
    ├── ObjectNotFound
    └── ObjectExists      the object of an if-absent write already exists

Clients see an error's code. ERRORS maps each code to its HTTP status and to the error types of the
OpenAI and Anthropic APIs; docs/openai.md lists the table.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lorikeet.retry_after import REPAIR_S
from lorikeet_engine import errors as engine

_REQUEST, _SERVER, _API = "invalid_request_error", "server_error", "api_error"
_NOT_FOUND, _RATE = "not_found_error", "rate_limit_error"


class ErrorKind(NamedTuple):
    """HTTP status and error types by which the API answers one kind of error.

    status: HTTP status.
    type: error type in OpenAI's APIs.
    anthropic_type: error type in Anthropic's API.
    """

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
    "expired": ErrorKind(410, _REQUEST, _NOT_FOUND),
    "still_running": ErrorKind(408, _REQUEST, _REQUEST),
    "conflict": ErrorKind(409, _REQUEST, "conflict_error"),
    "request_too_large": ErrorKind(413, _REQUEST, "request_too_large"),
    "invalid_adapter": ErrorKind(422, _REQUEST, _REQUEST),
    # 422, since the adapter's weights are at fault: it must not count as a failure of the service.
    "adapter_overflows": ErrorKind(422, _REQUEST, _REQUEST),
    # 422, since clients repeat requests that failed with 5xx.
    "replicas_lost": ErrorKind(422, _REQUEST, _REQUEST),
    "upgrade_required": ErrorKind(426, _REQUEST, _REQUEST),
    "rate_limit_exceeded": ErrorKind(429, _RATE, _RATE),
    "insufficient_quota": ErrorKind(429, "insufficient_quota", _RATE),
    "internal_error": ErrorKind(500, _SERVER, _API),
    "invalid_setting": ErrorKind(500, _SERVER, _API),
    "generation_failed": ErrorKind(500, _SERVER, _API),
    "unavailable": ErrorKind(503, _SERVER, _API),
    "overloaded": ErrorKind(503, _SERVER, "overloaded_error"),
    # The adapter continues to load; the caller did not want to wait for it.
    "adapter_not_ready": ErrorKind(503, _SERVER, _API),
    # 503, since the adapter was accepted at registration: its file or the store is broken, which
    # may be repaired.
    "adapter_load_failed": ErrorKind(503, _SERVER, _API),
    "store_error": ErrorKind(503, _SERVER, _API),
}
"""HTTP status and error types of each error code."""

_ENGINE_CODES: Mapping[type, str] = {
    engine.EngineError: "generation_failed",
    engine.InvalidRequest: "invalid_value",  # unless the error's fields name a code
    engine.EngineClosed: "unavailable",
    engine.EngineOverloaded: "overloaded",
    engine.AdapterError: "adapter_load_failed",
    engine.AdapterNotComposable: "invalid_value",
    engine.AdapterNotReady: "adapter_not_ready",
    engine.AdapterTooLarge: "invalid_adapter",
    engine.AdapterOverflows: "adapter_overflows",
}
"""Error codes of the engine's error classes. A subclass that is not listed has its base class's
code.
"""


def kind_of(code: str) -> ErrorKind:
    """Return the HTTP status and error types of an error code; an unknown code has
    internal_error's.
    """
    return ERRORS.get(code, ERRORS[LorikeetError.code])


def status_of(code: str) -> int:
    """Return the HTTP status of an error's code."""
    return kind_of(code).status


def engine_code(error: engine.EngineError) -> str:
    """Return the API's error code for an error that the engine raised."""
    code = next(_ENGINE_CODES[kind] for kind in type(error).__mro__ if kind in _ENGINE_CODES)
    return str(error.fields.get("code", code))


class LorikeetError(Exception):
    """Base class of the platform's errors.

    message: text for the client, which says what to do.
    param: name of the request's field at fault; None: no single field.
    retry_after_s: seconds until a retry makes sense; None: not known.
    """

    code = "internal_error"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidSetting(LorikeetError):
    """Invalid value or unknown name of a LORIKEET_ variable."""

    code = "invalid_setting"


class InvalidInput(LorikeetError):
    """Invalid request or name."""

    code = "invalid_value"


class UnsupportedParameter(InvalidInput):
    """Field that this service does not support."""

    code = "unsupported_parameter"


class ThreadsUnsupported(UnsupportedParameter):
    """Field that asks to store a conversation. Anthropic's clients recognise the code, and send the
    request again without the field.
    """

    code = "thread_unsupported_request"


class UnknownPreviousResponse(InvalidInput):
    """Reference to a previous response that is not stored; OpenAI's clients recognise the code."""

    code = "previous_response_not_found"


class RequestTooLarge(InvalidInput):
    """Body above the size limit."""

    code = "request_too_large"


class RequestTimeout(InvalidInput):
    """Body that did not arrive in time."""

    code = "request_timeout"


class ContextLengthExceeded(InvalidInput):
    """Prompt too long for the model's context."""

    code = "context_length_exceeded"


class InvalidAdapter(InvalidInput):
    """Upload that is not an acceptable adapter."""

    code = "invalid_adapter"


class NotFound(LorikeetError):
    """No object of the given name."""

    code = "not_found"


class Expired(NotFound):
    """Sample (background request) that was lost, refused or is no longer kept: send it again."""

    code = "expired"


class UnknownModel(NotFound):
    """No such model, or another tenant's."""

    code = "model_not_found"


class UnknownTenant(NotFound):
    """No such tenant."""

    code = "tenant_not_found"


class UnknownKey(NotFound):
    """No such key id."""

    code = "key_not_found"


class StillRunning(LorikeetError):
    """Samples (background requests) that have not ended; the client should ask again."""

    code = "still_running"


class InvalidKey(LorikeetError):
    """Missing or unknown API key."""

    code = "invalid_api_key"


class EndedKey(InvalidKey):
    """API key that was revoked or has expired, and will never be valid again."""


class Forbidden(LorikeetError):
    """Valid key whose scopes do not allow the operation."""

    code = "forbidden"


class Conflict(LorikeetError):
    """Operation refused by the current state: changed concurrently, or already existing."""

    code = "conflict"


class LimitStatus(NamedTuple):
    """Status of a limit per minute, for the x-ratelimit headers.

    kind: "requests", "tokens" or "bytes".
    limit: amount per minute.
    remaining: amount that may pass now.
    reset_s: seconds until the token bucket is full again.
    """

    kind: str
    limit: int
    remaining: int
    reset_s: float


class RateLimited(LorikeetError):
    """Limit of the tenant or the key was reached."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.limits: Sequence[LimitStatus] = ()


class InsufficientQuota(RateLimited):
    """Budget of the month was used up."""

    code = "insufficient_quota"


class Unavailable(LorikeetError):
    """Service cannot serve the request now."""

    code = "unavailable"


class Overloaded(Unavailable):
    """Service has too many requests."""

    code = "overloaded"


class GenerationFailed(LorikeetError):
    """Request that failed in the engine."""

    code = "generation_failed"


class ReplicasLost(LorikeetError):
    """Two replicas were lost just after they had taken this request."""

    code = "replicas_lost"


class StoreError(LorikeetError):
    """Failed operation of the object store."""

    code = "store_error"


class StoreRefused(StoreError):
    """Refusal by a store that can be reached; retries fail until an operator repairs the cause."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after_s=REPAIR_S)


class NoCatalog(StoreRefused):
    """Store that can be reached, but holds no catalog."""


class ObjectNotFound(StoreError):
    """No object at this key."""


class ObjectExists(StoreError):
    """Failure of an if-absent write: the object already exists."""
