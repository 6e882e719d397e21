"""For how long and how urgently adapters may be pinned, and what may be said about it."""

from typing import TypedDict, Unpack

from lorikeet.catalog.changes import Pinned
from lorikeet.catalog.names import DEFAULT_ALIAS, check_name, check_selector
from lorikeet.errors import InvalidInput
from lorikeet_engine.adapter import Residency

LONGEST_PIN_S = 3650 * 86400
LONGEST_REASON = 200  # characters
HIGHEST_PRIORITY = 1000
"""And the lowest is as far below 0, which is what a pin has that says nothing."""


class PinTerms(TypedDict, total=False):
    """What a pin may say; see PinRecord. What it does not say is as Pinned has it."""

    selector: str
    tier: Residency
    replicas: int | None
    priority: int
    reason: str
    expires: float | None


def pin_change(tenant: str, name: str | None, now: float, **terms: Unpack[PinTerms]) -> Pinned:
    """A pin that makes sense by itself. now: Unix seconds. Raises InvalidInput."""
    change = Pinned(tenant=tenant, name=name, **terms)
    check_name(tenant, "tenant")
    if name is not None:
        check_name(name, "name")
    elif change.selector != DEFAULT_ALIAS:
        raise InvalidInput(
            f"selector={change.selector!r}: a tenant's pin keeps what {DEFAULT_ALIAS} points at",
            param="selector",
        )
    check_selector(change.selector)
    if change.tier is Residency.REMOTE:
        raise InvalidInput("tier=remote promises nothing: want disk, host or gpu", param="tier")
    if change.replicas is not None and change.replicas < 1:
        raise InvalidInput(
            f"replicas={change.replicas}: want an integer ≥ 1, or none", param="replicas"
        )
    if abs(change.priority) > HIGHEST_PRIORITY:
        raise InvalidInput(
            f"priority={change.priority}: want -{HIGHEST_PRIORITY} to {HIGHEST_PRIORITY}",
            param="priority",
        )
    _check_expiry(change.expires, now)
    _check_reason(change.reason)
    return change


def _check_expiry(expires: float | None, now: float) -> None:
    if expires is None:
        return
    if expires <= now:
        raise InvalidInput(f"expires={expires}: want a time to come", param="expires")
    if expires > now + LONGEST_PIN_S:
        raise InvalidInput(
            f"expires={expires}: want at most {LONGEST_PIN_S // 86400} days from now",
            param="expires",
        )


def _check_reason(reason: str) -> None:
    """A reason is shown in terminals, so nothing that would steer one."""
    if len(reason) > LONGEST_REASON or not reason.isprintable():
        raise InvalidInput(
            f"want at most {LONGEST_REASON} printable characters as reason, no line breaks",
            param="reason",
        )
