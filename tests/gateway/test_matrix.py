"""Access to every route and command with every kind of key.

A route or command in none of these tables fails the first tests. Add it to the table of its plane,
with a request that names something.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import httpx
import pytest
import typer
from fastapi.routing import iter_route_contexts
from typer.main import get_command
from typer.testing import CliRunner

from lorikeet.apis.errors import TINKER
from lorikeet.batch_store import BatchStore
from lorikeet.catalog.records import Scope
from lorikeet.cli import app as command
from lorikeet.gateway.app import create_app
from lorikeet.gateway.services import Services
from lorikeet.gateway.tinker import requests as tinker
from lorikeet.gateway.vllm.requests import (
    DETOKENIZE,
    GENERATE,
    LOAD,
    NO_OPS,
    QUESTIONS,
    REFUSED,
    SKYRL_LOAD,
    TOKENIZE,
    UNLOAD,
)
from tests.gateway.conftest import LIMITS, Gateway, ReplayEngines, chat, make_peft
from tests.gateway.test_bad_requests import error_of

Route = tuple[str, str]

OPEN: set[Route] = {
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/health"),
    ("GET", "/ui"),
    ("GET", "/ui/{name}"),
}

RERANK = ("/v1/rerank", "/v2/rerank", "/rerank")
SCORING = ("/v1/classify", "/v1/score", "/v1/pooling", "/classify", "/score", "/pooling")
POOLING = (*SCORING, *RERANK)
"""Paths for adapters with a head. The matrix' adapter has none, so its owner gets a 400."""

TENANTS: Mapping[Route, Callable[[str, str], tuple[str, Any]] | None] = {
    ("POST", "/v1/chat/completions"): lambda model, _: ("/v1/chat/completions", chat(model)),
    ("POST", "/v1/completions"): lambda model, _: (
        "/v1/completions",
        {"model": model, "prompt": "hello"},
    ),
    ("POST", "/v1/responses"): lambda model, _: (
        "/v1/responses",
        {"model": model, "input": "hello"},
    ),
    ("POST", "/v1/responses/input_tokens"): lambda model, _: (
        "/v1/responses/input_tokens",
        {"model": model, "input": "hello"},
    ),
    ("GET", "/v1/responses/{response_id}"): lambda _, asked: (f"/v1/responses/resp_{asked}", None),
    ("DELETE", "/v1/responses/{response_id}"): lambda _, asked: (
        f"/v1/responses/resp_{asked}",
        None,
    ),
    ("GET", "/v1/responses/{response_id}/input_items"): lambda _, asked: (
        f"/v1/responses/resp_{asked}/input_items",
        None,
    ),
    ("POST", "/v1/messages"): lambda model, _: ("/v1/messages", chat(model, max_tokens=9)),
    ("POST", "/v1/messages/count_tokens"): lambda model, _: (
        "/v1/messages/count_tokens",
        chat(model),
    ),
    **{
        ("POST", path): lambda model, _, path=path: (
            path,
            {"model": model}
            | ({"query": "a", "documents": ["b"]} if path in RERANK else {"input": "hello"}),
        )
        for path in POOLING
    },
    ("POST", "/v1/embeddings"): lambda model, _: (
        "/v1/embeddings",
        {"model": model, "input": "hello"},
    ),
    ("GET", "/v1/models"): None,
    ("GET", "/v1/models/{model}"): lambda model, _: (f"/v1/models/{model}", None),
    ("GET", "/v1/requests/{request_id}"): lambda _, asked: (f"/v1/requests/{asked}", None),
    ("GET", "/v1/requests"): None,
    ("GET", "/v1/limits"): None,
    ("GET", "/v1/usage"): None,
    ("GET", "/v1/openapi.json"): None,
    ("POST", TOKENIZE): lambda model, _: (TOKENIZE, {"model": model, "prompt": "hello"}),
    ("POST", DETOKENIZE): lambda model, _: (DETOKENIZE, {"model": model, "tokens": [4, 5]}),
    ("POST", GENERATE): lambda model, _: (
        GENERATE,
        {"model": model, "token_ids": [4, 5], "sampling_params": {}},
    ),
    **{("GET", path): None for path in (tinker.CAPABILITIES, tinker.HEALTH)},
    ("GET", tinker.SAMPLER): lambda model, _: (
        tinker.SAMPLER.format(sampler_id=tinker.sampling_session_id(model)),
        None,
    ),
    ("POST", tinker.CREATE_SAMPLING_SESSION): lambda model, _: (
        tinker.CREATE_SAMPLING_SESSION,
        {"model_path": f"tinker://{model}"},
    ),
    ("POST", tinker.WEIGHTS_INFO): lambda model, _: (
        tinker.WEIGHTS_INFO,
        {"tinker_path": f"tinker://{model}"},
    ),
    ("POST", tinker.SAMPLE): lambda model, _: (
        tinker.SAMPLE,
        {
            "sampling_session_id": tinker.sampling_session_id(model),
            "prompt": {"chunks": [{"tokens": [4, 5]}]},
            "sampling_params": {},
        },
    ),
}
"""Path and body of a request for a model, or for a request about one, by tenants' route.

None: the route names nothing.
"""

