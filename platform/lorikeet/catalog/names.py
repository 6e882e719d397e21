"""Rules for the names of tenants, adapters and aliases, and for selectors of versions."""

import re

from lorikeet.errors import InvalidInput

DEFAULT_ALIAS = "prod"

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_VERSION = re.compile(r"[1-9][0-9]{0,8}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME_RULE = (
    "want 1 to 64 of a-z, 0-9, '.', '_' and '-', a letter or digit first, and no two dots in a row"
)


def check_name(value: str, param: str) -> str:
    """Return the name of a tenant or an adapter unchanged. Raises InvalidInput if it is not valid.

    param: name of the request's field, for the error.
    """
    if not _is_name(value):
        raise InvalidInput(f"{param}={_shown(value)}: {_NAME_RULE}", param=param)
    return value


def check_alias(value: str, param: str = "alias") -> str:
    """Return an alias unchanged. Raises InvalidInput if it is not valid.

    param: name of the request's field, for the error.
    """
    if not _is_name(value) or value.isdecimal() or is_digest(value):
        raise InvalidInput(
            f"{param}={_shown(value)}: {_NAME_RULE}; digits alone would be a version, 64 "
            "hexadecimal ones a digest",
            param=param,
        )
    return value


def check_digest(value: str) -> None:
    """Raise InvalidInput unless the value is a SHA-256: 64 lower-case hexadecimal digits."""
    if not is_digest(value):
        raise InvalidInput(
            f"digest={_shown(value)}: want a SHA-256, 64 lower-case hexadecimal digits",
            param="digest",
        )


def is_digest(value: str) -> bool:
    """Whether the value is a SHA-256: 64 lower-case hexadecimal digits."""
    return _DIGEST.fullmatch(value) is not None


def check_selector(value: str, param: str = "selector") -> str:
    """Return an alias or version number unchanged. Raises InvalidInput if it is neither.

    param: name of the request's field, for the error.
    """
    return value if _VERSION.fullmatch(value) else check_alias(value, param)


def is_selector(value: str) -> bool:
    """Whether the value could be an alias, a version number or a digest."""
    is_version = _VERSION.fullmatch(value) is not None
    return is_version or is_digest(value) or (_is_name(value) and not value.isdecimal())


def _is_name(value: str) -> bool:
    return _NAME.fullmatch(value) is not None and ".." not in value


def _shown(value: str) -> str:
    return ascii(value if len(value) <= 80 else value[:77] + "...")
