"""The page at /ui, in a real browser."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorikeet.catalog.records import Scope
from lorikeet.gateway.admin import fleet_view
from tests.gateway.conftest import Gateway, serving
from tests.ui.chromium import Tab, chromium
from tests.ui.made import block, replica
from tests.waiting import eventually

SUPPORT = block("support", (0, 256), rank=16, leases=2)
TRIAGE = block("triage", (256, 128), (768, 64), tenant="globex")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("chromium")) as tab:
        yield tab


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with pytest.MonkeyPatch.context() as patch, serving(tmp_path_factory.mktemp("g")) as running:
        patch.setattr(fleet_view, "PINS_FRESH_S", 0.0)
        yield running


@pytest.fixture
def tab(browser: Tab, gateway: Gateway) -> Iterator[Tab]:
    """The page before login, with two replicas of which one holds adapters."""
    gateway.engines.maps = [replica("r0", [SUPPORT, TRIAGE]), replica("r1", [])]
    browser.open(f"{gateway.url}/ui")
    yield browser
    assert browser.troubles == []


def log_in(tab: Tab, key: str) -> None:
    tab.js(f"document.getElementById('key').value = {json.dumps(key)}")
    tab.js("document.getElementById('login-form').requestSubmit()")


def look(tab: Tab, gateway: Gateway) -> None:
    log_in(tab, gateway.admin_key)
    tab.until("document.querySelectorAll('canvas').length === 2")


def focus(tab: Tab, at: int = 0) -> None:
    tab.js(f"document.querySelectorAll('canvas')[{at}].focus()")


def colours(tab: Tab, *shares: float) -> list[list[int]]:
    """Return the pixels of the first replica's arena at these shares of its bytes."""
    script = f"""(() => {{
        const canvas = document.querySelector('canvas');
        const line = canvas.getContext('2d').getImageData(0, canvas.height - 4, canvas.width, 1);
        const at = (share) => 4 * Math.round(canvas.width * share);
        return {list(shares)}.map((share) => [...line.data.slice(at(share), at(share) + 4)]);
    }})()"""
    found: list[list[int]] = tab.js(script)
    return found


def test_a_wrong_key_is_refused_and_a_right_one_is_kept_until_it_is_forgotten(
    tab: Tab, gateway: Gateway
) -> None:
    log_in(tab, "lk_wrong")
    tab.until("document.getElementById('login-error').innerText.includes('refuses this key')")
    _, publishing = gateway.catalog.create_key(
        "acme", {Scope.PUBLISH}, adapters=("*",), actor="test"
    )
    log_in(tab, publishing)
    tab.until("document.getElementById('login-error').innerText.includes('only pushes')")
    assert tab.js("sessionStorage.length + localStorage.length") == 0
    _, reading = gateway.catalog.create_key(None, {Scope.READ_ONLY}, actor="test")
    log_in(tab, reading)
    tab.until("document.getElementById('freshness-text').innerText === 'Live'")
    tab.reload()
    tab.until("document.getElementById('freshness-text').innerText === 'Live'")
    assert tab.js("document.getElementById('login').hidden")
    tab.js("document.getElementById('forget').click()")
    assert not tab.js("document.getElementById('login').hidden")
    assert tab.js("sessionStorage.length + localStorage.length") == 0


def test_revoking_the_key_returns_an_open_page_to_login(tab: Tab, gateway: Gateway) -> None:
    record, secret = gateway.catalog.create_key(None, {Scope.ADMIN}, actor="test")
    log_in(tab, secret)
    tab.until("document.querySelectorAll('canvas').length === 2")
    gateway.catalog.revoke_key(record.id, actor="test")
    tab.until("!document.getElementById('login').hidden")
    assert "refuses this key" in tab.text("#login-error")


def test_adapters_are_drawn_at_their_offsets(tab: Tab, gateway: Gateway) -> None:
    look(tab, gateway)
    tab.until("document.querySelector('canvas').height > 0")
    support, triage, free, rest, end = colours(tab, 0.1, 0.3, 0.5, 0.78, 0.95)
    assert triage == rest
    assert free == end
    assert len({tuple(each) for each in (support, triage, free)}) == 3
    assert "2 adapters, 1 in use" in tab.text(".replica .arena-caption")