NAMING_MODELS = sorted(
    route for route, make in TENANTS.items() if make and make("a", "") != make("b", "")
)
"""Tenants' routes that name a model."""

TINKERS: Mapping[Route, int] = {
    **{("POST", path): 200 for path in (tinker.CONFIG, tinker.DYNAMIC_CONFIG)},
    **{("POST", path): 200 for path in (tinker.CREATE_SESSION, tinker.HEARTBEAT)},
    **{("POST", path): 200 for path in (tinker.FINISH_SESSION, tinker.TELEMETRY, tinker.CANCEL)},
    ("POST", tinker.RETRIEVE): 410,
    **{("POST", path): 400 for path in tinker.TRAINING},
}
"""Status for a tenant that infers, by Tinker's routes that name no model."""

FILES: Mapping[Route, Callable[["Uploaded"], dict[str, Any]]] = {
    ("POST", "/v1/files"): lambda _: UPLOAD,
    ("GET", "/v1/files"): lambda _: {},
    ("GET", "/v1/files/{file_id}"): lambda _: {},
    ("GET", "/v1/files/{file_id}/content"): lambda _: {},
    ("DELETE", "/v1/files/{file_id}"): lambda _: {},
    ("POST", "/v1/batches"): lambda one: {"json": BATCH | {"input_file_id": one.file_id}},
    ("GET", "/v1/batches"): lambda _: {},
    ("GET", "/v1/batches/{batch_id}"): lambda _: {},
    ("POST", "/v1/batches/{batch_id}/cancel"): lambda _: {},
}
"""Content of a request by tenants' route of files and batches."""

BATCH = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
UPLOAD = {"files": {"file": ("lines.jsonl", b"{}")}, "data": {"purpose": "batch"}}

PUBLISHERS: set[Route] = {
    ("PUT", "/v1/adapters/{name}/versions/{digest}"),
    ("GET", "/v1/adapters/{name}/versions/{digest}"),
}
"""Routes for publish keys that name a version. Read-only keys may GET."""

VLLMS: set[Route] = {
    *(("POST", path) for path in (LOAD, SKYRL_LOAD, UNLOAD, *NO_OPS, *REFUSED)),
    *(("GET", path) for path in QUESTIONS),
}
"""vLLM's routes for publish keys. Read-only keys may GET."""

SWITCHED: set[Route] = {
    *VLLMS,
    *(("POST", path) for path in (TOKENIZE, DETOKENIZE, GENERATE)),
    *TINKERS,
    *(route for route in TENANTS if route[1].startswith(TINKER)),
}
"""Routes that exist only with LORIKEET_LOAD_FROM or LORIKEET_TINKER."""

