"""Loading benchmark on a tiny engine: adapters are in their tiers, and streams are undisturbed."""

import itertools
import json
import sys
import time
from dataclasses import replace
from functools import partial

import pytest

from loadtest.engine import harness, loading
from loadtest.engine.loading import Client
from loadtest.engine.random_engine import SETTINGS as BENCHMARKED
from loadtest.engine.random_model import LLAMA_3_1_8B, QWEN3_30B_A3B
from loadtest.engine.tiered_engine import (
    FEW,
    TierCounts,
    counts_of,
    image_bytes,
    tiered_engine,
    write_random_blobs,
)
from lorikeet_engine.adapter import Residency
from lorikeet_engine.errors import EngineClosed
from lorikeet_engine.process import client as client_module
from tests.engine import forked_engines
from tests.engine.tiny_engine import CONFIG, SETTINGS

COUNTS = TierCounts(gpu=4, host=9, disk=10, gpu_spare=4, host_spare=2)
TINY = replace(SETTINGS, max_batch_tokens=64)
LONG = {**CONFIG, "max_position_embeddings": 4096}


@pytest.fixture(scope="module", autouse=True)
def forked_processes():
    """Fork engines' processes from one that has imported torch, and has one thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_module, "_start", forked_engines.start)
        yield


@pytest.fixture(scope="module")
def blobs(tmp_path_factory):
    return write_random_blobs(tmp_path_factory.mktemp("blobs"), COUNTS, LONG)


@pytest.fixture(scope="module")
def client(blobs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    with Client(partial(tiered_engine, folder, blobs, COUNTS, LONG, TINY)) as client:
        yield client


@pytest.fixture(scope="module")
def adapters(blobs):
    return {tier: itertools.cycle(refs) for tier, refs in COUNTS.refs(blobs).items()}


@pytest.fixture
def few(monkeypatch):
    for name, value in {
        "ROUNDS": 12,
        "AT_A_TIME": 5,
        "PHASE_S": 0.5,
        "PHASES": 2,
        "LOADS": 3,
    }.items():
        monkeypatch.setattr(loading, name, value)


def test_first_tokens_come_from_every_tier(client, adapters, few, capsys):
    rows = loading.first_tokens(client, adapters, streams=0)
    rows += loading.first_tokens(client, adapters, streams=3)
    assert [(row.streams, row.found) for row in rows] == [
        (streams, tier) for streams in (0, 3) for tier in ("gpu", "host", "disk")
    ]
    assert all(0 < row.ms[0] <= row.ms[1] for row in rows)
    assert rows[0].added_ms == [0, 0]
    gpu, _, disk = rows[:3]
    added_ms = [a - b for a, b in zip(disk.ms, gpu.ms, strict=True)]
    assert disk.added_ms == pytest.approx(added_ms, abs=1e-3)
    titles, gpu, *_ = capsys.readouterr().out.splitlines()
    assert titles.split() == ["streams", "found", "ms", "added_ms"]
    assert gpu.split()[:2] == ["0", "gpu"]


def test_an_adapter_in_another_tier_is_refused(client, adapters):
    with pytest.raises(AssertionError, match="found on gpu"):
        client.first_token_s(next(adapters[Residency.GPU]), Residency.HOST)


def test_streams_are_timed_alone_and_beside_loads(client, adapters, few, capsys):
    alone, from_host, from_disk = loading.gaps(client, adapters, streams=3)
    assert [alone.loads_from, from_host.loads_from, from_disk.loads_from] == [
        "nowhere", "host", "disk",
    ]  # fmt: skip
    for row in (alone, from_host, from_disk):
        assert len(row.phases_ms) == 2
        assert 0 < row.ms[0] <= row.ms[1]
        assert min(p99 for _, p99 in row.phases_ms) <= row.ms[1]
        assert row.behind_ms < 1000
    assert alone.growth == [0, 0]
    assert from_host.growth[0] == pytest.approx(from_host.ms[0] / alone.ms[0] - 1)
    assert "\ndisk " in capsys.readouterr().out


def test_gaps_are_measured_in_each_stream_between_two_moments(client, adapters):
    with client.streams(adapters[Residency.GPU], 2) as ids:
        begin_s = time.perf_counter()
        had = {i: len(client.came_s[i]) for i in ids}
        client.until(lambda: all(len(client.came_s[i]) > had[i] + 3 for i in ids), 20.0)
        end_s = time.perf_counter()
        gaps_ms = client.gaps_ms(ids, begin_s, end_s)
        came_s = [[t for t in client.came_s[i] if begin_s <= t <= end_s] for i in ids]
    assert all(len(times_s) > 2 for times_s in came_s)
    assert len(gaps_ms) == sum(len(times_s) - 1 for times_s in came_s)
    spans_ms = [1e3 * (times_s[-1] - times_s[0]) for times_s in came_s]
    assert sum(gaps_ms) == pytest.approx(sum(spans_ms))


def test_ten_loads_a_second_are_requested_and_all_complete(client, adapters):
    begin_s = time.perf_counter()
    last = client.load(adapters[Residency.HOST], Residency.HOST, begin_s + 1)
    assert 0.85 < time.perf_counter() - begin_s < 5.0
    client.arrival_of(last)
    client.first_token_s(last, Residency.GPU)
    end_s = time.monotonic() + 20.0
    while client.host.status.live.running:
        assert time.monotonic() < end_s, "a stream did not end"
        time.sleep(0.01)


def test_a_lost_engine_ends_the_run(blobs, tmp_path, adapters):
    with Client(partial(tiered_engine, tmp_path, blobs, COUNTS, LONG, TINY)) as client:
        client._fail(EngineClosed("it ended"))
        with pytest.raises(EngineClosed):
            client.first_token_s(next(adapters[Residency.GPU]), Residency.GPU)


def test_loads_are_timed_until_the_adapter_is_on_the_gpu(client, adapters, few):
    (row,) = loading.loads(client, adapters, streams=2, gpu_bytes=10**6)
    assert 0 < row.ready_ms[0] <= row.ready_ms[1]
    assert row.gb_per_s == pytest.approx(1 / row.ready_ms[0])


@pytest.fixture
def run(tmp_path, few, monkeypatch):
    """Run the program on a tiny model, with options; return its JSON."""
    monkeypatch.setitem(harness.CONFIGS, "llama-3.1-8b", LONG)
    monkeypatch.setattr(harness, "SETTINGS", TINY)

    def run(*options, counts=COUNTS):
        monkeypatch.setattr(loading, "counts_of", lambda image: counts)
        out = tmp_path / "out.json"
        fixed = ["loading", "--json", str(out), "--commit", "abc", "--streams", "3"]
        kv = ["--kv-bytes", str(TINY.kv_bytes)]
        monkeypatch.setattr(sys, "argv", [*fixed, *kv, *options])
        loading.main()
        return json.loads(out.read_text())

    return run


def test_main_writes_its_measurements(run):
    written = run()
    assert written["commit"] == "abc"
    assert [row["found"] for row in written["first_tokens"]] == ["gpu", "host", "disk"] * 2
    assert [row["streams"] for row in written["loads"]] == [0, 3]
    assert [row["loads_from"] for row in written["gaps"]] == ["nowhere", "host", "disk"]
    assert written["loads_per_s"] == 10


def test_large_adapters_are_few_and_loaded_only_from_the_host_even_by_two_ranks(run):
    one = run("--rank", "8", counts=FEW)
    two = run("--rank", "16", "--tensor-parallel", "2", counts=FEW)
    for written in (one, two):
        assert [row["found"] for row in written["first_tokens"]] == ["gpu", "host"] * 2
        assert [row["loads_from"] for row in written["gaps"]] == ["nowhere", "host"]
    assert one["loads"][0]["gpu_bytes"] < two["loads"][0]["gpu_bytes"]


def test_an_adapter_of_one_gib_is_large_and_that_of_8b_is_not():
    dense = image_bytes(LLAMA_3_1_8B, BENCHMARKED)
    of_experts = image_bytes(QWEN3_30B_A3B, BENCHMARKED)
    assert (dense, of_experts) == (83_886_080, pytest.approx(1.7e9, rel=0.02))
    assert counts_of(dense) == counts_of(2 * dense) == TierCounts()
    assert counts_of(of_experts).disk == 0
    of_two = image_bytes(LLAMA_3_1_8B, replace(BENCHMARKED, tensor_parallel=2), 24)
    assert of_two / 2 == pytest.approx(dense, rel=0.02), "what one GPU has of rank 24"
