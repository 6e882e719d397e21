"""Setting LORIKEET_OIDC: issuer of OpenID Connect tokens that are accepted beside keys."""

import re
from dataclasses import dataclass, fields

_URL = re.compile(r"https://[^\s/]+(/\S*)?|http://(127\.0\.0\.1|localhost)(:[0-9]+)?(/\S*)?")


@dataclass(frozen=True, slots=True)
class OidcIssuer:
    """Issuer of tokens, and the claims that name a token's tenant and roles.

    issuer: value that the claim `iss` must have.
    audience: value that the claim `aud` must have, or contain if it is a list.
    jwks: address of the issuer's public keys, a JSON Web Key Set.
    tenant: claim with the tenant's name.
    roles: claim with the roles, a list or a string with spaces between.
    """

    issuer: str
    audience: str
    jwks: str
    tenant: str = "tenant"
    roles: str = "roles"

    def __str__(self) -> str:
        """Return the setting's text, which `parse_oidc_issuer` parses."""
        return ",".join(f"{each.name}={getattr(self, each.name)}" for each in fields(self))


def parse_oidc_issuer(value: object) -> object:
    """Parse `issuer=…,audience=…,jwks=…,tenant=claim,roles=claim` into an OidcIssuer.

    Raises ValueError for another form, and for another machine's keys without TLS.
    """
    if not isinstance(value, str):
        return value
    pairs = [item.partition("=") for item in value.split(",")]
    given = {name.strip(): text.strip() for name, _, text in pairs}
    known = [each.name for each in fields(OidcIssuer)]
    if len(given) < len(pairs) or not all(given.values()) or not set(known[:3]) <= given.keys():
        raise ValueError("want issuer=URL,audience=NAME,jwks=URL, each once")
    unknown = sorted(given.keys() - set(known))
    if unknown:
        raise ValueError(f"{unknown[0]} is unknown: there are {', '.join(known)}")
    if not _URL.fullmatch(given["jwks"]):
        raise ValueError(f"jwks={given['jwks']}: want an https address, such as https://id/keys")
    return OidcIssuer(**given)
