"""Every error the platform raises.

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

HTTP statuses are in api/errors.py and nowhere else.
"""

from collections.abc import Sequence
from typing import NamedTuple


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


class Standing(NamedTuple):
    """How a limit per minute stands. kind: "requests" or "tokens".

    remaining: what may pass at once; reset_s: until all may again that may at once.
    """

    kind: str
    limit: int
    remaining: int
    reset_s: float


class RateLimited(LorikeetError):
    """A limit of the tenant or the key is reached."""

    code = "rate_limit_exceeded"

    def __init__(
        self, message: str, *, retry_after_s: float, standings: Sequence[Standing] = ()
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.standings = standings


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
