"""Timing of prompts in a simulated replica, compared with steps computed by hand."""

from dataclasses import replace

import numpy as np
import pytest

from lorikeet.routing.ranking import H200_LLAMA_8B
from lorikeet.simulator.drafting import Drafting
from lorikeet.simulator.fleet import SimulatedFleet
from lorikeet.simulator.traffic import Requests
from lorikeet_engine.adapter import Residency
from lorikeet_engine.costs import seen_tokens
from tests.simulator.scenario import Scenario

STEPS = H200_LLAMA_8B.steps
FIRST_S = STEPS.prefill_s(100, 0)


def first_tokens_s(*requests, costs=H200_LLAMA_8B, **settings):
    """Simulate requests (time, prompt, answer) of the base model; return first token times in s.

    settings: fields of FleetSetup.
    """
    times_s, prompts, answers = map(np.array, zip(*requests, strict=True))
    setup = replace(Scenario(replicas=1, warm_up_s=0.0, costs=costs).setup(), **settings)
    made = Requests(times_s, np.full(len(times_s), -1), prompts, answers)
    fleet = SimulatedFleet(setup, made)
    fleet.run()
    return fleet.ttft_s


def test_prompts_that_wait_for_the_same_step_share_it():
    found = first_tokens_s((0.0, 100, 1), (0.001, 300, 1), (0.002, 500, 1))
    end_s = FIRST_S + STEPS.step_s(800, 0, 0, seen=seen_tokens(300) + seen_tokens(500))
    assert found == pytest.approx([FIRST_S, end_s - 0.001, end_s - 0.002])


def test_prompt_tokens_beyond_a_steps_limit_continue_in_the_next():
    room = STEPS.step_tokens
    found = first_tokens_s((0.0, 100, 1), (0.001, room + 50, 1), (0.002, 60, 1))
    rest = seen_tokens(50, room) + seen_tokens(60)
    end_s = FIRST_S + STEPS.prefill_s(room, 0) + STEPS.step_s(110, 0, 0, seen=rest)
    assert found == pytest.approx([FIRST_S, end_s - 0.001, end_s - 0.002])


@pytest.mark.parametrize("phase", [0.1, 0.5, 0.9])
def test_a_prompt_starts_only_after_the_decode_step_under_way(phase):
    step_s = STEPS.step_s(1, 0, 101)
    at_s = FIRST_S + (3 + phase) * step_s
    found = first_tokens_s((0.0, 100, 50), (at_s, 200, 1))
    beside_s = STEPS.prefill_s(200, 0, sequences=1, context=105)
    assert found[1] == pytest.approx((1 - phase) * step_s + beside_s, rel=1e-5)


@pytest.mark.parametrize("prompt", [100, 300])
def test_a_steps_time_counts_the_context_of_decodes_up_to_their_window(prompt):
    steps = replace(STEPS, window=200, windowed=0.75, seen_token_s=1e-5)
    costs = replace(H200_LLAMA_8B, steps=steps)
    begun_s = steps.prefill_s(prompt, 0)
    step_s = steps.step_s(1, 0, steps.decode_sees(prompt + 1))
    found = first_tokens_s((0.0, prompt, 50), (begun_s + 0.5 * step_s, 60, 1), costs=costs)
    context = round(steps.decode_sees(prompt + 2))
    beside_s = steps.prefill_s(60, 0, sequences=1, context=context)
    assert found[1] == pytest.approx(0.5 * step_s + beside_s, rel=1e-3)


def test_an_idle_replica_starts_a_prompt_at_once():
    found = first_tokens_s((0.0, 100, 5), (10.0, 200, 1))
    assert found[1] == pytest.approx(STEPS.prefill_s(200, 0))


@pytest.mark.parametrize("limit", ["KV cache", "max_running"])
def test_a_request_waits_until_another_leaves_its_place_in_the_kv_cache_or_in_steps(limit):
    asked = (0.0, 100, 50), (0.001, 100, 50), (0.002, 60, 40)
    if limit == "KV cache":  # of the third request, which needs 100 of 60
        found = first_tokens_s(*asked, kv_tokens=360)
    else:
        costs = replace(H200_LLAMA_8B, steps=replace(STEPS, max_running=2))
        found = first_tokens_s(*asked, costs=costs)
    assert found[:2] == pytest.approx(first_tokens_s(*asked[:2]))
    assert first_tokens_s(*asked)[2] < 3 * FIRST_S
    assert found[2] > 49 * STEPS.step_s(1, 0)
    assert found[2] == pytest.approx(first_tokens_s(*asked, kv_tokens=300)[2])


