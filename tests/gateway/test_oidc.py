"""OpenID Connect tokens beside keys, of an issuer that serves its keys over HTTP."""

import asyncio
import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.errors import InvalidSetting
from lorikeet.gateway import oidc_tokens
from lorikeet.gateway.audit import AuditStream
from lorikeet.gateway.oidc_tokens import OidcTokens
from lorikeet.oidc_issuer import OidcIssuer
from lorikeet.settings import Settings
from tests.gateway.conftest import Gateway, chat, serving
from tests.gateway.test_bad_requests import CHAT, error_of
from tests.waiting import eventually

ISSUER, AUDIENCE = "https://id.example/realm", "lorikeet"
MAKE = {
    "RS256": lambda: rsa.generate_private_key(public_exponent=65537, key_size=2048),
    "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate,
}


class Issuer:
    """An issuer of tokens that serves its public keys.

    reads: number of answered requests for its keys.
    extra: further keys to serve.
    """

    def __init__(self) -> None:
        self.keys: dict[str, tuple[str, Any]] = {}
        self.extra: list[dict[str, Any]] = []
        self.reads, self.status = 0, 200
        self.add("first")

    def add(self, name: str, algorithm: str = "ES256") -> None:
        self.keys[name] = (algorithm, MAKE[algorithm]())

    def jwks(self) -> bytes:
        rows = list(self.extra)
        for name, (algorithm, key) in self.keys.items():
            public = jwt.get_algorithm_by_name(algorithm).to_jwk(key.public_key(), as_dict=True)
            rows.append({**public, "kid": name, "alg": algorithm, "use": "sig"})
        return json.dumps({"keys": rows}).encode()

    def token(self, key: str = "first", **claims: Any) -> str:
        """A token for acme's inference; a claim of None is left out."""
        algorithm, private = self.keys[key]
        given = {k: v for k, v in (usual() | claims).items() if v is not None}
        return jwt.encode(given, private, algorithm, {"kid": key})


def usual() -> dict[str, Any]:
    now = time.time()
    return {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "sub": "ann",
        "iat": now,
        "exp": now + 60,
        "tenant": "acme",
        "roles": ["lorikeet-infer"],
    }


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    with running_issuer() as (issuer, _):
        yield issuer