ADMINS: set[Route] = {
    ("GET", "/adapters"),
    ("GET", "/adapters/{tenant}/{name}"),
    ("PUT", "/adapters/{tenant}/{name}/versions"),
    ("POST", "/adapters/{tenant}/{name}/versions"),
    ("POST", "/adapters/{tenant}/{name}/promote"),
    ("POST", "/adapters/{tenant}/{name}/rollback"),
    ("POST", "/adapters/{tenant}/{name}/retire"),
    ("POST", "/adapters/{tenant}/{name}/restore"),
    ("POST", "/adapters/{tenant}/{name}/smoke"),
    ("POST", "/uploads"),
    ("PUT", "/uploads/{digest}/parts/{number}"),
    ("GET", "/log"),
    ("POST", "/snapshots"),
    ("GET", "/pins"),
    ("PUT", "/pins/{tenant}"),
    ("PUT", "/pins/{tenant}/{name}"),
    ("DELETE", "/pins/{tenant}"),
    ("DELETE", "/pins/{tenant}/{name}"),
    ("GET", "/pins/{tenant}/{name}/prompt"),
    ("DELETE", "/pins/{tenant}/{name}/prompt"),
    ("GET", "/tenants"),
    ("POST", "/tenants"),
    ("GET", "/tenants/{tenant}"),
    ("PATCH", "/tenants/{tenant}"),
    ("GET", "/tenants/{tenant}/keys"),
    ("POST", "/tenants/{tenant}/keys"),
    ("GET", "/keys"),
    ("POST", "/keys"),
    ("PATCH", "/keys/{key_id}"),
    ("POST", "/keys/{key_id}/rotate"),
    ("DELETE", "/keys/{key_id}"),
    ("GET", "/status"),
    ("GET", "/fleet"),
    ("GET", "/requests/{request_id}"),
    ("GET", "/usage"),
}
"""Routes under /admin/v1."""

SCRAPED: set[Route] = {("GET", "/metrics")}
"""Routes for admins' keys outside /admin/v1, tested in tests/metrics."""

ASKING_NO_REPLICA = (
    *("_tokens", "tokenize"),
    *(tinker.CREATE_SAMPLING_SESSION, tinker.WEIGHTS_INFO),
)
"""Ends of POST routes that ask no replica."""

HIDDEN = ("acme/support", "acme/support@1", "acme/support@prod")
"""Models that globex must not find."""

FILLED = {"tenant": "acme", "name": "support", "digest": "0" * 64, "number": "1"}
"""Values of path parameters. Ids of keys and requests are real ones."""

ASKING: Mapping[str, list[str]] = {
    "register": ["{folder}", "acme/support"],
    "smoke": ["acme/support"],
    "list": ["--tenant", "acme"],
    "show": ["acme/support"],
    "promote": ["acme/support@1"],
    "rollback": ["acme/support"],
    "retire": ["acme/support"],
    "restore": ["acme/support"],
    "pin": ["acme/support", "--reason", "test"],
    "unpin": ["acme/support"],
    "pins": [],
    "status": [],
    "log": ["--adapter", "acme/support"],
    "why": ["0" * 32],
    "usage": ["--tenant", "acme"],
    "snapshot": [],
    "tenants list": [],
    "tenants create": ["initech"],
    "tenants show": ["acme"],
    "tenants limit": ["acme", "--concurrent", "1"],
    "keys create": ["--tenant", "acme"],
    "keys list": ["--tenant", "acme"],
    "keys limit": ["{key_id}", "--concurrent", "1"],
    "keys rotate": ["{key_id}"],
    "keys revoke": ["{key_id}"],
}
"""Arguments of each command that uses the admins' plane."""

WITHOUT_ADMINS = {
    *("init", "convert", "gc", "capacity", "bench isolation", "doctor", "settings"),
    *("serve", "stop", "parity"),
}
"""Commands that use no server, use it with a tenant's key, or use one with keys that they made."""


NO_REQUEST = "0" * 32


