"""Verification of OpenID Connect tokens, which requests may send instead of keys.

Only gateways with the setting LORIKEET_OIDC import this module.
"""

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import jwt

from lorikeet.catalog.records import KeyRecord, Scope
from lorikeet.errors import Forbidden, InvalidKey, Unavailable
from lorikeet.oidc_issuer import OidcIssuer
from lorikeet.retry_after import STORE_AWAY_S

log = logging.getLogger(__name__)

ALGORITHMS = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA"),
)
"""Accepted signature algorithms. All are asymmetric."""
ROLES = {
    "lorikeet-infer": (False, Scope.INFER),
    "lorikeet-read-only": (False, Scope.READ_ONLY),
    "lorikeet-admin": (True, Scope.ADMIN),
    "lorikeet-admin-read-only": (True, Scope.READ_ONLY),
}
"""Meaning of each role in a token: whether the role is for admins, and its scope."""
_SKEW_S = 30.0
"""Seconds by which the issuer's clock may differ from the gateway's."""
_FRESH_S = 300.0
"""Age in seconds from which the issuer's keys are read again when a token needs one."""
_LONGEST_S = 3600.0
"""Seconds for which the last read keys stay in use while the issuer does not answer."""
_GAP_S = 10.0
"""Minimum seconds between two reads of the issuer's keys, however many unknown keys tokens name."""
_READ_S = 5.0
_MOST_BYTES = 256 * 2**10
_LONGEST_TOKEN = 16 * 2**10  # characters
_SECRET = {"k", "d"}
"""Members of secret and of private keys in a JSON Web Key Set (RFC 7518, section 6)."""


class OidcTokens:
    """Verifier of one issuer's tokens. For use in one event loop."""

    def __init__(self, issuer: OidcIssuer, clock: Callable[[], float] = time.monotonic) -> None:
        """Set up a verifier that reads the issuer's public keys when a token needs one.

        clock: returns monotonic seconds.
        """
        self._issuer = issuer
        self._keys = SigningKeys(issuer.jwks, clock)

    async def key_of(self, token: str, *, of_admin: bool) -> KeyRecord:
        """Verify a token; return a key with the tenant and scopes that its claims name.

        The key is in no catalog. Its id is `oidc-` and 16 hex digits of the SHA-256 of issuer and
        subject: equal for all tokens of a person, without naming the person. It has no scope if
        the token has no role for the request.

        of_admin: the request is for the admin API. Roles of tenants then count for nothing, nor do
            roles of admins for other requests.

        Raises InvalidKey for a token that is not valid here, Forbidden for a tenant's request whose
        token names no tenant, Unavailable if the issuer's keys cannot be read.
        """
        claims = await self._verified(token)
        roles = _words(_claim(claims, self._issuer.roles))
        found = (ROLES[role] for role in roles if role in ROLES)
        scopes = frozenset(scope for is_admins, scope in found if is_admins is of_admin)
        tenant = None if of_admin else _claim(claims, self._issuer.tenant)
        if not of_admin and not isinstance(tenant, str):
            raise Forbidden(
                f"this token names no tenant: its claim {self._issuer.tenant!r} wants a tenant's "
                "name"
            )
        subject = f"{claims['iss']} {claims['sub']}".encode(errors="surrogatepass")
        name = f"oidc-{hashlib.sha256(subject).hexdigest()[:16]}"
        return KeyRecord(name, tenant, scopes, "", float(claims["iat"]))

    def check_role(self, key: KeyRecord, *, of_admin: bool) -> None:
        """Raise Forbidden if the key of a token has no scope, naming the roles that give one.

        of_admin: the request is for the admin API.
        """
        if not key.scopes:
            wanted = ", ".join(role for role, (admins, _) in ROLES.items() if admins is of_admin)
            raise Forbidden(
                f"this token has no role for this request: its claim {self._issuer.roles!r} "
                f"wants one of {wanted}"
            )

    async def _verified(self, token: str) -> Mapping[str, Any]:
        """Return the claims of a token whose signature, issuer, audience and times are valid.

        Raises InvalidKey for another token, Unavailable if the issuer's keys cannot be read.
        """
        try:
            if len(token) > _LONGEST_TOKEN:
                raise jwt.InvalidTokenError("it is too long")
            header = jwt.get_unverified_header(token)
            name, algorithm = header.get("kid"), header.get("alg")
            if algorithm not in ALGORITHMS:
                allowed = ", ".join(ALGORITHMS)
                raise jwt.InvalidAlgorithmError(f"its algorithm is not one of {allowed}")
            key = await self._keys.find(name) if isinstance(name, str) else None
            if key is None:
                raise jwt.InvalidTokenError("its kid names no key of the issuer")
            claims: dict[str, Any] = jwt.decode(
                token,
                jwt.PyJWK(key, key.get("alg", algorithm)),
                algorithms=[algorithm],
                audience=self._issuer.audience,
                issuer=self._issuer.issuer,
                leeway=_SKEW_S,
                options={"require": ["exp", "iat", "iss", "aud", "sub"]},
            )
        except (jwt.PyJWTError, TypeError, OverflowError, RecursionError) as error:
            raise InvalidKey(
                f"this token is not valid here ({error}): get another from "
                f"{self._issuer.issuer} for the audience {self._issuer.audience}"
            ) from error
        return claims


