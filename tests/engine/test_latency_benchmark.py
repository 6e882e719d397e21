"""The latency benchmark: its traffic, its reckoning, and an engine in a process of its own."""

import json
import sys
from functools import partial

import numpy as np
import pytest

from engine.benchmarks import latency
from engine.benchmarks.hosted import Client, checked_engine
from engine.benchmarks.latency import Traffic
from engine.benchmarks.offline import Work
from lorikeet_engine.errors import InvalidRequest
from tests.engine.tiny_engine import CONFIG, SETTINGS


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """In the engines' processes: two would mostly wait for each other over such small tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def test_requests_fit_the_context_and_fall_on_the_popular_adapters():
    due = Traffic(rate_per_s=50, duration_s=20, adapters=10).draw(vocab=256, context=2048)
    times_s, requests = zip(*due, strict=True)
    assert list(times_s) == sorted(times_s)
    assert 900 < len(due) < 1100
    assert all(len(r.prompts[0]) + r.sampling.max_tokens <= 2048 for r in requests)
    assert np.median([len(r.prompts[0]) for r in requests]) == pytest.approx(757, rel=0.1)
    assert np.median([r.sampling.max_tokens for r in requests]) == pytest.approx(151, rel=0.1)
    names = [r.adapter.name for r in requests]
    assert names.count("random-0") > 2 * names.count("random-3") > 0


def test_the_same_traffic_comes_again_with_nothing_in_the_prefix_cache():
    traffic = Traffic(20, 5, adapters=0, lengths=(7, 3))
    one, other = (traffic.draw(256, 64) for _ in range(2))
    assert [(t, r.prompts, r.adapter) for t, r in one] == [
        (t, r.prompts, r.adapter) for t, r in other
    ]
    assert {r.salt for _, r in one}.isdisjoint(r.salt for _, r in other)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    build = partial(
        checked_engine,
        Work("check", 9, 6, adapters=3, requests=8),
        folder=tmp_path_factory.mktemp("server"),
        adapters=3,
        room=3,
        config=CONFIG,
        settings=SETTINGS,
    )
    with Client(build) as client:
        yield client


def test_every_request_is_answered_and_timed(client):
    traffics = [Traffic(rate, 1, adapters=3, lengths=(20, 6)) for rate in (10, 40)]
    rows = [latency.measure(client, traffic) for traffic in traffics]
    assert [row.traffic for row in rows] == traffics
    for row in rows:
        assert row.requests > row.traffic.rate_per_s / 2
        assert 0 < row.ttft_ms[0] <= row.ttft_ms[1] <= row.ttft_ms[2]
        assert 0 < row.itl_ms[0] <= row.itl_ms[2]
        took_s = row.requests * 6 / row.tokens_per_s
        assert row.ttft_ms[2] / 1e3 < took_s < 1 + (row.ttft_ms[2] + 6 * row.itl_ms[2]) / 1e3


def test_a_request_that_the_engine_refuses_ends_the_run(client):
    with pytest.raises(InvalidRequest):
        latency.measure(client, Traffic(10, 1, adapters=0, lengths=(999, 6)))


def test_waiting_for_a_place_counts_towards_the_first_token(client):
    """More arrive than run at once, so the later ones wait for the earlier ones to end."""
    row = latency.measure(client, Traffic(1000, 0.1, adapters=0, lengths=(20, 20)))
    assert row.ttft_ms[2] > 100 * row.itl_ms[0]


def test_main_prints_and_writes_what_it_measured(tmp_path, monkeypatch, capsys):
    tiny = partial(checked_engine, config=CONFIG)
    monkeypatch.setattr(latency, "checked_engine", tiny)
    monkeypatch.setattr(latency, "SETTINGS", SETTINGS)
    out = tmp_path / "out.json"
    argv = ["latency", "--json", str(out), "--rates", "20", "--seconds", "0.5"]
    argv += ["--adapters", "2", "--lengths", "9", "4"]
    monkeypatch.setattr(sys, "argv", argv)
    latency.main()
    (row,) = json.loads(out.read_text())["latency"]
    assert row["traffic"]["lengths"] == [9, 4]
    assert len(row["ttft_ms"]) == 3
    _, titles, printed = capsys.readouterr().out.splitlines()
    assert "ttft_ms" in titles
    assert f"{row['ttft_ms'][0]:.4g}" in printed
