"""Client of the admin API: JSON in, JSON out, failures as LorikeetError."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NoReturn

import httpx
import typer

from lorikeet.errors import Conflict, LorikeetError, NotFound

DEFAULT_SERVER = "http://127.0.0.1:8001"
_PREFIX = "/admin/v1"
_CONNECT_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 600.0  # an upload is validated and stored before it is answered
_AWAY = (502, 503, 504)  # a proxy's answers while its gateway is down

Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
Json = dict[str, Any]


class ServerUnavailable(LorikeetError):
    """The server gave no complete answer. An idempotent call may be repeated."""


class _Answer(Json):
    """JSON object of an answer. Raises LorikeetError for a member that the answer lacks."""

    def __missing__(self, member: str) -> NoReturn:
        raise LorikeetError(
            f"the service's answer has no {member!r}: the service is older than this command. "
            "Upgrade it, or see what it answers with --json"
        )


class AdminClient:
    """Client of one server's admin API with one key. Opens a connection for each call.

    Every call raises ServerUnavailable without a complete answer, and Conflict or another
    LorikeetError if the server answers with an error.
    """

    def __init__(self, address: str, key: str | None) -> None:
        self.address = address.rstrip("/")
        self._key = key

    def get(self, path: str, query: Mapping[str, str | None] | None = None) -> Json:
        """GET a path, and return the JSON."""
        return self._parse(self._ask("GET", path, query=query))

    def post(self, path: str, body: Json) -> Json:
        """POST a body, and return the JSON."""
        return self._parse(self._ask("POST", path, content=json.dumps(body).encode()))

    def post_new(self, path: str, body: Json) -> tuple[Json, bool]:
        """POST a body; return the JSON, and whether the status was 201 Created."""
        answer = self._ask("POST", path, content=json.dumps(body).encode())
        return self._parse(answer), answer.status_code == httpx.codes.CREATED

    def put(self, path: str, body: Json) -> Json:
        """PUT a body, and return the JSON."""
        return self._parse(self._ask("PUT", path, content=json.dumps(body).encode()))

    def patch(self, path: str, body: Json) -> Json:
        """PATCH with a body, and return the JSON."""
        return self._parse(self._ask("PATCH", path, content=json.dumps(body).encode()))

    def delete(self, path: str) -> Json:
        """DELETE a path, and return the JSON."""
        return self._parse(self._ask("DELETE", path))

    def send(self, path: str, chunks: Iterable[bytes], headers: Mapping[str, str]) -> Json:
        """PUT a stream of bytes, and return the JSON.

        headers: must include content-length.
        """
        binary = {"content-type": "application/octet-stream", **headers}
        return self._parse(self._ask("PUT", path, content=chunks, headers=binary))

    def _ask(
        self,
        method: Method,
        path: str,
        *,
        query: Mapping[str, str | None] | None = None,
        content: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        key = self._checked_key()
        try:
            return httpx.request(
                method,
                f"{self.address}{_PREFIX}{path}",
                params={name: value for name, value in (query or {}).items() if value is not None},
                content=content,
                headers={
                    "authorization": f"Bearer {key}",
                    "content-type": "application/json",
                    **(headers or {}),
                },
                timeout=httpx.Timeout(_ANSWER_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S),
            )
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            if "SSL" in str(error):
                raise ServerUnavailable(
                    f"no TLS with {self.address}: {error}: give its address with http://, or"
                    " set SSL_CERT_FILE to the certificate of its authority"
                ) from error
            raise ServerUnavailable(
                f"nothing answers at {self.address}: start the service, or give its address"
                " with --server or LORIKEET_SERVER"
            ) from error
        except (httpx.UnsupportedProtocol, httpx.InvalidURL, UnicodeEncodeError) as error:
            raise LorikeetError(
                f"cannot ask {self.address}: {str(error).rstrip('.')}: give --server or"
                " LORIKEET_SERVER an address such as http://127.0.0.1:8001"
            ) from error
        except httpx.HTTPError as error:
            raise ServerUnavailable(f"cannot ask {self.address}: {error}") from error

    def _checked_key(self) -> str:
        if not self._key:
            raise LorikeetError(
                "no admin key: set LORIKEET_ADMIN_KEY or give --key before the command"
                " (`lorikeet init` makes the first key)"
            )
        if not (self._key.isascii() and self._key.isprintable()):
            raise LorikeetError(
                "the admin key holds characters that no key has: copy it again, as it was shown,"
                " into LORIKEET_ADMIN_KEY or --key"
            )
        return self._key

    def _parse(self, answer: httpx.Response) -> Json:
        try:
            body = answer.json(object_hook=_Answer) if answer.content else _Answer()
            problem = dict(body)["error"] if answer.is_error else None
        except (ValueError, KeyError, TypeError) as error:
            away = answer.status_code in _AWAY
            raise (ServerUnavailable if away else LorikeetError)(
                f"{self.address} answered {answer.status_code}, but not with Lorikeet's JSON:"
                " is that the admin listener's address?"
            ) from error
        if problem is not None:
            raise self._failure(problem)
        return _Answer(body)

    def _failure(self, problem: Mapping[str, Any]) -> LorikeetError:
        code, message = problem.get("code"), str(problem.get("message"))
        if code == NotFound.code and message.startswith(f"there is no {_PREFIX}"):
            message = f"there is no admin API here: is {self.address} the admin listener?"
        kind = Conflict if code == Conflict.code else LorikeetError
        failure = kind(message, param=problem.get("param"))
        failure.code = str(code)
        return failure


def admin(ctx: typer.Context) -> AdminClient:
    """Return the client that the root command has made from its options."""
    server = ctx.obj
    assert isinstance(server, AdminClient)
    return server