@contextmanager
def running_issuer() -> Iterator[tuple[Issuer, str]]:
    issuer = Issuer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            issuer.reads += 1
            body = issuer.jwks()
            self.send_response(issuer.status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield issuer, f"http://127.0.0.1:{server.server_port}/keys"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class World:
    """A gateway that takes an issuer's tokens; `clock` moves the age of the issuer's keys."""

    def __init__(self, gateway: Gateway, issuer: Issuer) -> None:
        self.gateway, self.issuer, self.ahead_s = gateway, issuer, 0.0

    def clock(self) -> float:
        return time.monotonic() + self.ahead_s

    def ask(self, token: str, method: str = "GET", path: str = "/v1/models") -> httpx.Response:
        body = chat() if method == "POST" else None
        return self.gateway.request(method, path, token, json=body)


@pytest.fixture(scope="module")
def _world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("oidc")
    with running_issuer() as (issuer, url):
        world = World(None, issuer)  # type: ignore[arg-type]
        oidc = OidcTokens(OidcIssuer(ISSUER, AUDIENCE, url), lambda: world.clock())
        audit = AuditStream(str(folder / "audit"), "gateway-1")
        with serving(folder, oidc=oidc, audit=audit) as world.gateway:
            yield world


@pytest.fixture
def world(_world: World) -> World:
    """Return a gateway whose next token may read the issuer's keys."""
    _world.ahead_s += oidc_tokens._GAP_S + 1
    _world.issuer.status = 200
    return _world


@pytest.mark.parametrize("algorithm", MAKE)
def test_a_token_infers_for_the_tenant_that_it_names(world: World, algorithm: str) -> None:
    world.issuer.add(algorithm, algorithm)
    for tenant, status in (("acme", 200), ("globex", 404)):
        token = world.issuer.token(algorithm, tenant=tenant)
        answer = world.gateway.request("POST", CHAT, token, json=chat("acme/support"))
        assert answer.status_code == status
    token = world.issuer.token(algorithm)
    headers = {"x-api-key": token}
    answer = world.gateway.request("POST", CHAT, None, json=chat(), more_headers=headers)
    assert answer.status_code == 200


ROLES = [  # role, and the statuses of requests
    ("lorikeet-infer", 200, 200, 403, 403),
    ("lorikeet-read-only", 200, 403, 403, 403),
    ("lorikeet-admin-read-only", 403, 403, 200, 403),
    ("lorikeet-admin", 403, 403, 200, 200),
    ("admin", 403, 403, 403, 403),
    ("lorikeet-publish", 403, 403, 403, 403),
    ("", 403, 403, 403, 403),
    ("lorikeet-infer lorikeet-admin other", 200, 200, 200, 200),
]


@pytest.mark.parametrize(("role", "reads", "generates", "reads_as_admin", "changes"), ROLES)
def test_roles_allow_what_keys_of_their_scope_allow(
    world: World, role: str, reads: int, generates: int, reads_as_admin: int, changes: int
) -> None:
    for roles in (role, role.split()):
        token = world.issuer.token(roles=roles)
        found = (
            world.ask(token),
            world.ask(token, "POST", CHAT),
            world.ask(token, "GET", "/admin/v1/tenants"),
            world.gateway.request(
                "PATCH", "/admin/v1/tenants/acme", token, json={"max_adapters": 9}
            ),
            world.gateway.request("PUT", f"/v1/adapters/support/versions/{'0' * 64}", token),
        )
        statuses = [reads, generates, reads_as_admin, changes, 403]
        assert [each.status_code for each in found] == statuses


def test_changes_name_the_subject_by_its_hash_alone(world: World) -> None:
    token = world.issuer.token(roles=["lorikeet-admin"], sub="ann@example.org")
    body = {"max_adapters": 7}
    changed = world.gateway.request("PATCH", "/admin/v1/tenants/globex", token, json=body)
    assert changed.is_success
    digest = hashlib.sha256(f"{ISSUER} ann@example.org".encode()).hexdigest()
    line = (world.gateway.folder / "audit").read_text().splitlines()[-1]
    assert json.loads(line)["key"] == f"oidc-{digest[:16]}"
    (entry, *_) = world.gateway.admin("GET", "/log?limit=1").json()["data"]
    assert entry["actor"] == f"oidc-{digest[:16]}"


@pytest.mark.parametrize(
    "claims",
    [
        {"exp": time.time() - 3600, "iat": time.time() - 7200},
        {"exp": None},
        {"exp": "soon"},
        {"exp": [1]},
        {"exp": float("inf")},
        {"iat": time.time() + 3600, "exp": time.time() + 7200},
        {"nbf": time.time() + 3600},
        {"aud": "other"},
        {"aud": ["other", "another"]},
        {"aud": None},
        {"iss": "https://id.example/other"},
        {"iss": None},
        {"sub": None},
    ],
)
def test_a_token_for_others_or_another_time_is_refused(
    world: World, claims: dict[str, Any]
) -> None:
    for roles in (["lorikeet-infer"], ["lorikeet-admin"]):
        token = world.issuer.token(roles=roles, **claims)
        for path in ("/v1/models", "/admin/v1/tenants"):
            error = error_of(world.ask(token, path=path), 401)
            assert error["code"] == "invalid_api_key"


def test_clocks_may_differ_a_little(world: World) -> None:
    now = time.time()
    assert world.ask(world.issuer.token(exp=now - 20, iat=now - 60)).status_code == 200
    assert world.ask(world.issuer.token(iat=now + 20, nbf=now + 20)).status_code == 200
    assert world.ask(world.issuer.token(aud=["other", AUDIENCE])).status_code == 200


def unsigned(header: dict[str, Any], signature: bytes = b"") -> str:
    parts = json.dumps(header).encode(), json.dumps(usual()).encode(), signature
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)


