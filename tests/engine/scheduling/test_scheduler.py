"""Plans of steps: order, limits, preemption, and no starvation."""

import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet_engine.request import SchedulingParams
from lorikeet_engine.scheduling import scheduler, step_budget
from lorikeet_engine.scheduling.admission import MAX_OVERTAKES
from lorikeet_engine.scheduling.fairness import OUTPUT_TOKEN
from lorikeet_engine.scheduling.kv_cache import PageKeys
from lorikeet_engine.scheduling.sequence import SequenceStatus
from tests.engine.scheduler_harness import PAGE, SchedulerHarness


def test_a_step_takes_decodes_first_then_running_prefills_then_new_requests():
    harness = SchedulerHarness(tokens=8)
    decoding = harness.add(3)
    assert harness.step() == [(decoding, 3)]
    prefilling, newcomer = harness.add(10), harness.add(5)
    assert harness.step() == [(decoding, 1), (prefilling, 7)]
    assert harness.step() == [(decoding, 1), (prefilling, 3), (newcomer, 4)]
    assert harness.step() == [(decoding, 1), (prefilling, 1), (newcomer, 1)]


def test_a_saturated_engine_predicts_waits_by_the_tokens_that_it_decodes_per_second(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: now_s))
    harness = SchedulerHarness(sequences=5)
    for _ in range(6):
        harness.add(1, max_tokens=500)
    for _ in range(60):
        now_s += 100.0
        harness.step()
    ahead = harness.scheduler._tenants.cost_ahead_of("", 1.0)
    assert harness.scheduler.wait_s(SchedulingParams()) == pytest.approx(
        ahead * 100 / (5 * OUTPUT_TOKEN)
    )


def test_no_more_sequences_run_than_the_bound():
    harness = SchedulerHarness(sequences=2)
    first, second, third = harness.add(3, max_tokens=2), harness.add(3), harness.add(3)
    assert harness.step() == [(first, 3), (second, 3)]
    harness.step()
    assert first in harness.finished
    assert harness.step() == [(second, 1), (third, 3)]


def test_a_sequence_without_its_adapter_takes_no_slot_and_blocks_no_other():
    harness = SchedulerHarness(sequences=2)
    harness.tiers.remote = {"slow"}
    slow = harness.add(3, "slow")
    others = [harness.add(3), harness.add(3, "fast")]
    assert [s for s, _ in harness.step()] == others
    harness.tiers.remote = set()
    harness.run()
    assert slow in harness.finished


def test_a_failed_adapter_fails_only_the_sequences_that_wait_for_it():
    harness = SchedulerHarness()
    harness.tiers.broken = {"bad"}
    doomed = [harness.add(3, "bad"), harness.add(3, "bad")]
    fine = [harness.add(3, "good"), harness.add(3)]
    harness.run()
    assert [s for s, _ in harness.failed] == doomed
    assert set(harness.finished) == set(fine)


def test_the_distinct_adapters_of_a_step_stay_within_the_bound():
    harness = SchedulerHarness(adapters=2)
    for adapter in "abcabcabc":
        harness.add(3, adapter)
    started = [s.adapter.digest for s, _ in harness.step()]
    assert started == ["a", "b", "a", "b", "a", "b"]
    harness.run()
    assert len(harness.finished) == 9


def test_the_ranks_of_a_steps_adapters_stay_within_the_bound():
    harness = SchedulerHarness(ranks=48)
    harness.tiers.ranks.update(a=8, b=32, c=64, d=8)
    for adapter in "abcdabcd":
        harness.add(3, adapter)
    assert "".join(s.adapter.digest for s, _ in harness.step()) == "abdabd"
    assert harness.tiers.leases["c"] == 0, "who waits for others holds no memory"
    harness.run()
    assert len(harness.finished) == 8


def test_one_adapter_may_always_run_and_the_base_model_needs_no_rank():
    harness = SchedulerHarness(ranks=-100)
    for adapter in ("a", "a", "b", None, "c", None):
        harness.add(3, adapter)
    assert [s.adapter and s.adapter.digest for s, _ in harness.step()] == ["a", "a", None, None]
    harness.run()
    assert len(harness.finished) == 6


