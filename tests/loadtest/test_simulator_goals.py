"""What the simulator prints, and how it judges."""

import json
import math
import sys
from dataclasses import replace

import pytest

from loadtest.simulator import __main__ as command
from loadtest.simulator import figures
from loadtest.simulator.goals import HOT, OURS, goals, scenario_name, scenarios, trials
from loadtest.simulator.oracle import ORACLE
from loadtest.simulator.outcome import Outcome, summarize
from loadtest.simulator.scenario import Scenario
from loadtest.simulator.trials import ALL_RESIDENT, measure

SMALL = Scenario(adapters=100, replicas=2, duration_s=40.0, warm_up_s=10.0)
EVEN = Outcome("any", 100, 0.9, 100, 10.0, 0.1, 0.2, 1.1, 1.2)


def all_alike(**ours):
    """Outcomes in which everybody does equally well, but for ours."""
    found = {}
    for name, router in trials():
        found.setdefault(name, {})[router] = replace(EVEN, router=router)
    return {name: {**of, OURS: replace(EVEN, **ours)} for name, of in found.items()}


def missed(outcomes):
    return [goal for goal in goals(outcomes) if not goal.met]


def test_every_goal_is_met_by_who_never_misses_nor_waits():
    assert not missed(all_alike(hit_rate=1.0, cold_loads=1, ttft_p99_s=0.01, balance=1.0))


def test_who_is_no_better_than_others_misses_what_asks_for_more():
    wanted = {(goal.against, goal.what) for goal in missed(all_alike())}
    assert wanted == {
        ("power of two", "cold loads ÷"),
        ("power of two", "p99 TTFT ÷"),
        ("multiplexing", "p99 TTFT ÷"),
    }


@pytest.mark.parametrize(
    ("worse", "against"),
    [
        ({"hit_rate": 0.8}, ORACLE),
        ({"balance": 1.3}, "multiplexing"),
        ({"ttft_p99_s": 0.3}, "bounded hashing"),
        ({"cold_loads": 101}, "bounded hashing"),
    ],
)
def test_each_goal_can_be_missed_alone(worse, against):
    good = {"hit_rate": 1.0, "cold_loads": 1, "ttft_p99_s": 0.01, "balance": 1.0}
    assert against in {goal.against for goal in missed(all_alike(**good | worse))}


def test_the_goals_are_for_four_and_sixteen_replicas_at_every_exponent():
    named = scenarios()
    assert named.pop(HOT).hot_share == 0.4
    assert {(one.replicas, one.popularity) for one in named.values()} == {
        (replicas, f"zipf:{s}") for replicas in (4, 16) for s in (0.8, 1.0, 1.2, 1.5)
    }
    assert named[scenario_name(4, 1.2)].popularity == "zipf:1.2"


def test_outcomes_count_only_what_comes_after_the_warm_up():
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


def test_with_room_for_all_there_are_only_first_loads():
    roomy, oracle = measure((SMALL, ALL_RESIDENT)), measure((SMALL, ORACLE))
    assert roomy.requests == oracle.requests
    assert roomy.cold_loads <= SMALL.adapters * SMALL.replicas


def test_the_command_writes_what_it_prints(tmp_path, monkeypatch, capsys):
    path = tmp_path / "run.json"
    options = "--adapters 50 --replicas 2 --duration-s 20 --warm-up-s 5 --rate-per-s 10"
    arguments = ["simulator", "run", "--router", "power of two", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", [*arguments, *options.split(), "--trace", "conv"])
    assert command.main() == 0
    written, printed = json.loads(path.read_text()), capsys.readouterr().out
    assert written["router"] == "power of two"
    assert f"{written['cold_loads']:,}" in printed
    assert math.isfinite(written["ttft_p99_s"])


def test_figures_are_drawn_from_what_the_goals_wrote(tmp_path):
    outcomes = [
        {"where": name, "router": router, "hit_rate": 0.5, "loaded_gb": 1.0}
        | {"ttft_p99_s": math.nan if router == ORACLE else 1.0, "balance": 1.0}
        for name, router in trials()
    ]
    figures.draw(outcomes, 4, tmp_path / "4.png")
    assert (tmp_path / "4.png").read_bytes().startswith(b"\x89PNG")