def test_only_signatures_by_the_issuers_keys_count(world: World) -> None:
    issuer, stranger = world.issuer, Issuer()
    public = issuer.keys["first"][1].public_key()
    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    secret = b"0" * 32
    coded = base64.urlsafe_b64encode(secret).rstrip(b"=").decode()
    stranger.add("private")
    private = jwt.get_algorithm_by_name("ES256").to_jwk(stranger.keys["private"][1], as_dict=True)
    issuer.extra = [
        {"kty": "oct", "kid": "shared", "k": coded, "alg": "HS256"},
        {**private, "kid": "private"},
    ]
    issuer.add("new")  # so that the next look-up of it reads these keys, too
    assert world.ask(issuer.token("new")).status_code == 200
    wrong = [
        stranger.token(),
        unsigned({"alg": "none", "kid": "first"}),
        unsigned({"alg": "None", "kid": "first"}),
        unsigned({"alg": "none", "typ": "JWT"}),
        jwt.encode(usual(), secret, "HS256", {"kid": "shared"}),
        stranger.token("private"),
        forged(pem, {"alg": "HS256", "kid": "first"}),
        issuer.token()[:-8] + "AAAAAAAA",
        ".".join([issuer.token().split(".")[0], *stranger.token().split(".")[1:]]),
        jwt.encode(usual(), issuer.keys["first"][1], "ES256"),  # no kid
        jwt.encode(usual(), issuer.keys["first"][1], "ES256", {"kid": "unknown"}),
        jwt.encode(
            usual(), stranger.keys["first"][1], "ES256", {"kid": "first", "jku": "http://x"}
        ),
        "a.b.c",
        "..",
        f"{base64.urlsafe_b64encode(b'[' * 9000).decode()}.e30.e30",
        "e" * 20_000 + ".e30.e30",
    ]
    for token in wrong:
        assert error_of(world.ask(token), 401)["code"] == "invalid_api_key"
        assert error_of(world.ask(token, "GET", "/admin/v1/tenants"), 401)


def forged(secret: bytes, header: dict[str, Any]) -> str:
    """A token whose HMAC has a public key as its secret, which PyJWT itself refuses to make."""
    signed = unsigned(header).rpartition(".")[0]
    mac = hmac.new(secret, signed.encode(), hashlib.sha256).digest()
    return f"{signed}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"


def test_a_token_makes_no_batch_since_it_ends_too_soon(world: World) -> None:
    answer = world.ask(world.issuer.token(), "POST", "/v1/batches")
    assert "make it with a key" in error_of(answer, 403)["message"]


def test_a_token_without_a_tenant_of_the_catalog_is_forbidden(world: World) -> None:
    for tenant in (None, "nobody", 7, "", ["acme"], "../acme"):
        error = error_of(world.ask(world.issuer.token(tenant=tenant)), 403)
        assert error["code"] == "forbidden"


def test_a_token_names_a_tenant_that_was_just_made(world: World) -> None:
    AdapterCatalog(world.gateway.catalog.store).create_tenant("hooli", actor="another gateway")
    assert world.ask(world.issuer.token(tenant="hooli")).status_code == 200


@pytest.mark.parametrize("algorithm", ["RS512", "PS256"])
def test_a_key_without_an_algorithm_serves_each_of_its_kind(world: World, algorithm: str) -> None:
    key = MAKE["RS256"]()
    public = jwt.get_algorithm_by_name("RS256").to_jwk(key.public_key(), as_dict=True)
    world.issuer.extra = [{**public, "kid": algorithm}]
    token = jwt.encode(usual(), key, algorithm, {"kid": algorithm})
    assert world.ask(token).status_code == 200
    other = jwt.encode(usual(), world.issuer.keys["first"][1], "ES256", {"kid": algorithm})
    assert world.ask(other).status_code == 401
    world.issuer.extra = []


def test_a_token_of_a_new_key_is_not_invalid_while_the_issuer_is_away(world: World) -> None:
    assert world.ask(world.issuer.token()).status_code == 200
    world.issuer.add("unread")
    world.issuer.status, world.ahead_s = 500, world.ahead_s + oidc_tokens._GAP_S + 1
    for token in (world.issuer.token("unread"), world.issuer.token("unread")):
        assert error_of(world.ask(token), 503)["code"] == "unavailable"
    assert world.ask(world.issuer.token()).status_code == 200


def test_a_set_without_public_keys_for_signatures_is_an_error() -> None:
    with running_issuer() as (issuer, url):
        (public,) = json.loads(issuer.jwks())["keys"]
        issuer.keys.clear()
        nameless = {name: value for name, value in public.items() if name != "kid"}
        issuer.extra = [nameless, public | {"use": "enc"}, {"kty": "oct", "kid": "s", "k": "AA"}]
        with pytest.raises(ValueError, match="no public key"):
            asyncio.run(oidc_tokens.read_signing_keys(url))


