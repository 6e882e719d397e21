"""The admin API's log, queries of the past, restoring, and shares of an alias."""

from pathlib import Path
from typing import Any

import pytest

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.store.object_store import open_store
from lorikeet.gateway.app import create_app
from lorikeet.gateway.generate import SESSION_HEADER
from lorikeet.gateway.services import Services
from tests.gateway.conftest import LIMITS, Gateway, ReplayEngines, chat, listening, serving
from tests.gateway.test_bad_requests import CHAT, error_of


def ok(answer: Any) -> Any:
    assert answer.is_success, answer.text
    return answer.json()


def log(gateway: Gateway, **query: Any) -> list[int]:
    answer = gateway.request("GET", "/admin/v1/log", gateway.admin_key, params=query)
    return [entry["seq"] for entry in ok(answer)["data"]]


def test_every_change_is_in_the_log_under_the_key_that_made_it(gateway: Gateway) -> None:
    admin = gateway.admin
    before = gateway.catalog.reader.state.seq
    (key_id,) = gateway.catalog.reader.state.admin_keys()
    gateway.register("globex/new", seed=1)
    gateway.register("globex/new", seed=2)
    ok(admin("POST", "/adapters/globex/new/promote", {"version": 2}))
    ok(admin("POST", "/adapters/globex/new/promote", {"version": 1, "share": 0.1}))
    ok(admin("POST", "/adapters/globex/new/rollback", {}))
    ok(admin("PUT", "/pins/globex/new", {}))
    ok(admin("DELETE", "/pins/globex/new"))
    ok(admin("POST", "/adapters/globex/new/retire", {"version": 1}))
    ok(admin("POST", "/adapters/globex/new/retire", {}))
    ok(admin("POST", "/adapters/globex/new/restore", {}))
    ok(admin("POST", "/adapters/globex/new/restore", {"version": 1}))
    ok(admin("POST", "/tenants", {"tenant": "hooli"}))
    ok(admin("PATCH", "/tenants/hooli", {"max_concurrent": 3}))
    key = ok(admin("POST", "/tenants/hooli/keys", {}))
    ok(admin("DELETE", f"/keys/{key['id']}"))
    ok(admin("POST", "/keys", {}))

    entries = ok(admin("GET", "/log?limit=1000"))["data"]
    done = [entry for entry in entries if entry["seq"] > before]
    assert {entry["actor"] for entry in done} == {key_id}
    assert [entry["seq"] for entry in reversed(done)] == list(range(before + 1, before + 17))
    assert all(entry["nonce"] and entry["schema"] == 1 and entry["time"] for entry in done)
    assert "sha256" not in str(entries)
    assert key["key"] not in str(entries)


def test_the_log_is_searched(gateway: Gateway) -> None:
    gateway.register("globex/new", seed=1)
    everything = log(gateway)
    assert everything == list(range(gateway.catalog.reader.state.seq, 0, -1))
    assert log(gateway, tenant="globex", name="new") == everything[:1]
    assert log(gateway, actor="init") == [1]
    assert log(gateway, actor="test", limit=2) == everything[2:4]
    assert log(gateway, before=3) == [2, 1]
    assert log(gateway, since=4e9) == []
    for query in ("name=new", "limit=0", "limit=1001", "before=0", "tenant=A", "since=x"):
        assert error_of(gateway.admin("GET", f"/log?{query}"), 400)


