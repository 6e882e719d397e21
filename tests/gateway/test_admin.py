"""JSON documents of the admin API, and its refusals."""

import threading
import time
from typing import Any

import pytest

from tests.gateway.conftest import Gateway, chat
from tests.gateway.test_bad_requests import CHAT, error_of


@pytest.fixture
def three_versions(gateway: Gateway) -> Gateway:
    for seed in (1, 2):
        gateway.register("acme/support", seed=seed)
    return gateway


def test_an_adapter_is_shown_with_its_versions(three_versions: Gateway) -> None:
    shown = three_versions.admin("GET", "/adapters/acme/support").json()
    assert (shown["adapter"], shown["shared"], shown["retired"]) == ("acme/support", False, False)
    assert shown["aliases"] == {"prod": 1}
    assert [version["version"] for version in shown["versions"]] == [1, 2, 3]
    first = shown["versions"][0]
    assert set(first) == {
        *("adapter", "version", "digest", "size_bytes", "max_rank", "base_model"),
        *("created", "retired", "aliases", "gpu_bytes", "touches", "trained_on"),
        *("base_quantization", "base_warning", "defaults", "embedder", "head", "vocabulary"),
        *("invocation_tokens", "parity"),
    }
    assert first["touches"].keys() == {"linears", "layers", "min_rank", "parameters", "tokens"}
    assert (first["adapter"], first["aliases"]) == ("acme/support", ["prod"])
    assert (first["max_rank"], first["base_model"]) == (2, "tiny")
    assert abs(first["created"] - time.time()) < 60


def test_adapters_are_listed_for_all_and_for_one_tenant(gateway: Gateway) -> None:
    gateway.register("globex/own", seed=3)

    def listed(path: str) -> list[str]:
        return [entry["adapter"] for entry in gateway.admin("GET", path).json()["data"]]

    assert listed("/adapters") == ["acme/support", "globex/own"]
    assert listed("/adapters?tenant=globex") == ["globex/own"]
    missing = gateway.admin("GET", "/adapters?tenant=nobody")
    assert error_of(missing, 404)["code"] == "tenant_not_found"


def test_promote_and_rollback_move_an_alias(three_versions: Gateway) -> None:
    path = "/adapters/acme/support"
    moved = three_versions.admin("POST", f"{path}/promote", {"version": 3, "expect": 1}).json()
    assert (moved["version"], moved["aliases"]) == (3, ["prod"])
    back = three_versions.admin("POST", f"{path}/rollback", {"alias": "prod"}).json()
    assert (back["version"], back["aliases"]) == (1, ["prod"])
    again = three_versions.admin("POST", f"{path}/rollback")
    assert error_of(again, 409)["code"] == "conflict"


def test_a_promotion_that_expects_another_version_is_a_conflict(three_versions: Gateway) -> None:
    body = {"version": 3, "alias": "prod", "expect": 2}
    answer = three_versions.admin("POST", "/adapters/acme/support/promote", body)
    error = error_of(answer, 409)
    assert (error["code"], error["param"]) == ("conflict", "expect")
    assert "version 1" in error["message"]


def test_retiring_a_version_and_an_adapter(three_versions: Gateway) -> None:
    path = "/adapters/acme/support/retire"
    assert error_of(three_versions.admin("POST", path, {"version": 1}), 409)["param"] == "version"
    shown = three_versions.admin("POST", path, {"version": 2}).json()
    assert [version["retired"] for version in shown["versions"]] == [False, True, False]
    assert three_versions.admin("POST", path, {"version": None}).json()["retired"] is True


def test_pins_are_set_listed_and_removed(gateway: Gateway) -> None:
    body = {"selector": "1", "replicas": 2, "tier": "host", "reason": "launch", "expires_s": 60}
    pin = gateway.admin("PUT", "/pins/acme/support", body).json()
    assert (pin["adapter"], pin["selector"], pin["tier"]) == ("acme/support", "1", "host")
    assert (pin["replicas"], pin["reason"]) == (2, "launch")
    assert 50 < pin["expires"] - time.time() <= 60
    assert pin["actor"].startswith("key-")
    (listed,) = gateway.admin("GET", "/pins").json()["data"]
    assert listed.items() >= pin.items()
    assert gateway.admin("DELETE", "/pins/acme/support").status_code == 200
    assert gateway.admin("GET", "/pins").json() == {"data": []}
    assert error_of(gateway.admin("DELETE", "/pins/acme/support"), 404)["code"] == "not_found"