def test_new_keys_are_read_when_a_token_names_them_and_not_too_often(world: World) -> None:
    assert world.ask(world.issuer.token()).status_code == 200
    world.issuer.add("later")
    before = world.issuer.reads
    assert world.ask(world.issuer.token("later")).status_code == 200
    assert world.issuer.reads == before + 1
    stranger = Issuer()
    stranger.add("made-up")
    for _ in range(20):
        assert world.ask(stranger.token("made-up")).status_code == 401
    assert world.issuer.reads == before + 1


def test_a_key_that_the_issuer_withdraws_ends_within_minutes(world: World) -> None:
    world.issuer.add("withdrawn")
    token = world.issuer.token("withdrawn")
    assert world.ask(token).status_code == 200
    del world.issuer.keys["withdrawn"]
    world.ahead_s += oidc_tokens._FRESH_S + 1
    before = world.issuer.reads
    world.ask(token)  # begins a read in the background
    assert eventually(lambda: world.issuer.reads > before)
    assert eventually(lambda: world.ask(token).status_code == 401)


def test_known_keys_last_an_hour_without_the_issuer(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    token = world.issuer.token()
    world.ahead_s += oidc_tokens._FRESH_S + 1
    world.ask(token)
    world.issuer.status = 500
    for _ in range(3):
        world.ahead_s += oidc_tokens._LONGEST_S / 4
        assert world.ask(token).status_code == 200
    world.ahead_s += oidc_tokens._LONGEST_S / 2
    refused = world.ask(token)
    assert error_of(refused, 503)["code"] == "unavailable"
    assert refused.headers["retry-after"]
    assert world.gateway.post(CHAT, chat()).status_code == 200  # keys need no issuer
    assert caplog.messages.count("issuer_unreachable") == 1
    world.issuer.status, world.ahead_s = 200, world.ahead_s + oidc_tokens._GAP_S + 1
    assert world.ask(token).status_code == 200


def test_claims_may_have_other_names_and_lie_deeper(tmp_path: Path) -> None:
    with running_issuer() as (issuer, url):
        named = OidcIssuer(ISSUER, AUDIENCE, url, "https://x.org/team", "realm_access.roles")
        with serving(tmp_path, oidc=OidcTokens(named)) as gateway:
            claims = {
                "tenant": None,
                "roles": None,
                "https://x.org/team": "acme",
                "realm_access": {"roles": ["lorikeet-infer"]},
            }
            token = issuer.token(**claims)
            assert gateway.request("POST", CHAT, token, json=chat()).status_code == 200
            wrong = issuer.token(**claims | {"realm_access": "lorikeet-infer"})
            assert gateway.request("POST", CHAT, wrong, json=chat()).status_code == 403


def test_a_refused_change_of_a_token_is_in_the_audit_stream(world: World) -> None:
    for roles in (["lorikeet-infer"], ["lorikeet-admin-read-only"]):
        token = world.issuer.token(roles=roles, sub="eve")
        refused = world.gateway.request("DELETE", "/admin/v1/pins/acme", token)
        line = json.loads((world.gateway.folder / "audit").read_text().splitlines()[-1])
        assert line["request_id"] == refused.headers["x-request-id"]
        assert (line["status"], line["result"]) == (403, "refused")


def test_without_an_issuer_tokens_are_unknown_keys(unchanged: Gateway, issuer: Issuer) -> None:
    error = error_of(unchanged.request("GET", "/v1/models", issuer.token()), 401)
    assert "unknown" in error["message"]


SETTING = "issuer=https://id.example/realm,audience=lorikeet,jwks=https://id.example/keys?x=1"


def test_the_setting_is_read_and_written() -> None:
    issuer = Settings.from_env({"LORIKEET_OIDC": SETTING}).oidc
    assert issuer == OidcIssuer(
        "https://id.example/realm", "lorikeet", "https://id.example/keys?x=1", "tenant", "roles"
    )
    assert Settings.from_env({"LORIKEET_OIDC": str(issuer)}).oidc == issuer


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("https://id.example", "want issuer=URL,audience=NAME,jwks=URL"),
        (SETTING + ",audience=twice", "each once"),
        (SETTING + ",role=x", "role is unknown"),
        (SETTING.replace("https://id.example/keys", "http://id.example/keys"), "want an https"),
        (SETTING.replace("https://id.example/keys", "file:///keys"), "want an https"),
    ],
)
def test_another_form_of_the_setting_is_refused(setting: str, says: str) -> None:
    with pytest.raises(InvalidSetting, match=says):
        Settings.from_env({"LORIKEET_OIDC": setting})
