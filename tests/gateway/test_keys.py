"""Permissions of keys by scope, and isolation of tenants."""

import pytest

from tests.gateway.conftest import Gateway, chat
from tests.gateway.test_bad_requests import CHAT, error_of

ADMIN_ROUTES = [
    ("GET", "/adapters"),
    ("GET", "/adapters/acme/support"),
    ("PUT", "/adapters/acme/support/versions"),
    ("POST", "/adapters/acme/support/promote"),
    ("POST", "/adapters/acme/support/rollback"),
    ("POST", "/adapters/acme/support/retire"),
    ("GET", "/pins"),
    ("PUT", "/pins/acme/support"),
    ("DELETE", "/pins/acme/support"),
    ("GET", "/tenants"),
    ("POST", "/tenants"),
    ("PATCH", "/tenants/acme"),
    ("GET", "/tenants/acme/keys"),
    ("POST", "/tenants/acme/keys"),
    ("GET", "/keys"),
    ("POST", "/keys"),
    ("DELETE", "/keys/key-1"),
    ("GET", "/status"),
]
TENANT_ROUTES = [
    ("POST", CHAT),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
]


@pytest.mark.parametrize(
    ("method", "path"), TENANT_ROUTES + [(m, f"/admin/v1{p}") for m, p in ADMIN_ROUTES]
)
def test_every_route_checks_the_key_first(unchanged: Gateway, method: str, path: str) -> None:
    for key in (None, "lk_made-up"):
        answer = unchanged.request(method, path, key, content=b"not json", params={"promote": "x"})
        assert error_of(answer, 401)["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(("method", "path"), ADMIN_ROUTES)
def test_a_tenants_key_opens_no_admin_route(unchanged: Gateway, method: str, path: str) -> None:
    before = unchanged.catalog.reader.state.seq
    answer = unchanged.request(method, f"/admin/v1{path}", unchanged.keys["acme"], content=b"{}")
    assert error_of(answer, 403)["code"] == "forbidden"
    assert unchanged.catalog.reader.state.seq == before


@pytest.mark.parametrize(("method", "path"), TENANT_ROUTES)
def test_an_admins_key_does_not_infer(unchanged: Gateway, method: str, path: str) -> None:
    error = error_of(unchanged.request(method, path, unchanged.admin_key, json=chat()), 403)
    assert "tenant's key" in error["message"]
    assert unchanged.engines.calls == []


def test_a_revoked_key_is_refused(gateway: Gateway) -> None:
    assert gateway.post(CHAT, chat()).status_code == 200
    (key,) = (k for k in gateway.admin("GET", "/tenants/acme/keys").json()["data"])
    assert gateway.admin("DELETE", f"/keys/{key['id']}").json()["revoked"] is True
    assert error_of(gateway.post(CHAT, chat()), 401)["code"] == "invalid_api_key"


def test_another_tenants_adapter_looks_like_a_missing_one(gateway: Gateway) -> None:
    hidden = error_of(gateway.post(CHAT, chat("acme/support"), tenant="globex"), 404)
    absent = error_of(gateway.post(CHAT, chat("acme/suppor2"), tenant="globex"), 404)
    assert absent["message"].replace("suppor2", "support") == hidden["message"]
    assert {**absent, "message": ""} == {**hidden, "message": ""}
    key = gateway.keys["globex"]
    hidden = error_of(gateway.request("GET", "/v1/models/acme/support", key), 404)
    absent = error_of(gateway.request("GET", "/v1/models/acme/suppor2", key), 404)
    assert absent["message"].replace("suppor2", "support") == hidden["message"]
    assert gateway.engines.calls == []


def test_all_tenants_can_use_an_adapter_while_it_is_shared(gateway: Gateway) -> None:
    gateway.register("acme/open", seed=5, shared=True)
    assert gateway.post(CHAT, chat("acme/open"), tenant="globex").status_code == 200
    assert gateway.engines.last.tenant == "globex"
    gateway.register("acme/open", seed=5, shared=False)
    assert gateway.post(CHAT, chat("acme/open"), tenant="globex").status_code == 404
    assert gateway.post(CHAT, chat("acme/open"), tenant="acme").status_code == 200


def test_a_retired_adapter_is_gone(gateway: Gateway) -> None:
    gateway.admin("POST", "/adapters/acme/support/retire", {"version": None})
    assert gateway.post(CHAT, chat()).status_code == 404


def test_models_lists_the_models_that_a_key_may_use(gateway: Gateway) -> None:
    gateway.register("acme/open", seed=5, shared=True)
    gateway.register("globex/own", seed=6)
    gateway.admin("POST", "/adapters/acme/open/promote", {"version": 1, "alias": "next"})
    listed = {
        tenant: {model.id: model for model in gateway.openai(tenant).models.list()}
        for tenant in ("acme", "globex")
    }
    both = {"tiny", "wider", "acme/open", "acme/open@next"}
    assert set(listed["acme"]) == both | {"acme/support"}
    assert set(listed["globex"]) == both | {"globex/own"}
    entry = listed["globex"]["acme/open"]
    assert (entry.object, entry.owned_by, entry.parent) == ("model", "acme", "tiny")
    assert listed["acme"]["tiny"].parent is None
    for tenant, models in listed.items():
        for name in models:  # every listed model can be used
            assert gateway.openai(tenant).models.retrieve(name).id == name
            assert gateway.post(CHAT, chat(name), tenant=tenant).status_code == 200
