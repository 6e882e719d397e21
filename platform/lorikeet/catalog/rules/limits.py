"""Options of tenants and keys: limits, weights and priorities, and their allowed values.

An option that a change does not give keeps its value. None removes a limit.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from typing_extensions import TypedDict  # typing's own is not read by pydantic before Python 3.12

from lorikeet.catalog.records import KeyRecord, Limits, Scope, TenantRecord
from lorikeet.errors import InvalidInput

LONGEST_BURST_S = 86400
LONGEST_LIFE_S = 3650 * 86400
"""Longest life of a key or a pin that expires, in seconds."""
LONGEST_KEY_NAME = 64  # characters
HIGHEST_PRIORITY = 1000
"""Highest priority of a key or a pin; the lowest is -1000, the default 0."""
LIGHTEST, HEAVIEST = 0.001, 1000.0
_CHEAPEST, _DEAREST = 1e-6, 10**9
_MOST_PATTERNS = 64
_PATTERN = re.compile(r"[a-z0-9._*-]{1,64}")
_PATTERN_OF_ANY = re.compile(r"([a-z0-9._*-]{1,64}/)?[a-z0-9._*-]{1,64}")
_LARGEST = 10**15  # exact as a float too, as some clients parse numbers


class LimitOptions(TypedDict, total=False):
    """Limits that tenants and keys have in common: rates, burst, concurrency, context (see Limits).

    An option that is left out keeps its value; None removes the limit.
    """

    requests_per_min: int | None
    tokens_per_min: int | None
    burst_s: float
    max_concurrent: int | None
    max_context: int | None
    bytes_per_min: int | None


class TenantOptions(LimitOptions, total=False):
    """Limits and weight of a tenant, with the meanings of the fields of Limits and TenantRecord."""

    tokens_per_month: int | None
    cost_per_month: float | None
    weight: float
    max_adapters: int | None
    max_total_bytes: int | None
    pin_budget_bytes: int | None
    max_rank: int | None
    max_adapter_bytes: int | None
    files_bytes: int | None
    max_files: int | None
    open_batches: int | None
    batch_lines: int | None


class KeyLimitOptions(LimitOptions, total=False):
    """Options of a key that may change after its creation: limits and priority."""

    priority: int


class KeyOptions(KeyLimitOptions, total=False):
    """Options of a new key: limits, priority and those below.

    name: label for display.
    expires: end of the key, Unix seconds; None: never.
    adapters: patterns of the adapter names that the key may push or use.
    """

    name: str
    expires: float | None
    adapters: tuple[str, ...]


Record = TypeVar("Record", TenantRecord, KeyRecord)

_OF_LIMITS = frozenset(each.name for each in fields(Limits))


def with_options(record: Record, options: Mapping[str, Any]) -> Record:
    """Return a tenant's or key's record with these options set; its other fields stay."""
    limits = {name: value for name, value in options.items() if name in _OF_LIMITS}
    own = {name: value for name, value in options.items() if name not in _OF_LIMITS}
    return replace(record, limits=replace(record.limits, **limits), **own)


def options_of(record: TenantRecord | KeyRecord) -> dict[str, Any]:
    """Return the options of a record that differ from their defaults, by name."""
    names = (TenantOptions if isinstance(record, TenantRecord) else KeyOptions).__annotations__
    return _said(record.limits, names) | _said(record, names)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise InvalidInput unless each option of a tenant or a key has an allowed value."""
    for name, value in options.items():
        want = _unmet(name, value)
        if want is not None:
            raise InvalidInput(f"{name}={value}: want {want}", param=name)


