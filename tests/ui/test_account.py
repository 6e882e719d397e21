"""A tenant's view of the page at /ui, in a real browser."""

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from lorikeet.catalog.records import Scope
from lorikeet.catalog.store.local import LocalStore
from lorikeet.protocol.messages import AnswerHeader, Call, FinalUsage
from lorikeet.usage.ledger import UsageAccount, UsageCounts, UsageLedger
from lorikeet.usage.month_usage import MonthUsage
from lorikeet.usage.writer import UsageWriter
from lorikeet_engine.adapter import Residency
from lorikeet_engine.request import EngineTimings
from tests.gateway.conftest import Gateway, Items, chat, repeat, serving
from tests.ui.chromium import Tab, chromium
from tests.ui.test_page import log_in

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("chromium")) as tab:
        yield tab


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Run a gateway with a public listener of its own, and some use of it by both tenants."""
    folder = tmp_path_factory.mktemp("g")
    store = LocalStore(folder / "store")
    with serving(folder, store, apart=True, recorded_usage=MonthUsage(store)) as running:
        running.register("globex/secret")
        running.catalog.limit_tenant(
            "acme", requests_per_min=60, max_concurrent=7, cost_per_month=5.0, actor="test"
        )
        for account, prompt_tokens in (("acme/support", 1234), ("globex/secret", 98765)):
            ledger = UsageLedger(time.time)
            owner = account.partition("/")[0]
            counts = UsageCounts(3, prompt_tokens, cost=2_500_000_000_000, flex_prompt_tokens=34)
            ledger.add(UsageAccount(owner, "tiny", account), counts)
            assert UsageWriter(store, ledger, 60.0).flush()
        yield running


@pytest.fixture
def tab(browser: Tab, gateway: Gateway) -> Iterator[Tab]:
    """The page at the public listener, before login."""
    gateway.engines.replay = repeat
    browser.open(f"{gateway.public_url}/ui")
    yield browser
    assert browser.troubles == []


def enter(tab: Tab, key: str) -> None:
    log_in(tab, key)
    tab.until("document.getElementById('freshness-text').innerText === 'Live'")
    tab.until("document.querySelector('#adapters td') !== null")


async def slow_to_load(call: Call) -> Items:
    """Replay an answer that waited long for its adapter, which came from the store."""
    assert call.adapter is not None
    yield AnswerHeader("replica-7", call.adapter.digest, Residency.REMOTE, load_s=1.25)
    await asyncio.sleep(1.5)
    timings = EngineTimings(queued_s=1.3, load_s=1.25, prefill_s=0.002, decode_s=0.003)
    async for item in repeat(call):
        if isinstance(item, bytes):
            yield FinalUsage(12, 8, 34, (timings,))
            yield item


def test_a_tenant_sees_its_own_adapters_usage_and_limits(tab: Tab, gateway: Gateway) -> None:
    enter(tab, gateway.keys["acme"])
    assert "acme" in tab.text("#totals")
    assert "acme/support" in tab.text("#adapters")
    month = f"{datetime.now(UTC):%Y-%m}"
    usage = " ".join(tab.text("#usage").split())
    assert f"{month} 3 1,234 0 0 34 2.50" in usage
    assert "acme/support 3 1,234 0 0 34 2.50" in usage
    tab.until("document.getElementById('limits').innerText.includes('2.50 of 5.00')")
    limits = tab.text("#limits")
    for each in ("Requests a minute", "of 60", "Requests at once", "0 of 7", "Cost this month"):
        assert each in limits
    page = tab.js("document.documentElement.outerHTML")
    for others in ("globex", "98,765", "98765", "secret"):
        assert others not in page


def test_a_tenants_requests_are_explained_and_another_tenants_are_missing(
    tab: Tab, gateway: Gateway
) -> None:
    gateway.post(CHAT, chat()).raise_for_status()  # the first reads the tokenizer
    gateway.engines.replay = slow_to_load
    gateway.post(CHAT, chat()).raise_for_status()
    gateway.engines.replay = repeat
    assert gateway.post(CHAT, chat(temperature=9)).status_code == 400
    gateway.register("globex/quiet")
    gateway.post(CHAT, chat("globex/quiet"), "globex").raise_for_status()
    enter(tab, gateway.keys["acme"])
    tab.until("document.querySelectorAll('#requests tbody tr').length >= 3")
    said = tab.text("#requests")
    assert "1.25 s loading the adapter from the store" in said
    assert "refused: " in said
    assert "globex" not in said
    tab.js("document.getElementById('slowest').click()")
    totals = "[...document.querySelectorAll('#requests tbody tr')].map(row => row.innerText)"
    assert "refused: " in tab.js(totals)[-1]
    tab.js("document.getElementById('slowest').click()")
    assert "refused: " in tab.js(totals)[0]


def test_new_requests_and_use_appear(tab: Tab, gateway: Gateway) -> None:
    enter(tab, gateway.keys["acme"])
    count = "document.querySelectorAll('#requests tbody tr').length"
    before = tab.js(count)
    gateway.post(CHAT, chat()).raise_for_status()
    tab.until(f"{count} === {before + 1}")


@pytest.mark.parametrize(
    ("silent", "said"),
    [
        ("2", "2 gateways did not answer: some requests are missing."),
        ("null", "The other gateways did not answer: some requests are missing."),
    ],
)
def test_gateways_that_do_not_answer_are_told(
    tab: Tab, gateway: Gateway, silent: str, said: str
) -> None:
    tab.js(
        "(() => { const ask = fetch; window.fetch = async (path, how) => {"
        " const answer = await ask(path, how); if (path !== 'v1/requests') return answer;"
        f" return Response.json({{ ...(await answer.json()), silent: {silent} }}); }} }})()"
    )
    enter(tab, gateway.keys["acme"])
    tab.until(f"document.getElementById('requests').innerText.includes('{said}')")


def test_a_key_for_some_adapters_sees_those_alone(tab: Tab, gateway: Gateway) -> None:
    gateway.register("acme/draft")
    _, key = gateway.catalog.create_key("acme", {Scope.INFER}, adapters=("draft",), actor="test")
    enter(tab, key)
    said = tab.text("#adapters")
    assert "This key may use only draft." in said
    assert "acme/draft" in said
    assert "support" not in said
    assert "tiny" not in [
        *tab.js("[...document.querySelectorAll('#adapters td:first-child')].map(e => e.innerText)")
    ]


def test_a_key_that_only_reads_is_enough_and_stays_after_a_reload(
    tab: Tab, gateway: Gateway
) -> None:
    _, key = gateway.catalog.create_key("acme", {Scope.READ_ONLY}, name="dash", actor="test")
    enter(tab, key)
    assert "dash" in tab.text("#totals")
    tab.reload()
    tab.until("document.querySelector('#adapters td') !== null")
    tab.js("document.getElementById('forget').click()")
    assert tab.js("sessionStorage.length + localStorage.length") == 0


def test_revoking_the_key_returns_to_login(tab: Tab, gateway: Gateway) -> None:
    record, key = gateway.catalog.create_key("acme", {Scope.INFER}, actor="test")
    enter(tab, key)
    gateway.catalog.revoke_key(record.id, actor="test")
    tab.until("!document.getElementById('login').hidden")
    assert "refuses this key" in tab.text("#login-error")


def test_the_public_listener_shows_an_admin_nothing(tab: Tab, gateway: Gateway) -> None:
    log_in(tab, gateway.admin_key)
    tab.until("document.getElementById('login-error').innerText.includes('admin listener')")
    assert tab.js("sessionStorage.length + localStorage.length") == 0


def test_a_tenant_sees_the_same_at_the_admin_listener(tab: Tab, gateway: Gateway) -> None:
    tab.open(f"{gateway.url}/ui")
    before = len(tab.asked)
    enter(tab, gateway.keys["globex"])
    assert "globex/secret" in tab.text("#adapters")
    assert tab.js("document.getElementById('fleet').hidden")
    assert not [url for url in tab.asked[before:] if "/admin/" in url]


def test_nothing_is_wider_than_the_screen(tab: Tab, gateway: Gateway) -> None:
    enter(tab, gateway.keys["acme"])
    for width in (1440, 420, 320):
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        tab.command("Emulation.setDeviceMetricsOverride", **size)
        tab.until(f"innerWidth === {width}")
        assert tab.js("document.documentElement.scrollWidth") <= width
    tab.command("Emulation.clearDeviceMetricsOverride")
