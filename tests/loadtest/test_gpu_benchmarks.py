"""Benchmarks for GPUs, small, on a CPU: the whole service, every answer complete."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = ("--shape=tiny", "--device=cpu", "--kv=64MiB")
SMALL_STEPS = "--batch-tokens=256"
FEW_ADAPTERS = ("--adapters=12", "--context=64", "--gpu=256KiB", "--host=512KiB", "--disk=64MiB")
ALONE = ("--gateways=1", "--clients=1", "--proxy", "Serve's proxy")

pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]


@pytest.fixture
def bench(tmp_path):
    """Run one of the benchmarks; return its output and its JSON."""

    def bench(module, *options):
        out = tmp_path / "out.json"
        command = [sys.executable, "-m", module, "--folder", str(tmp_path), "--json", str(out)]
        done = subprocess.run(
            [*command, *TINY, *options],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode in (0, 1), done.stderr  # 1: a CPU misses the goals
        return done.stdout, json.loads(out.read_text())

    return bench


def test_engines_are_compared_with_and_without_the_service(bench):
    sizes = ("--adapters=4", "--rank=8", "--streams=4", "--rounds=2", "--work", "16/16")
    printed, wrote = bench(
        "loadtest.bench_http",
        "--replicas=1",
        "--gateways",
        "1",
        "--proxies",
        "Serve's proxy",
        "--clients=1",
        SMALL_STEPS,
        *sizes,
    )
    (row,) = wrote["http"]
    (alone,) = wrote["offline"]
    assert row["requests"] == 8
    assert row["found"] == {"gpu": 8}
    assert row["share"] == pytest.approx(row["tokens_per_s"] / alone["tokens_per_s"])
    assert alone["shortfall"] < 1e-4
    assert set(row["stages_ms"]["any"]) >= {"validate", "queue", "prefill", "decode"}
    assert "Serve's proxy, 1 gateways, 16/16" in printed


def test_the_goodput_of_a_small_model_is_found_with_its_stages(bench):
    rates = ("--seconds=5", "--first-rate=2", "--points=2", "--goal-ms=1000")
    printed, wrote = bench("loadtest.bench_goodput", *ALONE, *FEW_ADAPTERS, *rates, SMALL_STEPS)
    rows = wrote["goodput"]
    assert [row["failures"] for row in rows] == [{}, {}]
    assert all(sum(row["found"].values()) == row["requests"] > 0 for row in rows)
    assert all(set(row["stages_ms"]) == {"slowest", "any"} for row in rows)
    assert wrote["best_per_s"] == max((r["rate_per_s"] for r in rows if r["good"]), default=0)
    assert f"goodput: {wrote['best_per_s']:g} requests a second" in printed


def test_structured_streams_are_compared_with_plain_streams(bench):
    sizes = ("--checked=2", "--streams=4", "--tokens=24", "--rounds=2", "--repeats=1")
    printed, wrote = bench(
        "loadtest.bench_structured",
        "--gateways=1",
        "--proxy",
        "Serve's proxy",
        SMALL_STEPS,
        *sizes,
    )
    assert "all answers fit their schemas; streams of 24 tokens" in printed
    alike, mixed = wrote["alike"], wrote["mixed"]
    kinds = [(schema, streams) for schema in ("flat", "nested", "enums") for streams in (1, 4)]
    assert [(row["schema"], row["streams"]) for row in alike] == kinds
    for row in alike:
        assert row["of_plain"] == pytest.approx(row["structured"] / row["plain"])
        assert 0.2 < row["events"] < 0.9, "tokens that are forced come together"
    for row, four in zip(mixed, alike[1::2], strict=True):
        assert row["schema"] == four["schema"]
        assert row["plain_kept"] == pytest.approx(row["plain"] / four["plain"])
        assert row["structured_kept"] == pytest.approx(row["structured"] / four["structured"])
        assert row["of_plain"] == pytest.approx(row["structured"] / row["plain"])


def test_pushes_are_timed_stage_by_stage_beside_streams(bench):
    sizes = ("--rank=8", "--adapters=2", "--replicas=2", "--gateways=1", "--clients=1")
    streams = ("--streams=2", "--tokens=100", "--rounds=2", "--periods=1", "--every=0.5")
    printed, wrote = bench(
        "loadtest.bench_push", "--proxy", "Serve's proxy", SMALL_STEPS, *sizes, *streams
    )
    assert wrote["pushes"]
    for push in wrote["pushes"]:
        whole, sent = push.pop("first_token"), push.pop("sent")
        assert min(push.values()) > 0
        assert sum(push.values()) == pytest.approx(whole, abs=1e-3)
        assert sent < whole
    stages = [row["stage"] for row in wrote["stages"]]
    assert stages[0] == "first_token"
    assert set(stages) == {"first_token", "sent", *push}
    assert [row["pushes"] for row in wrote["gaps"]] == [False, True]
    assert all(0 < row["p50"] <= row["p99"] <= row["most"] for row in wrote["gaps"])
    assert "first_token" in printed
