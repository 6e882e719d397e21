"""Outcomes of the simulator, and the command that prints them."""

import json
import math
import sys
from dataclasses import replace

from loadtest.simulator import __main__ as command
from loadtest.simulator.outcome import summarize
from loadtest.simulator.scenario import Scenario

SMALL = Scenario(adapters=100, replicas=2, duration_s=40.0, warm_up_s=10.0)


def test_outcomes_count_only_requests_after_the_warm_up():
    class Ran:
        setup = replace(SMALL, warm_up_s=10.0).setup()
        requests = SMALL.requests()
        late = requests.times_s >= 10.0
        ttft_s = late.astype(float)
        hits = late
        served_by = requests.adapters % 2
        replicas = (None, None)
        loads = ((9.0, 10**9), (11.0, 3 * 10**9))

    outcome = summarize("any", Ran)
    assert outcome.requests == Ran.late.sum()
    assert (outcome.hit_rate, outcome.ttft_p50_s, outcome.ttft_p99_s) == (1.0, 1.0, 1.0)
    assert (outcome.cold_loads, outcome.loaded_gb) == (1, 3.0)
    assert 1.0 <= outcome.balance <= outcome.balance_worst_minute + 1e-9


def test_the_command_writes_the_printed_rows(tmp_path, monkeypatch, capsys):
    path = tmp_path / "run.json"
    options = "--adapters 50 --replicas 2 --duration-s 20 --warm-up-s 5 --rate-per-s 10"
    arguments = ["simulator", "run", "--router", "power of two", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", [*arguments, *options.split(), "--trace", "conv"])
    assert command.main() == 0
    written, printed = json.loads(path.read_text()), capsys.readouterr().out
    assert written["router"] == "power of two"
    assert f"{written['cold_loads']:,}" in printed
    assert math.isfinite(written["ttft_p99_s"])
