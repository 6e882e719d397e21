"""The secrets of API keys: shown once, kept only as a hash.

A secret holds 256 random bits, so a plain SHA-256 protects it: there is nothing to guess that a
slow hash would make dearer.
"""

import hashlib
import secrets

_PREFIX = "lk_"


def new_secret() -> str:
    """Make a secret that is safe in a header and easy to find in a leaked file."""
    return _PREFIX + secrets.token_urlsafe(32)


def new_key_id() -> str:
    """Make an id to name a key by; it is no secret."""
    return "key-" + secrets.token_hex(8)


def secret_sha256(secret: str) -> str:
    """64 hex digits by which the catalog finds a key."""
    return hashlib.sha256(secret.encode()).hexdigest()