def test_requests_that_the_kv_cache_holds_together_wait_for_nothing():
    asked = (0.0, 100, 50), (0.001, 100, 50), (0.002, 60, 40)
    assert (first_tokens_s(*asked, kv_tokens=400) == first_tokens_s(*asked)).all()


def system_prompt_s(*requests, **settings):
    """Simulate requests (time, adapter, own prompt tokens) with system prompts of 2,000 tokens;
    return first token times in s, and the fleet.
    """
    times_s, adapters, own = map(np.array, zip(*requests, strict=True))
    scenario = Scenario(adapters=3, replicas=1, warm_up_s=0.0, gpu_room=1.0, host_room=1.0)
    setup = replace(scenario.setup(), system_tokens=np.full(3, 2000), **settings)
    fleet = SimulatedFleet(setup, Requests(times_s, adapters, own + 2000, np.full(len(own), 5)))
    fleet.run()
    assert fleet.replicas[0]._kv_left == setup.kv_tokens, "no request holds KV pages any more"
    return fleet.ttft_s, fleet


def prefill_s(fleet, tokens, depth=0):
    return STEPS.prefill_s(tokens, fleet.ranks[0], depth)


def test_a_system_prompt_is_computed_once_for_all_requests_with_its_adapter():
    asked = (0.0, 0, 100), (5.0, 0, 100), (10.0, 0, 60), (10.0, 0, 60)
    found, fleet = system_prompt_s(*asked)
    assert found[0] > prefill_s(fleet, 2100)
    assert found[1] == pytest.approx(prefill_s(fleet, 100, 2000), rel=0.02)
    assert found[3] < 2 * prefill_s(fleet, 100, 2000)


@pytest.mark.parametrize(("host_tokens", "comes_back"), [(0, False), (2000, False), (4000, True)])
def test_a_system_prompt_that_leaves_the_kv_cache_comes_back_from_the_host(host_tokens, comes_back):
    asked = [(5.0 * turn, turn % 3, 100) for turn in range(6)]
    found, fleet = system_prompt_s(*asked, kv_tokens=2200, kv_host_tokens=host_tokens)
    fetch_s = fleet.setup.costs.loads.load_s(Residency.HOST, 2000 * 131_072)
    again_s = prefill_s(fleet, 2100)
    if comes_back:
        again_s = fetch_s + prefill_s(fleet, 100, 2000)
    assert found[3:] == pytest.approx([again_s] * 3, rel=0.02)


def test_a_system_prompt_that_is_computed_faster_is_not_fetched():
    asked = [(5.0 * turn, turn % 3, 100) for turn in range(6)]
    slow = replace(H200_LLAMA_8B.loads, host_bytes_per_s=1e9)
    settings = {"kv_tokens": 2200, "kv_host_tokens": 9000}
    costs = replace(H200_LLAMA_8B, loads=slow)
    found, fleet = system_prompt_s(*asked, costs=costs, **settings)
    assert found[3:] == pytest.approx([prefill_s(fleet, 2100)] * 3, rel=0.02)


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.9])
def test_drafts_shorten_decodes_that_nobody_waits_for(acceptance):
    drafting = Drafting("mtp", acceptance)
    setup = replace(Scenario(replicas=1, warm_up_s=0.0).setup(), drafting=drafting)
    times_s, prompts, answers = np.array([0.0]), np.array([100]), np.array([200])
    fleet = SimulatedFleet(setup, Requests(times_s, np.array([-1]), prompts, answers))
    fleet.run()
    tokens = sum(fleet.gaps.values())
    gap_s = sum((at + 0.5) * 1e-4 * count for at, count in fleet.gaps.items()) / tokens
    assert gap_s == pytest.approx(1 / drafting.per_s(STEPS, 1, 0, 200), abs=1e-4)
    assert (gap_s < STEPS.step_s(1, 0, 200) / 1.4) == (acceptance == 0.9)