def test_a_pin_by_default_is_prod_on_every_gpu_for_ever(gateway: Gateway) -> None:
    body = {"selector": "prod", "replicas": None, "tier": "gpu", "reason": "", "expires_s": None}
    pin = gateway.admin("PUT", "/pins/acme/support", body).json()
    assert pin == gateway.admin("PUT", "/pins/acme/support", {}).json() | {
        "created": pin["created"]
    }
    assert (pin["selector"], pin["tier"], pin["replicas"], pin["expires"]) == (
        *("prod", "gpu", None),
        None,
    )


def test_a_tenants_pin_is_set_listed_and_removed(gateway: Gateway) -> None:
    pin = gateway.admin("PUT", "/pins/acme", {"tier": "host", "priority": -3}).json()
    assert (pin["tenant"], pin["adapter"], pin["priority"]) == ("acme", None, -3)
    (listed,) = gateway.admin("GET", "/pins").json()["data"]
    assert listed.items() >= pin.items()
    assert listed["versions"] == 1
    assert gateway.admin("GET", "/status").json()["pins"] == {"unmet": 1}
    assert gateway.admin("DELETE", "/pins/acme").status_code == 200
    assert error_of(gateway.admin("DELETE", "/pins/acme"), 404)["code"] == "not_found"


def test_a_dry_run_of_a_pin_changes_nothing(gateway: Gateway) -> None:
    before = gateway.catalog.reader.refresh()
    moves = gateway.admin("PUT", "/pins/acme/support", {"dry_run": True}).json()
    assert set(moves) == {"loads", "releases", "unmet", "lost"}
    assert "leave at most 0 on gpu" in moves["unmet"][0]["reason"]
    absent = gateway.admin("PUT", "/pins/acme/absent", {"dry_run": True})
    assert error_of(absent, 404)["code"] == "model_not_found"
    assert gateway.catalog.reader.refresh() is before


def test_a_pins_prompt_is_shown_and_removed(gateway: Gateway) -> None:
    path, text = "/pins/acme/support", "You are a clerk."
    assert gateway.admin("PUT", path, {"prompt": text}).json()["prompt"] == {"bytes": 16}
    progress = {"bytes": 16, "computed": 0, "wanted": 0, "failure": None}
    (listed,) = gateway.admin("GET", "/pins").json()["data"]
    assert listed["prompt"] == progress
    assert gateway.admin("GET", f"{path}/prompt").json() == listed | {"text": text}
    change = gateway.admin("GET", "/log").json()["data"][0]["changes"][0]
    assert change["prompt"] == {"bytes": 16}
    assert gateway.admin("DELETE", f"{path}/prompt").status_code == 200
    (left,) = gateway.admin("GET", "/pins").json()["data"]
    assert left["prompt"] is None
    for method in ("GET", "DELETE"):
        assert error_of(gateway.admin(method, f"{path}/prompt"), 404)["code"] == "not_found"


def test_a_prompt_that_no_chat_can_have_is_refused(gateway: Gateway) -> None:
    body = {"prompt": "a b " * 2000}
    long = error_of(gateway.admin("PUT", "/pins/acme/support", body), 400)
    assert long["param"] == "prompt"
    assert "takes 4096: shorten the prompt" in long["message"]
    tenants = error_of(gateway.admin("PUT", "/pins/acme", {"prompt": "You are a clerk."}), 400)
    assert "pin each adapter with its prompt" in tenants["message"]
    assert gateway.admin("GET", "/pins").json() == {"data": []}


