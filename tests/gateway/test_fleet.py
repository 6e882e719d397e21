"""GET /admin/v1/fleet: the page's data, from all gateways, bounded in size."""

import asyncio
import gzip
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorikeet.errors import StoreError, Unavailable
from lorikeet.gateway.admin import fleet_view as fleet_routes
from lorikeet.gateway.admin.fleet_view import FleetView
from lorikeet.protocol.messages import AnswerHeader, Call, Refusal
from lorikeet.protocol.peers import Peers
from lorikeet.request_log.recent_traffic import (
    SPAN_S,
    WINDOW_S,
    RecentTraffic,
    lines_of,
    waiting_of,
)
from lorikeet.request_log.record import RequestRecord
from lorikeet.request_log.request_log import RequestLog
from lorikeet_engine.adapter import Residency
from tests.gateway.conftest import Gateway, Items, chat, repeat, serving
from tests.gateway.linked_peers import LinkedPeers
from tests.ui.made import ARENA, MIB, block, replica
from tests.waiting import eventually, until

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable sharing of answers between requests."""
    monkeypatch.setattr(fleet_routes, "FRESH_S", 0.0)


def fleet(gateway: Gateway) -> dict[str, Any]:
    answer = gateway.admin("GET", "/fleet")
    assert answer.is_success, answer.text
    said: dict[str, Any] = answer.json()
    return said


def found_on(tier: Residency):
    async def answer(call: Call) -> Items:
        async for item in repeat(call):
            yield AnswerHeader("r0", "d" * 64, tier) if isinstance(item, AnswerHeader) else item

    return answer


# Adapters in arenas.


def test_adapters_in_arenas_are_listed_and_names_sent_once(gateway: Gateway) -> None:
    shared = block("support", (0, 64), leases=3, pinned=True)
    cut = block("triage", (64, 32), (512, 16), tenant="globex", rank=16)
    gateway.engines.maps = [replica("r1", [shared]), replica("r0", [shared, cut])]
    said = fleet(gateway)
    assert said["tenants"] == ["acme", "globex"]
    assert said["adapters"] == [
        [0, "support", 1, 8, shared.digest[:16]],
        [1, "triage", 1, 16, cut.digest[:16]],
    ]
    first, second = said["replicas"]
    assert (first["replica"], second["replica"]) == ("r0", "r1")
    assert first["blocks"] == [
        [0, 3, 1, 0, 64 * MIB],
        [1, 0, 0, 64 * MIB, 32 * MIB, 512 * MIB, 16 * MIB],
    ]
    assert first["gpu"] == {"adapters": 2, "used_bytes": 112 * MIB, "total_bytes": ARENA}
    assert (first["host"]["used_bytes"], first["disk"]["adapters"]) == (ARENA, 7)
    told = [first[name] for name in ("running", "waiting", "kv_pages_used", "kv_pages_total")]
    assert told == [3, 1, 20, 100]


def test_thousands_of_adapters_take_a_few_hundred_kilobytes(gateway: Gateway) -> None:
    blocks = [
        block(f"adapter-{n}", (n, 1), tenant=f"tenant-{n % 400}", leases=n % 3) for n in range(2300)
    ]
    gateway.engines.maps = [replica(f"r{n}", blocks) for n in range(4)]
    answer = gateway.admin("GET", "/fleet")
    assert answer.headers["content-encoding"] == "gzip"
    assert len(answer.json()["replicas"]) == 4
    assert len(gzip.compress(answer.content, 1)) < 150_000


# Time series of traffic.


def test_hits_times_and_refusals_are_counted_second_by_second(gateway: Gateway) -> None:
    for tier in (Residency.GPU, Residency.GPU, Residency.GPU, Residency.HOST):
        gateway.engines.replay = found_on(tier)
        with gateway.openai().chat.completions.create(**chat(stream=True)) as stream:
            assert list(stream)
    gateway.post(CHAT, {**chat(), "temperature": 9})

    async def fail(call: Call) -> Items:
        yield Refusal("generation_failed", "no")

    gateway.engines.replay = fail
    gateway.post(CHAT, chat())
    time.sleep(1)  # until the second is over
    lines = fleet(gateway)["lines"]
    assert {len(line) for line in lines.values()} == {SPAN_S}
    assert sum(lines["requests"][-WINDOW_S - 3 :]) >= 6 / WINDOW_S
    assert max(lines["refused"]) == max(lines["failed"]) == 1 / WINDOW_S
    assert 0.75 in lines["hit_rate"]
    assert lines["hit_rate"][0] is None
    times = [each for each in lines["ttft_p50_ms"] if each is not None]
    assert 0 < min(times) <= max(t for t in lines["ttft_p99_ms"] if t is not None) < 5000


def test_quantiles_are_right_to_a_twentieth() -> None:
    traffic, record = counted()
    received = int(time.time())
    for ms in range(1, 101):
        traffic.ended(replace(record, stream=True, received=received, first_byte_s=ms / 1000))
    lines = lines_of(asyncio.run(traffic.everywhere()).answers, received + 1)
    assert lines["ttft_p50_ms"][-1] == pytest.approx(50, rel=0.05)
    assert lines["ttft_p99_ms"][-1] == pytest.approx(99, rel=0.05)
    assert lines["requests"][-1] == 100 / WINDOW_S


def test_traffic_of_minutes_ago_is_forgotten() -> None:
    traffic, record = counted()
    now = time.time()
    for ago_s in range(4 * SPAN_S, 0, -1):
        traffic.ended(replace(record, received=now - ago_s))
    (said,) = asyncio.run(traffic.everywhere()).answers
    assert len(said.seconds) <= SPAN_S + WINDOW_S + 1
    lines = lines_of([said], now)
    assert lines["requests"][1:] == [1.0] * (SPAN_S - 1)


def counted() -> tuple[RecentTraffic, RequestRecord]:
    """A gateway's traffic counts, and an ended request to count."""
    peers = Peers()
    record = RequestRecord("a" * 32, CHAT, None, time.time(), "acme", "key-1", ended=True)
    return RecentTraffic(peers, RequestLog(peers)), record