class Keys:
    """Keys of every kind.

    asked: ids of acme's responses, by model.
    """

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        catalog = gateway.catalog

        def make(
            tenant: str | None, scope: Scope, adapters: tuple[str, ...] = ()
        ) -> tuple[str, str]:
            record, secret = catalog.create_key(tenant, {scope}, adapters=adapters, actor="test")
            return record.id, secret

        revoked_id, self.revoked = make("acme", Scope.INFER)
        catalog.revoke_key(revoked_id, actor="test")
        expired_id, self.expired = make("acme", Scope.INFER)
        catalog.rotate_key(expired_id, 0, actor="test")
        revoked_id, self.revoked_admin = make(None, Scope.ADMIN)
        catalog.revoke_key(revoked_id, actor="test")
        expired_id, self.expired_admin = make(None, Scope.ADMIN)
        catalog.rotate_key(expired_id, 0, actor="test")
        self.acme_id, self.reading = make("acme", Scope.READ_ONLY)
        _, self.others_reading = make("globex", Scope.READ_ONLY)
        _, self.admins_reading = make(None, Scope.READ_ONLY)
        _, self.publishing = make("acme", Scope.PUBLISH, ("support",))
        _, self.elsewhere = make("acme", Scope.INFER, ("other-*", "globex/*"))
        self.infer, self.others_infer = gateway.keys["acme"], gateway.keys["globex"]
        self.asked: dict[str, str] = {}

    def respond(self, model: str) -> str:
        """Store a new response for acme; return its request's id."""
        answer = self.gateway.post("/v1/responses", {"model": model, "input": "hello"})
        return answer.headers["x-request-id"]

    def request_for(self, method: str, model: str) -> str:
        """Return the id of acme's request for a model; a new one for routes that delete it."""
        return self.respond(model) if method == "DELETE" else self.asked.get(model, NO_REQUEST)

    def invalid(self) -> list[str | None]:
        """Keys that do not exist or have ended."""
        of_admins = self.revoked_admin, self.expired_admin
        return [None, "lk_made-up", self.revoked, self.expired, *of_admins]

    def of_tenants(self) -> list[str]:
        """Valid keys of the tenants' plane."""
        of_acme = [self.infer, self.reading, self.publishing, self.elsewhere]
        return [*of_acme, self.others_infer, self.others_reading]


class Ask(Protocol):
    def __call__(
        self, method: str, path: str, key: str | None, body: object = None
    ) -> httpx.Response: ...


@pytest.fixture(scope="module")
def ask(unchanged: Gateway) -> Iterator[Ask]:
    """Send one request. All share one connection, for speed."""
    with httpx.Client(base_url=unchanged.url, timeout=20) as client:

        def ask(method: str, path: str, key: str | None, body: object = None) -> httpx.Response:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            return client.request(method, path, headers=headers, json=body)

        yield ask


@pytest.fixture(scope="module")
def keys(unchanged: Gateway) -> Keys:
    made = Keys(unchanged)
    unchanged.register("acme/support", seed=1)  # a second version
    unchanged.catalog.pin("acme", "support", prompt="You are a clerk.", actor="test")
    for model in HIDDEN:
        made.asked[model] = made.respond(model)
    return made


def routes_of(services: Services) -> set[Route]:
    contexts = iter_route_contexts(create_app(services).routes)
    return {
        (method, re.sub(r":\w+}", "}", context.path))
        for context in contexts
        for method in context.methods - {"HEAD"}
    }


def commands(group: Any, path: str = "") -> Iterator[str]:
    for name, child in group.commands.items():
        if isinstance(child, typer.core.TyperGroup):
            yield from commands(child, f"{path}{name} ")
        else:
            yield f"{path}{name}"


def filled(path: str, keys: Keys) -> str:
    names = FILLED | {"key_id": keys.acme_id, "request_id": keys.asked[HIDDEN[0]]}
    return "/admin/v1" + path.format(**names)


def test_every_route_is_in_the_matrix(unchanged: Gateway) -> None:
    parts = unchanged.catalog, {}, LIMITS
    admins = {(method, f"/admin/v1{path}") for method, path in ADMINS}
    known = OPEN | TENANTS.keys() | TINKERS.keys() | FILES.keys()
    known |= PUBLISHERS | VLLMS | admins | SCRAPED
    assert routes_of(Services(*parts, ReplayEngines())) == known - SWITCHED
    loading = Services(*parts, ReplayEngines(), load_from=unchanged.folder, tinker=True)
    assert routes_of(loading) == known


def test_every_command_is_in_the_matrix() -> None:
    assert set(commands(get_command(command))) == ASKING.keys() | WITHOUT_ADMINS


