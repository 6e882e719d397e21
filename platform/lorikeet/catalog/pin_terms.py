"""For how long an adapter may be pinned, and what may be said about it."""

from lorikeet.errors import InvalidInput

LONGEST_PIN_S = 3650 * 86400
LONGEST_REASON = 200  # characters


def check_expiry(expires: float | None, now: float) -> None:
    """Both in Unix seconds; None is never. Raises InvalidInput."""
    if expires is None:
        return
    if expires <= now:
        raise InvalidInput(f"expires={expires}: want a time to come", param="expires")
    if expires > now + LONGEST_PIN_S:
        raise InvalidInput(
            f"expires={expires}: want at most {LONGEST_PIN_S // 86400} days from now",
            param="expires",
        )


def check_reason(reason: str) -> None:
    """A reason is shown in terminals, so nothing that would steer one. Raises InvalidInput."""
    if len(reason) > LONGEST_REASON or not reason.isprintable():
        raise InvalidInput(
            f"want at most {LONGEST_REASON} printable characters as reason, no line breaks",
            param="reason",
        )
