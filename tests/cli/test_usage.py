"""usage: tables, CSV and JSON of tenants' usage; gc compacts it."""

import csv
import io
import json
import os
import time
from datetime import UTC, datetime

import pytest

from lorikeet.usage.ledger import UsageAccount, UsageCounts, UsageLedger
from lorikeet.usage.object_format import day_prefix
from lorikeet.usage.writer import UsageWriter
from tests.cli.conftest import Lorikeet

DAY_S = 86400.0
SUPPORT = UsageAccount("acme", "tiny", "acme/support")


def write(lorikeet: Lorikeet, ago: int = 0, account: UsageAccount = SUPPORT) -> str:
    """Write usage of the day that was `ago` days before today; return its date."""
    at = time.time() - ago * DAY_S
    ledger = UsageLedger(lambda: at)
    ledger.add(account, UsageCounts(1, 10, 4, 2, 3.21, 1, 2**20, 1, 2**21))
    assert UsageWriter(lorikeet.catalog.store, ledger, 60.0, lambda: None, lambda: at).flush()
    return datetime.fromtimestamp(at, UTC).date().isoformat()


@pytest.fixture
def days(lorikeet: Lorikeet) -> list[str]:
    write(lorikeet, account=UsageAccount("globex", "tiny"))
    return [write(lorikeet, ago) for ago in (3, 0)]


def test_a_row_for_each_adapter_of_each_tenant(lorikeet: Lorikeet, days: list[str]) -> None:
    said = lorikeet.do("usage", "--from", days[0])
    table = [line.split() for line in said.splitlines()]
    assert [
        "acme",
        "tiny",
        "acme/support",
        *["2", "20", "8", "4", "6.4", "2", "2.0", "MiB", "2", "4.0", "MiB"],
    ] in table
    of_globex = ["1", "10", "4", "2", "3.2", "1", "1.0", "MiB", "1", "2.0", "MiB"]
    assert ["globex", "tiny", "–", *of_globex] in table
    assert f"From {days[0]} to {days[1]} (UTC)" in said


def test_one_tenant_by_day_as_csv(lorikeet: Lorikeet, days: list[str]) -> None:
    said = lorikeet.do(
        "usage", "--tenant", "acme", "--from", days[0], "--by", "day", "--by", "adapter", "--csv"
    )
    rows = list(csv.DictReader(io.StringIO(said)))
    assert [row["day"] for row in rows] == days
    assert [row["slot_s"] for row in rows] == ["3.21", "3.21"]
    assert rows[0]["adapter"] == "acme/support"


def test_json_is_the_whole_answer(lorikeet: Lorikeet, days: list[str]) -> None:
    said = json.loads(lorikeet.do("usage", "--from", days[0], "--to", days[0], "--json"))
    assert (said["from"], said["to"]) == (days[0], days[0])
    assert [row["requests"] for row in said["data"]] == [1]


def test_costs_are_a_column_where_tokens_have_prices(lorikeet: Lorikeet, days: list[str]) -> None:
    assert "Cost" not in lorikeet.do("usage", "--from", days[0])
    ledger = UsageLedger()
    ledger.add(SUPPORT, UsageCounts(1, 10, 4, 2, cost=12_345_600_000_000))
    assert UsageWriter(lorikeet.catalog.store, ledger, 60.0, lambda: None, time.time).flush()
    said = lorikeet.do("usage", "--from", days[0], "--by", "tenant")
    assert "Cost" in said
    assert ["acme", "12.3456"] in [line.split()[:2] for line in said.splitlines()]
    assert ["globex", "0.0000"] in [line.split()[:2] for line in said.splitlines()]


def test_nothing_used_says_so(lorikeet: Lorikeet) -> None:
    assert "Nothing was used." in lorikeet.do("usage")
    assert lorikeet.do("usage", "--csv") == ""


@pytest.mark.parametrize(
    ("first", "last", "says"),
    [
        ("2026-11-02", "2026-11-01", "2026-11-02 is after 2026-11-01"),
        ("2024-11-01", "2026-11-01", "731 days from 2024-11-01 to 2026-11-01: want 400 at most"),
    ],
)
def test_a_malformed_period_is_refused_with_a_reason(
    lorikeet: Lorikeet, first: str, last: str, says: str
) -> None:
    result = lorikeet.run("usage", "--from", first, "--to", last)
    assert result.exit_code == 1
    assert says in result.stderr


def test_a_malformed_day_is_wrong_usage(lorikeet: Lorikeet) -> None:
    result = lorikeet.run("usage", "--from", "yesterday")
    assert result.exit_code == 2
    assert "2026-11-21" in result.stderr


def test_gc_joins_days_that_are_over(lorikeet: Lorikeet, days: list[str]) -> None:
    store = lorikeet.catalog.store
    environment = {"LORIKEET_CATALOG": store.url}
    prefix = day_prefix(datetime.fromisoformat(days[0]).date())
    assert lorikeet.run("gc", **environment).exit_code == 0
    (part, joined) = store.list(prefix)
    an_hour_ago = time.time() - 3601
    os.utime(os.path.join(store.url, joined), (an_hour_ago, an_hour_ago))  # noqa: PTH118
    said = lorikeet.run("gc", "--json", **environment)
    assert [one["key"] for one in json.loads(said.stdout)["objects"]] == [part]
    assert list(store.list(prefix)) == [joined]
    assert '"requests": 2' in lorikeet.do("usage", "--from", days[0], "--tenant", "acme", "--json")
