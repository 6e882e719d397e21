"""Usage over HTTP, by tenant, period and adapter."""

import time
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pytest

from lorikeet.catalog.store.local import LocalStore
from lorikeet.usage.ledger import UsageAccount, UsageCounts, UsageLedger
from lorikeet.usage.writer import UsageWriter
from tests.gateway.conftest import Gateway
from tests.gateway.test_bad_requests import error_of

DAY_S = 86400.0
SUPPORT = UsageAccount("acme", "tiny", "acme/support")
SHARED = UsageAccount("globex", "tiny", "acme/support")
NONE = {
    "cached_tokens": 0,
    "slot_s": 0.0,
    "cost": 0.0,
    "loads": 0,
    "load_bytes": 0,
    "pushes": 0,
    "pushed_bytes": 0,
    "flex_prompt_tokens": 0,
    "flex_cached_tokens": 0,
    "flex_output_tokens": 0,
}


def day(ago: int = 0) -> str:
    return datetime.fromtimestamp(time.time() - ago * DAY_S, UTC).date().isoformat()


def write(gateway: Gateway, account: UsageAccount, ago: int = 0, **counts: Any) -> None:
    at = time.time() - ago * DAY_S
    ledger = UsageLedger(lambda: at)
    ledger.add(account, UsageCounts(requests=1, **counts))
    store = LocalStore(gateway.folder / "store")
    assert UsageWriter(store, ledger, 60.0, lambda: None, lambda: at).flush()


@pytest.fixture
def used(gateway: Gateway) -> Gateway:
    write(gateway, SUPPORT, prompt_tokens=10, output_tokens=1)
    write(gateway, SUPPORT, ago=1, prompt_tokens=10, output_tokens=2)
    write(gateway, UsageAccount("acme", "tiny"), prompt_tokens=7, output_tokens=3)
    write(gateway, SHARED, prompt_tokens=100, output_tokens=50, slot_s=1.25, loads=1, load_bytes=9)
    return gateway


def rows(gateway: Gateway, query: str, tenant: str | None = None) -> list[dict[str, Any]]:
    plane, key = ("/admin/v1", gateway.admin_key)
    if tenant is not None:
        plane, key = "/v1", gateway.keys[tenant]
    answer = gateway.request("GET", f"{plane}/usage?from={day(1)}&{query}", key)
    assert answer.is_success, answer.text
    data: list[dict[str, Any]] = answer.json()["data"]
    return data


def test_an_admin_sees_each_adapter_of_each_tenant(used: Gateway) -> None:
    counts = {"requests": 2, "prompt_tokens": 20, "output_tokens": 3}
    acme = {"tenant": "acme", "base_model": "tiny", "adapter": "acme/support", **counts}
    base, support, shared = rows(used, "")
    assert support == acme | NONE
    assert (base["adapter"], base["prompt_tokens"]) == (None, 7)
    assert (shared["tenant"], shared["slot_s"]) == ("globex", 1.25)
    assert (shared["loads"], shared["load_bytes"]) == (1, 9)
    assert rows(used, "tenant=acme") == [base, support]


def test_costs_are_in_the_currency_of_the_prices(gateway: Gateway) -> None:
    write(gateway, SUPPORT, output_tokens=1, cost=150_000)
    write(gateway, SUPPORT, output_tokens=1, cost=1_250_000_000_000)
    ((of_admin,), (own,)) = rows(gateway, ""), rows(gateway, "", "acme")
    assert of_admin["cost"] == own["cost"] == 1.25000015


def test_an_unused_tenant_has_no_rows_and_an_unknown_one_is_an_error(
    used: Gateway,
) -> None:
    nothing = used.admin("GET", f"/usage?tenant=globex&from={day(9)}&to={day(8)}")
    assert nothing.json()["data"] == []
    error = used.request("GET", "/admin/v1/usage?tenant=acmee", used.admin_key)
    assert (error.status_code, error.json()["error"]["param"]) == (404, "tenant")


def test_rows_are_grouped_as_requested(used: Gateway) -> None:
    by_day = rows(used, "by=day")
    assert [(row["day"], row["output_tokens"]) for row in by_day] == [(day(1), 2), (day(), 54)]
    by_both = rows(used, "by=tenant,day&tenant=acme")
    assert [list(row)[:2] for row in by_both] == [["tenant", "day"]] * 2
    assert [row["requests"] for row in rows(used, "by=tenant")] == [3, 1]
    assert [row["requests"] for row in rows(used, f"to={day(1)}&by=tenant")] == [1]


def test_rows_by_month_sum_its_days(gateway: Gateway) -> None:
    for ago in (0, 40, 41, 75):
        write(gateway, SUPPORT, ago=ago, output_tokens=1)
    path = f"/v1/usage?from={day(90)}&by=month"
    found = gateway.request("GET", path, gateway.keys["acme"]).json()["data"]
    counted = Counter(day(ago)[:7] for ago in (0, 40, 41, 75))
    assert {row["month"]: row["output_tokens"] for row in found} == counted


def test_a_tenant_sees_its_own_rows_only(used: Gateway) -> None:
    (row,) = rows(used, "by=day", "globex")
    assert (row["prompt_tokens"], row["output_tokens"]) == (100, 50)
    assert "tenant" not in row
    assert [row["adapter"] for row in rows(used, "", "acme")] == [None, "acme/support"]
    assert rows(used, "tenant=acme&by=day", "globex") == [row]


def test_the_default_period_is_this_month(used: Gateway) -> None:
    answer = used.admin("GET", "/usage").json()
    assert (answer["from"], answer["to"]) == (day()[:8] + "01", day())


@pytest.mark.parametrize("query", ["by=tenant", "by=", "by=week", "from=x", "from=2026-01-01&to=1"])
def test_a_bad_parameter_is_named(unchanged: Gateway, query: str) -> None:
    key = unchanged.keys["acme"]
    error = error_of(unchanged.request("GET", f"/v1/usage?{query}", key), 400)
    assert error["param"] in ("by", "from", "to")


def test_a_period_that_ends_before_it_begins_is_refused(unchanged: Gateway) -> None:
    answer = unchanged.admin("GET", "/usage?from=2026-02-02&to=2026-02-01")
    assert error_of(answer, 400)["param"] == "from"