@pytest.mark.parametrize(("method", "path"), sorted(ADMINS))
def test_the_admins_plane_is_for_admins(
    unchanged: Gateway, keys: Keys, ask: Ask, method: str, path: str
) -> None:
    before, at = unchanged.catalog.reader.state.seq, filled(path, keys)
    for key in keys.invalid():
        assert error_of(ask(method, at, key), 401)["code"] == "invalid_api_key"
    for key in keys.of_tenants():
        answers = [ask(method, at.replace("support", n), key) for n in ("support", "nothing")]
        assert error_of(answers[0], 403)["code"] == "forbidden"
        assert answers[0].content == answers[1].content
    if method != "GET":
        answer = ask(method, at, keys.admins_reading)
        assert error_of(answer, 403)["code"] == "forbidden"
    assert unchanged.catalog.reader.state.seq == before
    if method == "GET":
        assert ask(method, at, keys.admins_reading).is_success


@pytest.mark.parametrize(("method", "path"), sorted(TENANTS))
def test_the_tenants_plane_is_for_tenants(
    unchanged: Gateway, keys: Keys, ask: Ask, method: str, path: str
) -> None:
    make = TENANTS[method, path] or (lambda *_: (path, None))
    at, body = make("acme/support", keys.asked["acme/support"])
    for key in keys.invalid():
        assert error_of(ask(method, at, key, body), 401)
    for key in (unchanged.admin_key, keys.admins_reading, keys.publishing):
        assert error_of(ask(method, at, key, body), 403)
    read = ask(method, at, keys.reading, body)
    assert read.status_code == (200 if method == "GET" else 403)


@pytest.mark.parametrize(("method", "path"), sorted(TINKERS))
def test_tinkers_endpoints_are_for_keys_that_infer(
    unchanged: Gateway, keys: Keys, ask: Ask, method: str, path: str
) -> None:
    body = {"request_id": NO_REQUEST}
    for key in keys.invalid():
        assert error_of(ask(method, path, key, body), 401)["code"] == "invalid_api_key"
    for key in (unchanged.admin_key, keys.admins_reading, keys.publishing, keys.reading):
        assert error_of(ask(method, path, key, body), 403)["code"] == "forbidden"
    for key in (keys.infer, keys.others_infer):
        assert ask(method, path, key, body).status_code == TINKERS[method, path]


class Uploaded(NamedTuple):
    """Ids of a file and of a batch with this file."""

    file_id: str
    batch_id: str


@pytest.mark.parametrize(("method", "path"), sorted(FILES))
def test_files_and_batches_are_for_their_own_tenant(
    unchanged: Gateway, keys: Keys, monkeypatch: pytest.MonkeyPatch, method: str, path: str
) -> None:
    monkeypatch.setattr(BatchStore, "open_batches", lambda *_: [])  # none runs or is too many
    file_id = unchanged.request("POST", "/v1/files", keys.infer, **UPLOAD).json()["id"]
    body = BATCH | {"input_file_id": file_id}
    batch_id = unchanged.request("POST", "/v1/batches", keys.infer, json=body).json()["id"]
    own = Uploaded(file_id, batch_id)
    absent = Uploaded("file-" + "0" * 24, "batch_" + "0" * 24)

    def ask(key: str | None, one: Uploaded = own) -> httpx.Response:
        at = path.format(**one._asdict())
        return unchanged.request(method, at, key, **FILES[method, path](one))

    for key in keys.invalid():
        assert error_of(ask(key), 401)["code"] == "invalid_api_key"
    for key in (unchanged.admin_key, keys.admins_reading, keys.publishing):
        assert error_of(ask(key), 403)["code"] == "forbidden"
    if "{" in path or (path == "/v1/batches" and method == "POST"):
        for key in (keys.others_infer, keys.others_reading):
            seen = [appearance(ask(key, one), one.file_id) for one in (own, absent)]
            assert seen[0] == seen[1]
            may_not = method != "GET" and key == keys.others_reading
            assert seen[0][0] == (403 if may_not else 404)
    elif method == "GET":
        name = batch_id if "batches" in path else file_id
        assert name not in ask(keys.others_infer).text
        assert name in ask(keys.infer).text
    assert ask(keys.reading).status_code == (200 if method == "GET" else 403)
    assert ask(keys.infer).is_success


