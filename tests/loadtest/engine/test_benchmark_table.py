"""Table of benchmarks: one engine serves all parts, and a failed part does not lose the others."""

import json
import sys

import pytest

from loadtest.engine import decode, harness, prefill, table, throughput
from loadtest.engine.offline import Work
from tests.engine.tiny_engine import tiny_engine

WORKS = (Work("base", 9, 40, requests=4), Work("2 adapters", 9, 40, adapters=2, requests=4))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the table over a tiny engine; return its exit status and its JSON."""
    monkeypatch.setattr(throughput, "ROOM", 2)
    monkeypatch.setattr(decode, "STEPS", 5)
    monkeypatch.setattr(prefill, "SQUARE", 64)
    monkeypatch.setattr(prefill, "WORKS", (Work("base", 37, 1, requests=2),))
    for module in (throughput, decode):
        monkeypatch.setattr(module, "WORKS", WORKS)
    monkeypatch.setattr(
        harness,
        "random_engine",
        lambda folder, *, config, settings, **adapters: tiny_engine(folder, **adapters),
    )

    def run(*arguments):
        out = tmp_path / "table.json"
        monkeypatch.setattr(sys, "argv", ["table", "--json", str(out), *arguments])
        with pytest.raises(SystemExit) as exited:
            table.main()
        return exited.value.code, json.loads(out.read_text())

    return run


def test_every_part_has_its_rows(run):
    status, written = run()
    assert status == 0
    assert {"gpu", "torch", "commit", "date"} < set(written)
    counts = {part: len(written[part]) for part in table.PARTS}
    assert counts == {"throughput": 2, "decode": 2, "prefill": 1}


def test_only_chosen_rows_are_measured(run):
    status, written = run("--parts", "throughput", "decode", "--rows", "2 adapters*")
    assert status == 0
    labels = {row["work"]["name"] for part in ("throughput", "decode") for row in written[part]}
    assert labels == {"2 adapters"}


def test_fewer_turns_can_be_chosen_with_adapters_only_on_the_gpu(run):
    status, written = run("--parts", "throughput", "--turns", "1", "--host-adapters", "1")
    assert status == 0
    assert [len(row["tokens_per_s"]) for row in written["throughput"]] == [1, 1]


def test_a_failed_part_does_not_lose_the_others(run, monkeypatch):
    short = (Work("too short to be timed", 9, 4, requests=4),)
    monkeypatch.setattr(decode, "WORKS", short)
    status, written = run("--parts", "decode", "throughput")
    assert "decode" in status
    assert "decode" not in written
    assert len(written["throughput"]) == 2
