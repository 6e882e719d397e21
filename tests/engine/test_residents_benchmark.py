"""The benchmark of many residents, with few: all are there, and what they give is checked."""

import json
import sys
from dataclasses import asdict
from functools import partial

import pytest
import torch

from engine.benchmarks import residents
from engine.benchmarks.offline import Work
from engine.benchmarks.random_adapters import random_layout
from engine.benchmarks.residents import Q_AND_V, Kind
from lorikeet_engine.adapter_format import BaseShape
from lorikeet_engine.sampling import Sampler
from tests.engine.tiny_engine import CONFIG, SETTINGS

KINDS = (Kind(40, 8, Q_AND_V), Kind(12, 16, tuple(range(7))))
KV_BYTES = 8 << 20
LARGE = random_layout(BaseShape.from_config(CONFIG), 16).elements * 4
tiny = partial(
    residents.measure,
    kinds=KINDS,
    config=CONFIG,
    settings=SETTINGS,
    host_bytes=5 * LARGE,
    work=Work("tiny", 9, 6, requests=16),
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """One thread, and not nine tenths of the machine's memory."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(residents, "Share", lambda _of_free: KV_BYTES)
    yield
    torch.set_num_threads(threads)


def test_all_adapters_are_there_at_once_and_no_byte_is_left_over(tmp_path, capsys):
    row = tiny(tmp_path)
    assert row.adapters == 52
    assert row.arena_share == 1
    q_and_v = random_layout(BaseShape.from_config(CONFIG), 8, Q_AND_V).elements * 4
    assert row.arena_bytes == 40 * q_and_v + 12 * LARGE
    assert row.kv_bytes == KV_BYTES
    assert row.kv_tokens == KV_BYTES // (2 * 2 * 2 * 16 * 4)  # layers, K and V, heads, width, bytes
    assert 0 < row.fill_s < row.took_s
    assert row.loads_per_s == pytest.approx(52 / row.fill_s)
    assert row.tokens_per_s > 0
    assert row.shortfall < 1e-4
    residents.show(row)
    assert "52 adapters on the device" in capsys.readouterr().out


def test_wrong_tokens_are_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(Sampler, "sample", lambda self, logits, *_: torch.argmin(logits, -1))
    with pytest.raises(AssertionError, match="plain path"):
        tiny(tmp_path)


def test_main_writes_what_it_measured(tmp_path, monkeypatch):
    rows = []

    def measure(folder):
        rows.append(tiny(folder))
        return rows[-1]

    monkeypatch.setattr(residents, "measure", measure)
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["residents", "--json", str(out), "--commit", "abc"])
    residents.main()
    written = json.loads(out.read_text())
    assert written["commit"] == "abc"
    assert written["residents"] == asdict(rows[0])