def check_adapter_patterns(
    tenant: str | None, scopes: Collection[Scope], adapters: Collection[str]
) -> None:
    """Raise InvalidInput unless the scopes and adapter patterns of a new key fit together.

    A publish key belongs to a tenant, has no other scope and at least one pattern. Other keys of
    tenants may have patterns, also such as `lab/tone` for another tenant's adapters. Admins' keys
    have none.
    """
    publishes = Scope.PUBLISH in scopes
    if publishes and (tenant is None or len(scopes) > 1):
        raise InvalidInput(
            "scope 'publish' is for a tenant's key that has no other: name a tenant", param="scopes"
        )
    if adapters and tenant is None:
        raise InvalidInput(
            "adapters: an admin's key uses none, only tenants' keys have patterns", param="adapters"
        )
    if len(adapters) > _MOST_PATTERNS or (publishes and not adapters):
        raise InvalidInput(
            f"a key wants at most {_MOST_PATTERNS} patterns of adapters' names, such as policy-*, "
            "and a publish key at least one",
            param="adapters",
        )
    for pattern in adapters:
        if not (_PATTERN if publishes else _PATTERN_OF_ANY).fullmatch(pattern):
            tenants = "" if publishes else ", behind tenant/ for one that another tenant shares"
            raise InvalidInput(
                f"adapters={pattern[:80]!a}: want the name of an adapter, in which * stands "
                f"for any characters: policy-*{tenants}",
                param="adapters",
            )


def check_may_have_limits(tenant: str | None, options: Mapping[str, Any]) -> None:
    """Raise InvalidInput if an admin's key (tenant None) is given limits."""
    if tenant is None and (
        limits := sorted(KeyLimitOptions.__annotations__.keys() & options.keys())
    ):
        raise InvalidInput("limits are for tenants' keys, and this is an admin's", param=limits[0])


def check_key_options(tenant: str | None, options: KeyOptions, now: float) -> None:
    """Raise InvalidInput unless a new key may have these options.

    tenant: owner of the key; None for an admin's key.
    now: Unix seconds.
    """
    check_options(options)
    check_may_have_limits(tenant, options)
    check_text(options.get("name", ""), LONGEST_KEY_NAME, "name")
    check_expiry(options.get("expires"), now)


def check_expiry(expires: float | None, now: float) -> None:
    """Raise InvalidInput unless a key or a pin may expire at `expires`.

    expires: Unix seconds; None: never.
    now: Unix seconds.
    """
    if expires is not None and not now < expires <= now + LONGEST_LIFE_S:
        raise InvalidInput(
            f"expires={expires}: want a time to come, within {LONGEST_LIFE_S // 86400} days",
            param="expires",
        )


def check_text(text: str, longest: int, param: str) -> None:
    """Raise InvalidInput unless a text is printable and at most `longest` characters.

    param: name of the request's field, for the error.
    """
    if len(text) > longest or not text.isprintable():
        raise InvalidInput(
            f"want at most {longest} printable characters as {param}, no line breaks", param=param
        )


def _unmet(name: str, value: Any) -> str | None:
    """Return the allowed values of option `name`, as text for an error; None if `value` is
    allowed.
    """
    match name:
        case "weight":
            fine = LIGHTEST <= value <= HEAVIEST
            return None if fine else f"{LIGHTEST:g} to {HEAVIEST:g}"
        case "priority":
            fine = abs(value) <= HIGHEST_PRIORITY
            return None if fine else f"-{HIGHEST_PRIORITY} to {HIGHEST_PRIORITY}"
        case "burst_s":
            return None if 1 <= value <= LONGEST_BURST_S else f"1 to {LONGEST_BURST_S} seconds"
        case "cost_per_month":
            fine = value is None or _CHEAPEST <= value <= _DEAREST
            return None if fine else f"{_CHEAPEST:f} to {_DEAREST}, or none"
        case "name" | "expires" | "adapters":
            return None
        case _:
            fine = value is None or 1 <= value <= _LARGEST
            return None if fine else f"an integer from 1 to {_LARGEST}, or none"


def _said(record: Any, names: Collection[str]) -> dict[str, Any]:
    return {
        each.name: value
        for each in fields(record)
        if each.name in names and (value := getattr(record, each.name)) != each.default
    }
