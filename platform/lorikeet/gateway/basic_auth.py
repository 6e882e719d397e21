"""Keys sent by HTTP's Basic authentication, by clients that take only a URL.

The password is the key of a request. A publish key may be the user's name beside it, so that one
URL both pushes and generates.
"""

from base64 import b64decode

_SECRET = "lk_"


def as_bearer(authorization: str, *, publishing: bool = False) -> str:
    """Return a Basic `Authorization` header as the Bearer header of its key.

    Other headers are returned unchanged, and so are malformed ones.

    publishing: the request needs a publish key: a user's name that is a key is then taken instead
        of the password.
    """
    kind, _, coded = authorization.partition(" ")
    if kind.lower() != "basic":
        return authorization
    try:
        credentials = b64decode(coded.strip(), validate=True).decode()
    except ValueError:
        return authorization
    user, _, password = credentials.partition(":")
    return f"Bearer {user if publishing and user.startswith(_SECRET) else password}"