def test_the_keyboard_reaches_every_adapter(tab: Tab, gateway: Gateway) -> None:
    look(tab, gateway)
    focus(tab)
    tab.press("Home")
    said = tab.text("#details")
    for each in ("acme/support@1", "16", "256 MiB at 0 B", "used by 2 sequences", "r0"):
        assert each in said
    tab.press("ArrowRight")
    said = tab.text("#details")
    for each in ("globex/triage@1", "192 MiB", "128 MiB at 256 MiB; 64.0 MiB at 768 MiB", "idle"):
        assert each in said
    tab.press("Escape")
    assert tab.js("document.getElementById('details').hidden")


def test_a_pin_appears(tab: Tab, gateway: Gateway) -> None:
    look(tab, gateway)
    assert "There are no pins." in tab.text("#pins")
    gateway.admin("PUT", "/pins/acme/support", {"reason": "launch"})
    gateway.engines.maps = [replica("r0", [SUPPORT._replace(pinned=True, kept=True), TRIAGE])]
    tab.until("document.getElementById('pins').innerText.includes('acme/support@prod')")
    tab.until("document.querySelector('.arena-caption').innerText.includes('1 pinned')")
    focus(tab)
    tab.press("Home")
    assert "pinned" in tab.text("#details")
    gateway.admin("DELETE", "/pins/acme/support")


def test_loads_and_evictions_are_listed(tab: Tab, gateway: Gateway) -> None:
    look(tab, gateway)
    gateway.engines.maps = [replica("r0", [SUPPORT, block("new", (512, 32))]), replica("r1", [])]
    tab.until("document.querySelectorAll('#moves li').length === 2")
    said = " ".join(tab.text("#moves").split())
    assert "loaded acme/new@1 32.0 MiB · r0" in said
    assert "evicted globex/triage@1 192 MiB · r0" in said


def test_a_replica_that_falls_silent_is_marked(tab: Tab, gateway: Gateway) -> None:
    look(tab, gateway)
    gateway.engines.maps = [replica("r1", [])]
    tab.until("document.querySelector('.replica.silent .state')?.innerText.includes('no answer')")
    assert "r0" in tab.text(".replica.silent")


def test_a_hidden_tab_does_not_poll(tab: Tab, gateway: Gateway) -> None:
    def hide(hidden: bool) -> None:
        tab.js(
            f"Object.defineProperty(document, 'hidden', {{value: {str(hidden).lower()}, "
            "configurable: true}), document.dispatchEvent(new Event('visibilitychange'))"
        )

    def asked() -> int:
        tab.js("document.title")  # receives the browser's pending messages
        return sum(url.endswith("/fleet") for url in tab.asked)

    look(tab, gateway)
    hide(True)
    tab.js("new Promise((done) => setTimeout(done, 100))")  # lets the running poll end
    before = asked()
    tab.js("new Promise((done) => setTimeout(done, 1300))")
    assert asked() == before
    hide(False)
    assert eventually(lambda: asked() > before)


def test_only_the_gateway_is_contacted(tab: Tab, gateway: Gateway) -> None:
    look(tab, gateway)
    foreign = [url for url in tab.asked if not url.startswith(("http://127.0.0.1:", "about:"))]
    assert foreign == []


def test_nothing_is_wider_than_the_screen(tab: Tab, gateway: Gateway) -> None:
    look(tab, gateway)
    for width in (1440, 420, 320):
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        tab.command("Emulation.setDeviceMetricsOverride", **size)
        tab.until(f"innerWidth === {width}")
        assert tab.js("document.documentElement.scrollWidth") <= width
    tab.command("Emulation.clearDeviceMetricsOverride")


def test_when_the_gateway_goes_away_the_page_says_so(browser: Tab, tmp_path: Path) -> None:
    with serving(tmp_path) as gateway:
        gateway.engines.maps = [replica("r0", [SUPPORT])]
        browser.open(f"{gateway.url}/ui")
        log_in(browser, gateway.admin_key)
        browser.until("document.getElementById('freshness-text').innerText === 'Live'")
    browser.until("document.getElementById('freshness').innerText.includes('does not answer')")
    browser.until("document.getElementById('age').innerText.includes(' s old')")
    assert browser.js("document.getElementById('content').classList.contains('old')")
    assert browser.js("document.querySelectorAll('canvas').length") == 1