# Waiting requests.


@contextmanager
def waiting(gateway: Gateway, *models: str) -> Iterator[None]:
    """Open a request for each model that gets no first token during the context."""
    answering = threading.Event()

    async def later(call: Call) -> Items:
        yield AnswerHeader("r0", "d" * 64, Residency.REMOTE)
        while not answering.is_set():
            await asyncio.sleep(0.01)
        async for item in repeat(call):
            yield item

    gateway.engines.replay = later
    threads = [threading.Thread(target=gateway.post, args=(CHAT, chat(m))) for m in models]
    for thread in threads:
        thread.start()
    assert eventually(lambda: len(gateway.engines.calls) == len(models))
    try:
        yield
    finally:
        answering.set()
        for thread in threads:
            thread.join()


def test_waiting_requests_are_listed_with_their_longest_wait(gateway: Gateway) -> None:
    with waiting(gateway, "acme/support", "acme/support", "tiny"):
        time.sleep(0.3)
        said = fleet(gateway)["waiting"]
    assert said["requests"] == 3
    rows = {row["adapter"]: row for row in said["rows"]}
    assert (rows["acme/support@1"]["requests"], rows[None]["requests"]) == (2, 1)
    assert rows[None]["base_model"] == "tiny"
    assert all(row["tenant"] == "acme" and 0.3 < row["oldest_s"] < 10 for row in said["rows"])
    assert fleet(gateway)["waiting"] == {"requests": 0, "rows": []}


# Several gateways, some of which do not answer.


