"""Request bodies that set limits of a tenant or a key. Limits left out stay unchanged."""

import time
from typing import Annotated, Any, ClassVar

from pydantic import Field

from lorikeet.apis.body import Body
from lorikeet.catalog.rules.limits import (
    LONGEST_LIFE_S,
    KeyLimitOptions,
    LimitOptions,
    TenantOptions,
)

_NEVER_NONE = {"burst_s", "weight", "priority"}
"""Names of limits that cannot be removed: null leaves them unchanged."""


class LimitsBody(Body):
    """Limits of a tenant or a key to set: rates, burst, concurrency, context (see records.Limits).

    A limit that is left out stays unchanged; null removes it.

    named: names of the body's fields that are limits; subclasses extend it.
    nulls: names of the limits that null removes.
    """

    named: ClassVar[frozenset[str]] = frozenset(LimitOptions.__annotations__)
    nulls: ClassVar[frozenset[str]] = named - _NEVER_NONE

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    burst_s: float | None = None
    max_concurrent: int | None = None
    max_context: int | None = None
    bytes_per_min: int | None = None

    def given(self) -> dict[str, Any]:
        """Return the limits that the request sets, by name; None for a limit to remove."""
        return self.model_dump(include=set(self.named), exclude_unset=True)


class TenantLimitsBody(LimitsBody):
    """Limits and weight of a tenant to set, with the meanings of the fields of TenantRecord."""

    named: ClassVar[frozenset[str]] = frozenset(TenantOptions.__annotations__)
    nulls: ClassVar[frozenset[str]] = named - _NEVER_NONE

    tokens_per_month: int | None = None
    cost_per_month: float | None = None
    weight: float | None = None
    max_adapters: int | None = None
    max_total_bytes: int | None = None
    pin_budget_bytes: int | None = None
    max_rank: int | None = None
    max_adapter_bytes: int | None = None
    files_bytes: int | None = None
    max_files: int | None = None
    open_batches: int | None = None
    batch_lines: int | None = None


class KeyLimitsBody(LimitsBody):
    """Limits and priority of a key to set."""

    named: ClassVar[frozenset[str]] = frozenset(KeyLimitOptions.__annotations__)

    priority: int | None = None


class NewKeyBody(KeyLimitsBody):
    """Request to create a key with limits.

    name: label for people.
    expires_s: seconds from now until the key expires; null: never.
    """

    name: str = ""
    expires_s: Annotated[float, Field(gt=0, le=LONGEST_LIFE_S)] | None = None

    def given(self) -> dict[str, Any]:
        """Return the key's limits, name and expiry (Unix seconds), but only those that the request
        sets.
        """
        own: dict[str, Any] = {"name": self.name} if self.name else {}
        if self.expires_s is not None:
            own["expires"] = time.time() + self.expires_s
        return own | super().given()