@pytest.mark.parametrize(("method", "path"), sorted(PUBLISHERS))
def test_publish_keys_push_only_the_names_they_allow(
    unchanged: Gateway, keys: Keys, ask: Ask, method: str, path: str
) -> None:
    at, other = (path.format(name=n, digest="0" * 64) for n in ("support", "nothing"))
    before = unchanged.catalog.reader.state.seq
    for key in keys.invalid():
        assert error_of(ask(method, at, key), 401)["code"] == "invalid_api_key"
    of_others = keys.infer, keys.elsewhere, keys.others_infer
    for key in (*of_others, unchanged.admin_key, keys.admins_reading):
        assert error_of(ask(method, at, key), 403)["code"] == "forbidden"
    assert error_of(ask(method, other, keys.publishing), 403)["code"] == "forbidden"
    expected = (422, 404) if method == "PUT" else (404, 404)
    answers = ask(method, at, keys.publishing, {}), ask("GET", at, keys.publishing)
    assert tuple(answer.status_code for answer in answers) == expected
    for key in (keys.reading, keys.others_reading):
        assert ask(method, at, key).status_code == (403 if method == "PUT" else 404)
    assert unchanged.catalog.reader.state.seq == before


@pytest.mark.parametrize(("method", "path"), sorted(VLLMS))
def test_vllms_endpoints_are_for_publish_keys(
    unchanged: Gateway, keys: Keys, ask: Ask, method: str, path: str
) -> None:
    before = unchanged.catalog.reader.state.seq
    named = {"lora_name": "support"}
    load = named | {"lora_path": "/"}
    body = {LOAD: load, SKYRL_LOAD: load, UNLOAD: named}.get(path)
    for key in keys.invalid():
        assert error_of(ask(method, path, key, body), 401)["code"] == "invalid_api_key"
    of_others = keys.infer, keys.others_infer, unchanged.admin_key, keys.admins_reading
    for key in of_others:
        assert error_of(ask(method, path, key, body), 403)["code"] == "forbidden"
    for key in (keys.reading, keys.others_reading):
        assert ask(method, path, key, body).status_code == (200 if method == "GET" else 403)
    expected = {LOAD: 400, SKYRL_LOAD: 400, UNLOAD: 404} | dict.fromkeys(REFUSED, 400)
    assert ask(method, path, keys.publishing, body).status_code == expected.get(path, 200)
    if body is not None:
        other = ask(method, path, keys.publishing, body | {"lora_name": "nothing"})
        assert error_of(other, 403)["code"] == "forbidden"
    assert unchanged.catalog.reader.state.seq == before


def test_a_pushed_version_is_shown_only_to_its_own_tenant(
    unchanged: Gateway, keys: Keys, ask: Ask
) -> None:
    digest = unchanged.catalog.reader.state.adapter("acme", "support").versions[0].digest
    at = f"/v1/adapters/support/versions/{digest}"
    assert ask("GET", at, keys.publishing).json()["version"] == 1
    assert ask("GET", at, keys.reading).json()["version"] == 1
    assert ask("GET", at, keys.others_reading).status_code == 404


@pytest.mark.parametrize(("method", "path"), sorted(TENANTS))
def test_a_tenants_key_may_come_as_x_api_key(
    unchanged: Gateway, keys: Keys, method: str, path: str
) -> None:
    make = TENANTS[method, path] or (lambda *_: (path, None))

    def status(key: str, bearer: str | None) -> int:
        at, body = make("acme/support", keys.request_for(method, "acme/support"))
        headers = {"x-api-key": key}
        return unchanged.request(method, at, bearer, json=body, more_headers=headers).status_code

    own = 400 if path in POOLING else 200
    assert status(keys.infer, None) == status(keys.infer, keys.infer) == own
    assert status("lk_made-up", None) == status(keys.revoked, None) == 401
    assert status(keys.infer, keys.others_infer) == status(keys.others_infer, keys.infer) == 401