def test_a_budget_for_pins_is_set_kept_and_lifted(gateway: Gateway) -> None:
    limited = gateway.admin("PATCH", "/tenants/acme", {"pin_budget_bytes": 10}).json()
    assert limited["pin_budget_bytes"] == 10
    both = gateway.admin("PATCH", "/tenants/acme", {"max_concurrent": 3}).json()
    assert (both["max_concurrent"], both["pin_budget_bytes"]) == (3, 10)
    error = error_of(gateway.admin("PUT", "/pins/acme/support", {}), 409)
    assert error["param"] == "tenant"
    assert "its budget is 10" in error["message"]
    lifted = gateway.admin("PATCH", "/tenants/acme", {"pin_budget_bytes": None}).json()
    assert (lifted["max_concurrent"], lifted["pin_budget_bytes"]) == (3, None)


def test_tenants_are_made_limited_and_listed(gateway: Gateway) -> None:
    made = gateway.admin("POST", "/tenants", {"tenant": "hooli", "max_concurrent": 4})
    assert made.status_code == 201
    assert (made.json()["tenant"], made.json()["max_concurrent"]) == ("hooli", 4)
    again = gateway.admin("POST", "/tenants", {"tenant": "hooli"})
    assert error_of(again, 409)["param"] == "tenant"
    assert gateway.admin("PATCH", "/tenants/hooli", {"max_concurrent": 8}).json() == {
        **made.json(),
        "max_concurrent": 8,
    }
    lifted = gateway.admin("PATCH", "/tenants/hooli", {"max_concurrent": None}).json()
    assert lifted["max_concurrent"] is None
    names = [tenant["tenant"] for tenant in gateway.admin("GET", "/tenants").json()["data"]]
    assert names == ["acme", "globex", "hooli"]


def test_a_keys_secret_is_shown_once(gateway: Gateway) -> None:
    made = gateway.admin("POST", "/tenants/acme/keys", {"scopes": ["infer"]})
    assert made.status_code == 201
    secret = made.json()["key"]
    gateway.keys["acme"] = secret
    assert gateway.openai().models.retrieve("acme/support").parent == "tiny"  # type: ignore[attr-defined]
    for path in ("/keys", "/tenants/acme/keys"):
        answer = gateway.admin("GET", path)
        assert made.json()["id"] in answer.text
        assert secret not in answer.text
        assert "sha256" not in answer.text
        assert "key" not in answer.json()["data"][0]


def test_calls_have_their_tenants_weight_and_their_keys_priority(gateway: Gateway) -> None:
    gateway.admin("PATCH", "/tenants/acme", {"weight": 2.5}).raise_for_status()
    made = gateway.admin("POST", "/tenants/acme/keys", {"priority": 3}).json()
    gateway.admin("PATCH", f"/keys/{made['id']}", {"priority": -3}).raise_for_status()
    gateway.keys["acme"] = made["key"]
    assert gateway.post(CHAT, chat()).status_code == 200
    scheduling = gateway.engines.last.scheduling
    assert (scheduling.tenant, scheduling.weight, scheduling.priority) == ("acme", 2.5, -3)


def test_an_admin_creates_and_revokes_another_admins_key(gateway: Gateway) -> None:
    made = gateway.admin("POST", "/keys", {"scopes": ["admin"]}).json()
    assert (made["tenant"], made["scopes"]) == (None, ["admin"])
    assert gateway.request("GET", "/admin/v1/status", made["key"]).status_code == 200
    gateway.admin("DELETE", f"/keys/{made['id']}")
    assert gateway.request("GET", "/admin/v1/status", made["key"]).status_code == 401
    assert error_of(gateway.admin("DELETE", "/keys/key-none"), 404)["code"] == "key_not_found"


def test_the_log_names_the_key_of_each_change(gateway: Gateway) -> None:
    made = gateway.admin("POST", "/keys", {}).json()
    gateway.request("PUT", "/admin/v1/pins/acme/support", made["key"], json={})
    assert gateway.admin("GET", "/pins").json()["data"][0]["actor"] == made["id"]


