"""Keys sent as the password of HTTP's Basic authentication, by clients that take only a URL."""

from base64 import b64decode


def as_bearer(authorization: str) -> str:
    """Return a Basic `Authorization` header as the Bearer header of its password.

    Other headers are returned unchanged, and so are malformed ones.
    """
    kind, _, coded = authorization.partition(" ")
    if kind.lower() != "basic":
        return authorization
    try:
        credentials = b64decode(coded.strip(), validate=True).decode()
    except ValueError:
        return authorization
    return f"Bearer {credentials.partition(':')[2]}"