def test_the_catalogs_past_can_be_queried(gateway: Gateway) -> None:
    seq = gateway.catalog.reader.state.seq
    time = gateway.catalog.reader.state.time
    gateway.register("acme/support", seed=5, promote=True)
    now = ok(gateway.admin("GET", "/adapters/acme/support"))
    then = ok(gateway.admin("GET", f"/adapters/acme/support?as_of_seq={seq}"))
    assert (now["aliases"], then["aliases"]) == ({"prod": 2}, {"prod": 1})
    assert ok(gateway.admin("GET", f"/adapters/acme/support?as_of_time={time}")) == then
    # lists omit long texts, and fields that depend on the base models served now
    for version in then["versions"]:
        del version["base_quantization"], version["base_warning"], version["defaults"]
    assert ok(gateway.admin("GET", f"/adapters?tenant=acme&as_of_seq={seq}"))["data"] == [then]
    assert error_of(gateway.admin("GET", "/adapters?as_of_seq=99999"), 400)
    assert error_of(gateway.admin("GET", "/adapters?as_of_time=5"), 400)
    assert error_of(gateway.admin("GET", "/adapters?as_of_time=5&as_of_seq=5"), 400)
    assert error_of(gateway.admin("GET", "/adapters/acme/support?as_of_seq=1"), 404)


def test_a_restored_adapter_serves_again(gateway: Gateway) -> None:
    ok(gateway.admin("POST", "/adapters/acme/support/retire", {}))
    assert gateway.post(CHAT, chat()).status_code == 404
    ok(gateway.admin("POST", "/adapters/acme/support/restore", {}))
    assert gateway.post(CHAT, chat()).status_code == 200
    assert error_of(gateway.admin("POST", "/adapters/acme/support/restore", {}), 409)


def test_an_admin_can_make_a_snapshot(gateway: Gateway) -> None:
    assert ok(gateway.admin("POST", "/snapshots", {}))["seq"] == gateway.catalog.reader.state.seq


@pytest.mark.parametrize("by", ["header", "user"])
def test_a_share_is_sticky_for_a_session(gateway: Gateway, by: str) -> None:
    gateway.register("acme/support", seed=5)
    ok(gateway.admin("POST", "/adapters/acme/support/promote", {"version": 2, "share": 0.5}))

    def version(session: str) -> int:
        if by == "header":
            answer = (
                gateway.openai()
                .with_options(default_headers={SESSION_HEADER: session})
                .chat.completions.create(**chat())
            )
        else:
            answer = gateway.openai().chat.completions.create(**chat(user=session))
        assert answer.choices
        adapter = gateway.engines.last.adapter
        assert adapter is not None
        return adapter.version

    seen = {session: version(session) for session in map(str, range(16))}
    assert set(seen.values()) == {1, 2}  # all are equal by chance once in 32,768 runs
    assert {session: version(session) for session in seen} == seen
    shown = ok(gateway.admin("GET", "/adapters/acme/support"))
    assert shown["shares"] == {"prod": {"version": 2, "share": 0.5}}


def test_without_a_session_a_share_is_drawn_anew(gateway: Gateway) -> None:
    gateway.register("acme/support", seed=5)
    ok(gateway.admin("POST", "/adapters/acme/support/promote", {"version": 2, "share": 0.5}))
    for _ in range(40):
        assert gateway.post(CHAT, chat()).status_code == 200
    seen = {call.adapter.version for _, call in gateway.engines.calls if call.adapter}
    assert seen == {1, 2}


def test_a_gateway_starts_from_a_snapshot(tmp_path: Path) -> None:
    with serving(tmp_path) as first:
        ok(first.admin("POST", "/snapshots", {}))
        first.register("globex/late", seed=2)
        keys, store = first.keys, first.folder / "store"

    catalog = AdapterCatalog(open_store(str(store)))
    services = Services(catalog, {}, LIMITS, ReplayEngines())
    with listening(create_app(services)) as url:
        second = Gateway(url, catalog, ReplayEngines(), first.admin_key, tmp_path, keys)
        assert {model.id for model in second.openai("globex").models.list()} == {"globex/late"}
        assert {model.id for model in second.openai("acme").models.list()} == {"acme/support"}
        assert second.request("GET", "/v1/models", "lk_wrong").status_code == 401
        listed = ok(second.admin("GET", "/adapters"))["data"]
        assert [adapter["adapter"] for adapter in listed] == ["acme/support", "globex/late"]
        assert len(ok(second.admin("GET", "/keys"))["data"]) == 3
        assert len(ok(second.admin("GET", "/tenants/acme/keys"))["data"]) == 1