def test_a_falling_bound_of_ranks_stops_no_running_sequence():
    harness = SchedulerHarness(ranks=16)
    running = [harness.add(3, "a"), harness.add(3, "b")]
    harness.step()
    harness.ranks = 8
    later = harness.add(3, "c"), harness.add(3, "b")
    assert [s for s, _ in harness.step()] == [*running, later[1]]


@pytest.mark.parametrize(("ranks", "returns"), [(64, True), (48, False)])
def test_a_preempted_sequence_returns_under_the_bound(ranks, returns):
    harness = SchedulerHarness(pages=10, ranks=64)
    harness.tiers.ranks.update(a=32, b=32)
    hog, old = harness.add(11, max_tokens=25), harness.add(7, "a", max_tokens=25)
    young = harness.add(11, "b", max_tokens=25)
    harness.step()
    while young in harness.scheduler.running:
        harness.step()
    harness.scheduler.drop(lambda s: s is hog)
    harness.ranks = ranks
    assert (young in [s for s, _ in harness.step()]) is returns
    harness.run()
    assert set(harness.finished) == {old, young}


@pytest.mark.parametrize("where", ["bound", "ranks", "gpu"])
def test_adapters_in_use_cannot_starve_a_waiting_adapter(where):
    """Keep sending requests for a and b; c must run after a bounded wait."""
    limits = {"bound": {"adapters": 2}, "ranks": {"ranks": 16}, "gpu": {"places": 2}}
    harness = SchedulerHarness(**limits[where])
    harness.add(3, "a"), harness.add(3, "b")
    harness.step()
    starved = harness.add(3, "c")
    ahead = 0
    while starved not in harness.finished:
        ahead += 1
        harness.add(3, "ab"[ahead % 2], max_tokens=3)
        harness.step()
        assert ahead < 3 * MAX_OVERTAKES
    assert ahead > MAX_OVERTAKES // 2, "and until then others passed it"
    harness.run()


def test_many_small_adapters_cannot_starve_a_large_one():
    harness = SchedulerHarness(ranks=64)
    harness.tiers.ranks["large"] = 64
    for small in "abcdefgh":
        harness.add(3, small, max_tokens=6)
    harness.step()
    starved = harness.add(3, "large")
    ahead = 0
    while starved not in harness.finished:
        ahead += 1
        harness.add(3, "abcdefgh"[ahead % 8], max_tokens=6)
        harness.step()
        assert ahead < 3 * MAX_OVERTAKES
    assert ahead > MAX_OVERTAKES // 2, "and until then others passed it"