def test_status_shows_every_replica(gateway: Gateway) -> None:
    status = gateway.admin("GET", "/status").json()
    assert status["catalog_seq"] == gateway.catalog.reader.state.seq
    assert status["replicas"] == [
        {
            "replica": "r0",
            "base_model": "tiny",
            "base_quantization": None,
            "tensor_parallel": 1,
            "running": 1,
            "waiting": 2,
            "kv_pages_used": 3,
            "kv_pages_total": 4,
            "fp8_kv": False,
            "states": None,
            "host_pages": None,
            "prompts": {"pinned": 0, "computed": 0},
            "arena_bytes_used": 5,
            "arena_bytes_total": 6,
            "adapters": [
                {
                    "adapter": "acme/support",
                    "version": 1,
                    "digest": "d" * 64,
                    "residency": "gpu",
                    "gpu_bytes": 64,
                    "leases": 2,
                    "pinned": True,
                }
            ],
        }
    ]


def test_status_does_not_wait_for_a_catalog_that_hangs(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(gateway.catalog.reader, "ask", lambda _: released.wait(20))
    try:
        status = gateway.admin("GET", "/status").json()
    finally:
        released.set()
    assert status["pins"] is None
    assert len(status["replicas"]) == 1


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("POST", "/adapters/acme/support/promote", {}, 400, "version"),
        ("POST", "/adapters/acme/support/promote", {"version": 0}, 400, "version"),
        ("POST", "/adapters/acme/support/promote", {"version": "1"}, 400, "version"),
        ("POST", "/adapters/acme/support/promote", {"version": 9}, 404, "version"),
        ("POST", "/adapters/acme/support/promote", {"version": 1, "alias": "7"}, 400, "alias"),
        ("POST", "/adapters/acme/support/promote", {"version": 1, "alias": "A!"}, 400, "alias"),
        ("POST", "/adapters/acme/support/promote", {"version": 1, "force": True}, 400, "force"),
        ("POST", "/adapters/acme/support/rollback", {"alias": "beta"}, 404, "alias"),
        ("POST", "/adapters/acme/support/retire", {"version": 9}, 404, "version"),
        ("PUT", "/pins/acme/support", {"tier": "remote"}, 400, "tier"),
        ("PUT", "/pins/acme/support", {"replicas": 0}, 400, "replicas"),
        ("PUT", "/pins/acme/support", {"priority": 1001}, 400, "priority"),
        ("PUT", "/pins/acme/support", {"dry_run": 1}, 400, "dry_run"),
        ("PUT", "/pins/acme", {"selector": "1"}, 400, "selector"),
        ("PUT", "/pins/nobody", {}, 404, "tenant"),
        ("PATCH", "/tenants/acme", {"pin_budget_bytes": 0}, 400, "pin_budget_bytes"),
        ("PUT", "/pins/acme/support", {"expires_s": 0}, 400, "expires_s"),
        ("PUT", "/pins/acme/support", {"expires_s": 3651 * 86400}, 400, "expires_s"),
        ("PUT", "/pins/acme/support", {"reason": "\x1b[2J"}, 400, "reason"),
        ("PUT", "/pins/acme/support", {"reason": "two\nlines"}, 400, "reason"),
        ("PUT", "/pins/acme/support", {"reason": "x" * 201}, 400, "reason"),
        ("PUT", "/pins/acme/support", {"selector": "beta"}, 404, "selector"),
        ("PUT", "/pins/acme/support", {"selector": "a/b"}, 400, "selector"),
        ("PATCH", "/tenants/acme", {"max_concurrent": 0}, 400, "max_concurrent"),
        ("PATCH", "/tenants/nobody", {"max_concurrent": 1}, 404, "tenant"),
        ("PATCH", "/tenants/acme", {"tokens_per_min": 10**16}, 400, "tokens_per_min"),
        ("PATCH", "/tenants/acme", {"weight": 0}, 400, "weight"),
        ("PATCH", "/tenants/acme", {"weight": "2"}, 400, "weight"),
        ("PATCH", "/tenants/acme", {"burst_s": 0.5}, 400, "burst_s"),
        ("POST", "/tenants/acme/keys", {"priority": 1001}, 400, "priority"),
        ("POST", "/tenants/acme/keys", {"tokens_per_month": 5}, 400, "tokens_per_month"),
        ("POST", "/tenants/acme/keys", {"cost_per_month": 5}, 400, "cost_per_month"),
        ("PATCH", "/tenants/acme", {"cost_per_month": 0}, 400, "cost_per_month"),
        ("PATCH", "/tenants/acme", {"cost_per_month": 1e10}, 400, "cost_per_month"),
        ("PATCH", "/tenants/acme", {"cost_per_month": "5"}, 400, "cost_per_month"),
        ("PATCH", "/tenants/acme", {"requests_per_hour": 1}, 400, "requests_per_hour"),
        ("PATCH", "/keys/key-none", {"max_context": 1}, 404, "id"),
        ("POST", "/keys/key-none/rotate", {}, 404, "id"),
        ("POST", "/keys/key-none/rotate", {"overlap_s": -1}, 400, "overlap_s"),
        ("POST", "/tenants", {}, 400, "tenant"),
        ("POST", "/tenants", {"tenant": "Acme"}, 400, "tenant"),
        ("POST", "/tenants", {"tenant": "a..b"}, 400, "tenant"),
        ("POST", "/tenants", {"tenant": "new", "max_concurrent": 0}, 400, "max_concurrent"),
        ("POST", "/tenants/nobody/keys", {}, 404, "tenant"),
        ("POST", "/tenants/acme/keys", {"scopes": ["admin"]}, 400, "scopes[0]"),
        ("POST", "/tenants/acme/keys", {"scopes": []}, 400, "scopes"),
        ("POST", "/tenants/acme/keys", {"scopes": ["infer", "read-only"]}, 400, "scopes"),
        ("POST", "/tenants/acme/keys", {"name": "two\nlines"}, 400, "name"),
        ("POST", "/tenants/acme/keys", {"expires_s": 0}, 400, "expires_s"),
        ("POST", "/keys", {"requests_per_min": 1}, 400, "requests_per_min"),
        ("POST", "/keys", {"scopes": ["infer"]}, 400, "scopes[0]"),
    ],
)
def test_invalid_admin_requests_name_the_field(
    unchanged: Gateway, method: str, path: str, body: Any, status: int, param: str
) -> None:
    before = unchanged.catalog.reader.state
    assert error_of(unchanged.admin(method, path, body), status)["param"] == param
    assert unchanged.catalog.reader.refresh() is before