class SigningKeys:
    """Public keys of an issuer by their ids, read when a token needs one. For use in one event
    loop.

    While reads fail, the keys of the last read stay in use for _LONGEST_S. The first failed read is
    logged, and the first that succeeds again.
    """

    def __init__(self, url: str, clock: Callable[[], float]) -> None:
        """Set up an empty set of keys.

        url: address of the issuer's JSON Web Key Set.
        clock: returns monotonic seconds.
        """
        self._url, self._clock = url, clock
        self._keys: dict[str, dict[str, Any]] = {}
        self._read_s = self._begun_s = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        self._failing = False

    async def find(self, name: str) -> dict[str, Any] | None:
        """Return the key with this id as a JSON Web Key; None if the issuer has none.

        Keys older than _FRESH_S are read again in the background. This function waits for a read if
        the id is unknown or the keys are older than _LONGEST_S. Raises Unavailable if the keys
        cannot be read, and are older than _LONGEST_S or lack this key.
        """
        now = self._clock()
        known = self._keys.get(name)
        if known is None or now - self._read_s > _FRESH_S:
            if self._reading is None and now - self._begun_s > _GAP_S:
                self._begun_s = now
                self._reading = asyncio.create_task(self._read())
            if self._reading is not None and (known is None or now - self._read_s > _LONGEST_S):
                await asyncio.shield(self._reading)
        lacking = self._failing and name not in self._keys
        if lacking or self._clock() - self._read_s > _LONGEST_S:
            raise Unavailable(
                "the keys of this token's issuer cannot be read now: send it again later",
                retry_after_s=STORE_AWAY_S,
            )
        return self._keys.get(name)

    async def _read(self) -> None:
        try:
            async with asyncio.timeout(_READ_S):
                self._keys = await read_signing_keys(self._url)
            self._read_s = self._clock()
            if self._failing:
                log.info("issuer_reachable", extra={"jwks": self._url})
            self._failing = False
        except Exception as error:  # on any error the last keys stay in use
            if not self._failing:
                log.warning("issuer_unreachable", extra={"jwks": self._url, "error": repr(error)})
            self._failing = True
        finally:
            self._reading = None


async def read_signing_keys(url: str) -> dict[str, dict[str, Any]]:
    """Read a JSON Web Key Set; return its public keys for signatures, by their ids. Secret and
    private keys, which should not be there, are left out.

    url: address of the set.

    Raises httpx.HTTPError; ValueError for a status other than 200, more than _MOST_BYTES, and a set
    without such keys; and other exceptions for a body that is no such set.
    """
    body = bytearray()
    # in a thread: a client begins by reading all certificates that this machine trusts
    made = await asyncio.to_thread(httpx.AsyncClient, timeout=_READ_S)
    async with made as client, client.stream("GET", url) as answer:
        if answer.status_code != httpx.codes.OK:
            raise ValueError(f"status {answer.status_code}")
        async for part in answer.aiter_bytes():
            body += part
            if len(body) > _MOST_BYTES:
                raise ValueError(f"more than {_MOST_BYTES} bytes")
    keys = {
        key["kid"]: key
        for key in json.loads(body)["keys"]
        if key.get("kid") and not _SECRET & key.keys() and key.get("use", "sig") == "sig"
    }
    if not keys:
        raise ValueError("no public key for signatures that has a kid")
    return keys


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    """Return the claim of this name, else the nested one that a path with dots leads to, such as
    realm_access.roles; None if there is neither.
    """
    if name in claims:
        return claims[name]
    value: Any = claims
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _words(value: Any) -> list[str]:
    """Return the roles in a claim, which is a list of strings or one string with spaces between."""
    words = value.split() if isinstance(value, str) else value if isinstance(value, list) else []
    return [word for word in words if isinstance(word, str)]