def test_no_sequence_waits_long_for_ranks_over_thousands_of_steps():
    dice = random.Random(3)
    harness, waits = SchedulerHarness(adapters=6, pages=400, overlap=True), []
    for i, name in enumerate(names := [f"a{i}" for i in range(16)]):
        harness.tiers.ranks[name] = (8, 16, 32, 64)[i // 4]  # rarely used ones are larger
    since = {}
    for step in range(5000):
        while len(since) < 24:
            popular = min(15, int(dice.expovariate(0.4)))
            since[harness.add(3, dice.choice([names[popular], None]), dice.randint(1, 12))] = step
        if step % 50 == 0:
            harness.ranks = dice.uniform(-20, 80)
        harness.step()
        for sequence in [s for s in since if s.status is SequenceStatus.FINISHED]:
            waits.append(step - since.pop(sequence))
    assert len(waits) > 4000
    assert max(waits) < 5 * MAX_OVERTAKES


def test_a_reservation_does_not_stop_requests_without_an_adapter():
    harness = SchedulerHarness(adapters=1)
    harness.add(3, "a", max_tokens=30)
    harness.step()
    harness.add(3, "c").overtakes.count = MAX_OVERTAKES
    held_back, base = harness.add(3, "a"), harness.add(3)
    started = [s for s, _ in harness.step()]
    assert base in started
    assert held_back not in started


def test_pins_that_fill_the_gpu_do_not_turn_a_reservation_into_a_deadlock():
    harness = SchedulerHarness(places=1)
    harness.add(3, "pinned")
    harness.step()
    harness.tiers.leases["pinned"] += 1  # never released
    harness.add(3, "c").overtakes.count = MAX_OVERTAKES
    later = harness.add(3, "pinned")
    for _ in range(20):
        harness.step()
    assert later in harness.finished


def test_short_prompts_overtake_a_prompt_that_waits_for_kv_pages_a_bounded_number_of_times():
    harness = SchedulerHarness(pages=10)
    running = harness.add(20, max_tokens=8)
    harness.step()
    big, short = harness.add(24), []
    while big not in harness.scheduler.running:
        short.append(harness.add(4))
        harness.step()
        assert harness.steps < 40, "it never begins"
    assert running in harness.finished
    before = [s for s in short if s.timings.begun_s and s.timings.begun_s < big.timings.begun_s]
    assert len(before) == 20 // 4, "as much work as the prompt before it took"
    harness.run()


def test_the_youngest_sequence_is_preempted_keeps_its_tokens_and_resumes_first():
    harness = SchedulerHarness(pages=6)
    old, young = harness.add(7, max_tokens=12), harness.add(7, max_tokens=12)
    while young in harness.scheduler.running or not harness.steps:
        harness.step()
    assert old in harness.scheduler.running
    assert young.output_length > 0
    kept = list(young.tokens)
    later = harness.add(4)
    assert next(iter(harness.scheduler.waiting)) is young
    while young in harness.scheduler.waiting:
        assert later in harness.scheduler.waiting
        harness.step()
    harness.run()
    assert young.tokens[: len(kept)] == kept
    assert set(harness.finished) == {old, young, later}


@pytest.mark.parametrize("overlap", [False, True])
def test_preemption_changes_no_token(overlap):
    roomy, tight = SchedulerHarness(pages=100), SchedulerHarness(pages=7, overlap=overlap)
    for harness in (roomy, tight):
        for _ in range(5):
            harness.add(9, max_tokens=16)
        harness.run()
    assert tight.computed_tokens > roomy.computed_tokens
    assert sorted(tight.finished.values()) == sorted(roomy.finished.values())


def test_choices_of_one_prompt_compute_its_full_pages_once():
    harness = SchedulerHarness()
    choices = harness.add(4 * PAGE + 2, n=4, max_tokens=1)
    assert [s for s, _ in harness.step()] == choices[:1], "the others wait for its pages"
    assert harness.step() == [(choice, 2) for choice in choices[1:]]
    assert harness.computed_tokens == 4 * PAGE + 2 + 3 * 2


def test_a_prompt_of_full_pages_recomputes_its_last_page_for_the_logits():
    harness = SchedulerHarness()
    prompt = list(range(3 * PAGE))
    harness.add(prompt)
    harness.run()
    again = harness.add(prompt)
    assert harness.step() == [(again, PAGE)]


def test_generated_tokens_are_cached_for_the_next_turn_of_a_chat():
    harness = SchedulerHarness()
    first = harness.add(6, max_tokens=7)
    harness.run()
    turn = harness.add([*first.tokens, 1, 2, 3])
    assert harness.step() == [(turn, 16 - 12)]


def test_a_sequence_that_awaits_a_prefix_computes_it_if_the_writer_is_aborted():
    harness = SchedulerHarness(tokens=8)
    prompt = list(range(16))
    leader, follower = harness.add(prompt), harness.add(prompt)
    assert harness.step() == [(leader, 8)]
    harness.scheduler.drop(lambda s: s is leader)
    assert harness.step() == [(follower, 8)]


def test_a_sequence_decodes_on_from_a_token_that_is_still_in_flight():
    harness = SchedulerHarness(overlap=True)
    sequence = harness.add(3, max_tokens=3)
    assert harness.step() == [(sequence, 3)]
    assert sequence.pending_rows == [0]
    assert harness.step() == [(sequence, 1)]
    assert (len(sequence.tokens), sequence.length) == (4, 5)
    assert harness.step() == [(sequence, 1)]
    assert harness.step() == [], "all its tokens are drawn"
    assert sequence in harness.finished
    assert harness.cache.used == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_forced_tokens_are_computed_as_a_decode_before_all_prompts(overlap):
    harness = SchedulerHarness(tokens=8, overlap=overlap)
    first = harness.add(3, max_tokens=9)
    prompt = harness.add(30)
    harness.forced[first] = (7, 8, 9)
    assert harness.step() == [(first, 3), (prompt, 5)]
    assert (first.output_length, first.decodes) == (4, True)
    assert harness.step() == [(first, 4), (prompt, 4)], "though it is the prompt's turn"
    assert harness.step() == [(first, 1), (prompt, 7)]
    assert first.tokens[4:7] == [7, 8, 9]
    harness.run()
    assert harness.finished[first][4:7] == (7, 8, 9)
    assert first.output_length == 9


def test_forced_tokens_cost_their_tenant_as_much_as_sampled_tokens():
    harness = SchedulerHarness()
    a, b = (harness.add(3, scheduling=SchedulingParams(tenant)) for tenant in "ab")
    harness.forced[a] = (7, 8)
    harness.step()
    assert a.cost.counter.value - b.cost.counter.value == 2 * OUTPUT_TOKEN


def test_a_sequence_short_of_pages_for_forced_tokens_is_preempted_before_tenants_behind():
    harness = SchedulerHarness(pages=5)
    ahead = harness.add(7, max_tokens=20, scheduling=SchedulingParams("a"))
    behind = harness.add(3, max_tokens=20, scheduling=SchedulingParams("b"))
    harness.forced[ahead] = tuple(range(12))
    harness.step()
    assert harness.step() == [(behind, 1)], "two pages are free, and three more are needed"
    assert ahead.timings.preemptions == 1


def test_a_preempted_sequence_computes_its_forced_tokens_again_as_a_prompt():
    harness = SchedulerHarness(pages=4, tokens=9, sequences=2, overlap=True)
    old, young = harness.add(6, max_tokens=4), harness.add(3, max_tokens=9)
    harness.forced[young] = (7, 8, 9, 10, 11, 12)
    assert harness.step() == [(old, 6), (young, 3)]
    assert harness.step() == [(old, 1)], "two pages are too many for the seven tokens"
    assert (young.timings.preemptions, young.decode_tokens) == (1, 1)
    harness.run()
    assert harness.finished[young][4:10] == (7, 8, 9, 10, 11, 12)
    assert len(harness.finished[young]) == 3 + 9


def test_a_stop_token_ends_a_sequence_that_runs_on_in_the_step_in_flight():
    harness = SchedulerHarness(overlap=True)
    sequence = harness.add(3, max_tokens=50, stop=range(256))
    harness.step()
    assert harness.step() == [(sequence, 1)], "nobody knows yet"
    assert harness.finished == {sequence: tuple(sequence.tokens)}
    assert sequence.output_length == 0
    assert harness.step() == []
    assert harness.cache.used == 0


def test_a_prefix_in_flight_is_awaited_not_computed_twice():
    harness = SchedulerHarness(overlap=True)
    prompt = list(range(4 * PAGE + 1))
    first = harness.add(prompt, max_tokens=1)
    assert harness.step() == [(first, 4 * PAGE + 1)]
    again = harness.add(prompt, max_tokens=1)
    assert harness.step() == []
    assert harness.step() == [(again, 1)]


@pytest.mark.parametrize("different", [{"salt": "globex"}, {"adapter": "a"}])
def test_another_tenant_or_adapter_shares_nothing(different):
    harness = SchedulerHarness()
    prompt = list(range(20))
    harness.add(prompt)
    harness.run()
    harness.add(prompt, **different)
    assert [length for _, length in harness.step()] == [20]


def test_dropping_frees_the_resources_of_every_status():
    harness = SchedulerHarness(tokens=8, sequences=2)
    decoding = harness.add(3, "a", max_tokens=50)
    harness.step()
    prefilling = harness.add(20, "b")
    harness.step()
    waiting = harness.add(3, "c")
    harness.step()
    assert decoding.remaining == 1
    assert 1 < prefilling.remaining < 20
    assert waiting in harness.scheduler.waiting
    assert set(harness.scheduler.drop(lambda s: True)) == {decoding, prefilling, waiting}
    harness.run(1)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_traffic_finishes_and_leaks_nothing(data):
    integers = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    sequences = integers(1, 4)
    harness = SchedulerHarness(
        tokens=sequences + integers(0, 8),
        sequences=sequences,
        adapters=integers(1, 3),
        ranks=8 * integers(0, 4),
        pages=10,
        places=integers(1, 3),
        overlap=data.draw(st.booleans()),
    )
    harness.tiers.ranks.update(c=16, d=32)
    added, dropped = [], set()
    for _ in range(integers(1, 25)):
        match integers(0, 3):
            case 0 | 1:
                prompt = [7] * integers(1, 20)  # all prompts share prefixes
                adapter = data.draw(st.sampled_from([None, "a", "b", "c", "d"]))
                stop = range(64) if data.draw(st.booleans()) else ()  # a quarter of all tokens
                added.append(harness.add(prompt, adapter, integers(1, 20), stop=stop))
            case 2:
                harness.step()
            case 3 if added:
                victim = data.draw(st.sampled_from(added))
                dropped.update(harness.scheduler.drop(lambda s, victim=victim: s is victim))
    harness.run()
    assert set(harness.finished) == set(added) - dropped
    alone = SchedulerHarness()
    for sequence, tokens in harness.finished.items():
        prompt, most = tokens[: sequence.prompt_length], sequence.max_tokens
        twin = alone.add(prompt, None, most, stop=sequence.stop_ids)
        alone.run()
        assert alone.finished[twin] == tokens


def test_a_plan_begins_only_a_few_long_cached_prompts():
    harness = SchedulerHarness(tokens=4096, pages=30_000)
    document = [7] * 12_000
    harness.add(document, max_tokens=1)
    harness.run()
    for choice in range(8):
        harness.add([*document, choice], max_tokens=1)
    begun = [len(harness.step()) for _ in range(4)]
    assert begun == [3, 3, 2, 0]
    harness.run()


def test_a_plan_hashes_no_prompt_tokens(monkeypatch):
    harness = SchedulerHarness()
    harness.add(40, n=3)
    monkeypatch.setattr(PageKeys, "extend", lambda *_: pytest.fail("hashed in a plan"))
    harness.step()


@pytest.mark.parametrize("kept", [True, False], ids=["pages_kept", "pages_lost"])
def test_each_token_of_a_preempted_prompt_is_scored_once(kept):
    harness, scored = SchedulerHarness(tokens=6), []
    plan = harness.scheduler.plan

    def noting(budget):
        planned = plan(budget)
        scored.extend((rows.start, rows.end) for rows in planned.scored)
        return planned

    harness.scheduler.plan = noting
    harness.add(list(range(15)))
    harness.run()
    assert scored == [], "nobody asked for it"
    sequence = harness.add(list(range(15)))
    sequence.kv.score_from = 0
    assert harness.step() == [(sequence, 6)], "it took cached pages, which say nothing of it"
    harness.step()
    harness.scheduler._preempt(sequence)
    if not kept:
        harness.cache.release(harness.cache.take(100))
    assert harness.step() == [(sequence, 3 if kept else 6)]
    harness.run()
    assert scored == [(0, 6), (6, 12), (12, 14)]


def test_scored_prompts_share_a_step_only_if_each_is_scored_whole(monkeypatch):
    monkeypatch.setattr(step_budget, "_SCORES", 12)
    harness = SchedulerHarness()
    long, third, second, short = (harness.add(n, max_tokens=1) for n in (31, 12, 10, 4))
    plain = harness.add(20, max_tokens=1)
    for sequence in (long, third, second, short):
        sequence.kv.score_from = 0
    assert harness.step() == [(long, 12), (plain, 20)]
    assert harness.step() == [(short, 4), (second, 10)], "eleven tokens more would not fit"
    assert harness.step() == [(long, 12)]
    assert harness.step() == [(long, 7)], "eleven tokens more would not fit"
    assert harness.step() == [(third, 12)]


@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_that_all_lack_pages_continue_one_by_one(overlap):
    """Two prompts share the pages of a window; to continue each needs its own, and one fits."""
    harness = SchedulerHarness(tokens=4, pages=16, window=40, overlap=overlap)
    harness.add(range(41), max_tokens=1)
    harness.run()
    both = [
        harness.add([*range(40), *range(begin, begin + 60)], scheduling=SchedulingParams(tenant))
        for tenant, begin in (("acme", 100), ("globex", 200))
    ]
    harness.step()
    harness.step()
    assert harness.scheduler.running == both
    assert all(sequence.timings.cached_tokens == 40 for sequence in both)
    harness.run()
    assert sum(sequence.timings.preemptions > 0 for sequence in both) == 1
    assert all(len(harness.finished[sequence]) == 104 for sequence in both)