@pytest.mark.parametrize(
    ("method", "path", "param"),
    [
        ("GET", "/adapters/Acme/support", "tenant"),
        ("GET", "/adapters/acme/a%2e%2eb", "name"),
        ("POST", "/adapters/acme/%0a/retire", "name"),
        ("DELETE", "/pins/acme%2Fsupport", None),
        ("POST", "/tenants/acme%2Fkeys", None),
        ("DELETE", "/keys%2F{id}", None),
        ("DELETE", "/keys/Key!", "id"),
        ("GET", "/tenants/-acme/keys", "tenant"),
        ("GET", "/adapters?tenant=..", "tenant"),
    ],
)
def test_invalid_names_in_a_path_are_refused(
    unchanged: Gateway, method: str, path: str, param: str | None
) -> None:
    before = unchanged.catalog.reader.state
    address = path.format(id=before.keys()[0].id)
    answer = unchanged.admin(method, address)
    assert error_of(answer, 400)["param"] == param
    assert unchanged.catalog.reader.refresh() is before


def test_adapters_are_listed_page_by_page(gateway: Gateway) -> None:
    for number in range(4):
        gateway.register(f"globex/a{number}", seed=number)
    gateway.register("acme/zebra", seed=9)
    names: list[str] = []
    after = ""
    while after is not None:
        page = gateway.admin("GET", f"/adapters?limit=4&after={after}").json()
        names += [adapter["adapter"] for adapter in page["data"]]
        assert len(page["data"]) <= 4
        after = page["next"]
    assert names == ["acme/support", "acme/zebra", *(f"globex/a{number}" for number in range(4))]
    page = gateway.admin("GET", "/adapters?tenant=globex&after=globex/a1").json()
    assert [adapter["adapter"] for adapter in page["data"]] == ["globex/a2", "globex/a3"]
    assert gateway.admin("GET", "/adapters?limit=1001").status_code == 400
