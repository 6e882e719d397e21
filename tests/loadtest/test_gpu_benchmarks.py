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