@pytest.mark.parametrize(("method", "path"), sorted(ADMINS))
def test_an_admins_key_is_not_accepted_as_x_api_key(
    unchanged: Gateway, keys: Keys, method: str, path: str
) -> None:
    headers = {"x-api-key": unchanged.admin_key}
    answer = unchanged.request(method, filled(path, keys), None, more_headers=headers)
    assert error_of(answer, 401)["code"] == "invalid_api_key"


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize(("method", "path"), sorted(r for r, make in TENANTS.items() if make))
def test_other_tenants_resources_look_missing(
    unchanged: Gateway, keys: Keys, ask: Ask, method: str, path: str, hidden: str
) -> None:
    make, absent = TENANTS[method, path], hidden.replace("support", "nothing")
    assert make is not None
    asked = len(unchanged.engines.calls)
    for key in (keys.others_infer, keys.others_reading):
        seen = []
        for name in (hidden, absent):
            at, body = make(name, keys.asked.get(name, NO_REQUEST))
            answer = ask(method, at, key, body)
            seen.append(appearance(answer, name))
        assert seen[0] == seen[1]
        may_not = method != "GET" and key == keys.others_reading
        assert seen[0][0] == (403 if may_not else 404)
    assert len(unchanged.engines.calls) == asked
    at, body = make(hidden, keys.request_for(method, hidden))
    asked = len(unchanged.engines.calls)
    assert ask(method, at, keys.infer, body).is_success != (path in POOLING)
    asks = method == "POST" and not path.endswith((*ASKING_NO_REPLICA, *POOLING))
    assert len(unchanged.engines.calls) == asked + asks


@pytest.mark.parametrize("hidden", [*HIDDEN, "support", "tiny"])
@pytest.mark.parametrize(("method", "path"), NAMING_MODELS)
def test_adapters_that_a_key_may_not_use_look_missing(
    unchanged: Gateway, keys: Keys, ask: Ask, method: str, path: str, hidden: str
) -> None:
    make = TENANTS[method, path]
    assert make is not None
    asked = len(unchanged.engines.calls)
    seen = []
    for name in (hidden, "acme/nothing"):
        at, body = make(name, NO_REQUEST)
        seen.append(appearance(ask(method, at, keys.elsewhere, body), name))
    assert seen[0][0] == 404
    assert error_code(seen[0]) == error_code(seen[1])
    assert len(unchanged.engines.calls) == asked


def error_code(seen: tuple[int, list[tuple[str, str]], bytes]) -> bytes:
    """Status and message of an answer's appearance."""
    return b"%d %s" % (seen[0], seen[2])


def appearance(answer: httpx.Response, name: str) -> tuple[int, list[tuple[str, str]], bytes]:
    """Return all that a client can see of an answer, without requested names and unique values."""
    headers = [
        (header, value)
        for header, value in answer.headers.items()
        if header not in ("x-request-id", "request-id", "date")
    ]
    request_id = answer.headers["x-request-id"].encode()
    content = answer.content.replace(request_id, b"{request_id}")
    return answer.status_code, headers, content.replace(name.encode(), b"{name}")


def test_lists_show_nothing_of_other_tenants(keys: Keys, ask: Ask) -> None:
    for path in [path for (method, path), make in TENANTS.items() if make is None]:
        for key in (keys.others_infer, keys.others_reading):
            answer = ask("GET", path, key)
            assert answer.is_success
            if path == "/v1/requests":  # which names other tenants' models as globex asked for them
                assert {each["tenant"] for each in answer.json()["data"]} <= {"globex"}
            else:
                assert b"acme" not in answer.content


@pytest.mark.parametrize("words", sorted(ASKING))
def test_a_command_does_nothing_with_a_tenants_key(
    unchanged: Gateway, keys: Keys, tmp_path: Path, words: str
) -> None:
    before = unchanged.catalog.reader.state.seq
    given = {"folder": str(make_peft(tmp_path)), "key_id": keys.acme_id}
    arguments = [*words.split(), *(part.format(**given) for part in ASKING[words])]
    for key in (keys.others_infer, keys.reading):
        environment = {"LORIKEET_SERVER": unchanged.url, "LORIKEET_ADMIN_KEY": key}
        result = CliRunner().invoke(command, arguments, env=environment)
        assert result.exit_code == 1, result.output
        assert "this key is not an admin's" in " ".join(result.stderr.split())
        assert result.stdout == ""
    assert unchanged.catalog.reader.state.seq == before