def test_every_gateway_counts_the_requests_of_all() -> None:
    here, there = LinkedPeers(silent=1), Peers()
    here.trouble = Unavailable("nobody can be asked now")
    one, two = RequestLog(here), RequestLog(there)
    traffic, others = RecentTraffic(here, one), RecentTraffic(there, two)
    for counts, request_log in ((traffic, one), (others, two)):
        counts.ended(counted()[1])
        trace = request_log.trace("b" * 32)
        trace.set_caller("acme", "key-1")
        trace.__enter__()
    alone = asyncio.run(traffic.everywhere())
    assert (len(alone.answers), alone.silent) == (1, None)
    here.trouble, here.others = None, (there,)
    together = asyncio.run(traffic.everywhere())
    assert (len(together.answers), together.silent) == (2, 1)
    assert [row.requests for row in waiting_of(together.answers)] == [2]
    assert lines_of(together.answers, time.time() + 1)["requests"][-1] == 4 / WINDOW_S


def test_unmet_pins_are_listed_with_the_reason(gateway: Gateway) -> None:
    gateway.admin("PUT", "/pins/acme/support", {"reason": "launch"})
    pins = fleet(gateway)["pins"]
    assert pins["met"] + pins["loading"] + pins["unmet"] == 1
    (row,) = pins["rows"]
    assert row["pin"] == "acme/support@prod"
    assert (row["state"] == "unmet") == bool(row.get("reason"))


def test_concurrent_requests_share_one_answer(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    came, asked, now = [], [], FleetView.now

    async def counted(view):
        came.append(1)
        return await now(view)

    async def slowly(_tier):
        asked.append(1)
        await until(lambda: len(came) == len(threads), within_s=20)
        return []

    monkeypatch.setattr(FleetView, "now", counted)
    gateway.engines.reports = slowly
    threads = [threading.Thread(target=gateway.admin, args=("GET", "/fleet")) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 1


# The page itself.


def test_the_page_has_no_data_and_loads_nothing_from_elsewhere(unchanged: Gateway) -> None:
    page = unchanged.request("GET", "/ui", None)
    assert page.is_success
    policy = dict(
        part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert {policy[kind] for kind in ("script-src", "style-src", "img-src", "connect-src")} == {
        "'self'"
    }
    assert "<script>" not in page.text
    assert "style=" not in page.text
    assert unchanged.keys["acme"] not in page.text
    assert "acme" not in page.text
    static = Path(__file__).parents[2] / "platform" / "lorikeet" / "ui" / "static"
    for file in static.iterdir():
        answer = unchanged.request("GET", f"/ui/{file.name}", None)
        assert answer.content == file.read_bytes()
        assert answer.headers["content-security-policy"] == page.headers["content-security-policy"]
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")  # only a name like a URL
        assert "http://" not in text
        assert "https://" not in text


def test_a_file_that_has_not_changed_is_not_sent_again(unchanged: Gateway) -> None:
    first = unchanged.request("GET", "/ui/page.js", None)
    assert first.headers["content-type"].startswith("text/javascript")
    headers = {"if-none-match": first.headers["etag"]}
    again = httpx.get(f"{unchanged.url}/ui/page.js", headers=headers)
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "name", ["nothing.js", "..%2froutes.py", "%2e%2e%2froutes.py", "__init__.py"]
)
def test_no_other_file_is_served(unchanged: Gateway, name: str) -> None:
    assert unchanged.request("GET", f"/ui/{name}", None).status_code == 404


def test_only_pins_are_missing_while_the_catalog_does_not_answer(tmp_path: Path) -> None:
    with serving(tmp_path) as gateway:
        gateway.engines.maps = [replica("r0", [block("support", (0, 64))])]

        reports = gateway.engines.reports

        async def broken(tier=Residency.DISK):
            if tier is Residency.GPU:
                return await reports(tier)
            raise StoreError("the catalog does not answer")

        gateway.engines.reports = broken
        said = fleet(gateway)
    assert said["pins"] is None
    assert json.dumps(said["replicas"])
