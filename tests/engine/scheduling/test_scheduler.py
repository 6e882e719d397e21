"""Who computes what in each step: order, bounds, preemption, and that nobody waits forever."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet_engine.scheduling.admission import MAX_OVERTAKES
from tests.engine.world import PAGE, World


def test_decodes_come_first_then_the_running_prefill_then_newcomers():
    world = World(tokens=8)
    decoding = world.add(3)
    assert world.step() == [(decoding, 3)]
    prefilling, newcomer = world.add(10), world.add(5)
    assert world.step() == [(decoding, 1), (prefilling, 7)]
    assert world.step() == [(decoding, 1), (prefilling, 3), (newcomer, 4)]
    assert world.step() == [(decoding, 1), (prefilling, 1), (newcomer, 1)]


def test_no_more_sequences_run_than_the_bound():
    world = World(sequences=2)
    first, second, third = world.add(3, max_tokens=2), world.add(3), world.add(3)
    assert world.step() == [(first, 3), (second, 3)]
    world.step()
    assert first in world.finished
    assert world.step() == [(second, 1), (third, 3)]


def test_a_sequence_without_its_adapter_takes_no_place_and_blocks_no_one():
    world = World(sequences=2)
    world.shelf.remote = {"slow"}
    slow = world.add(3, "slow")
    others = [world.add(3), world.add(3, "fast")]
    assert [s for s, _ in world.step()] == others
    world.shelf.remote = set()
    world.run()
    assert slow in world.finished


def test_a_failed_adapter_fails_those_that_wait_for_it_and_no_others():
    world = World()
    world.shelf.broken = {"bad"}
    doomed = [world.add(3, "bad"), world.add(3, "bad")]
    fine = [world.add(3, "good"), world.add(3)]
    world.run()
    assert [s for s, _ in world.failed] == doomed
    assert set(world.finished) == set(fine)


def test_the_distinct_adapters_of_a_step_stay_within_the_bound():
    world = World(adapters=2)
    for adapter in "abcabcabc":
        world.add(3, adapter)
    started = [s.adapter.digest for s, _ in world.step()]
    assert started == ["a", "b", "a", "b", "a", "b"]
    world.run()
    assert len(world.finished) == 9


def test_the_ranks_of_a_steps_adapters_stay_within_the_bound():
    world = World(ranks=48)
    world.shelf.ranks.update(a=8, b=32, c=64, d=8)
    for adapter in "abcdabcd":
        world.add(3, adapter)
    assert "".join(s.adapter.digest for s, _ in world.step()) == "abdabd"
    assert world.shelf.leases["c"] == 0, "who waits for others holds no memory"
    world.run()
    assert len(world.finished) == 8


def test_one_adapter_always_runs_and_the_base_model_knows_no_rank():
    world = World(ranks=-100)
    for adapter in ("a", "a", "b", None, "c", None):
        world.add(3, adapter)
    assert [s.adapter and s.adapter.digest for s, _ in world.step()] == ["a", "a", None, None]
    world.run()
    assert len(world.finished) == 6


def test_a_bound_that_falls_throws_nobody_out():
    world = World(ranks=16)
    running = [world.add(3, "a"), world.add(3, "b")]
    world.step()
    world.ranks = 8
    later = world.add(3, "c"), world.add(3, "b")
    assert [s for s, _ in world.step()] == [*running, later[1]]


@pytest.mark.parametrize(("ranks", "returns"), [(64, True), (48, False)])
def test_a_preempted_sequence_returns_under_the_bound(ranks, returns):
    world = World(pages=10, ranks=64)
    world.shelf.ranks.update(a=32, b=32)
    hog, old = world.add(11, max_tokens=25), world.add(7, "a", max_tokens=25)
    young = world.add(11, "b", max_tokens=25)
    world.step()
    while young in world.scheduler.running:
        world.step()
    world.scheduler.drop(lambda s: s is hog)
    world.ranks = ranks
    assert (young in [s for s, _ in world.step()]) is returns
    world.run()
    assert set(world.finished) == {old, young}


@pytest.mark.parametrize("where", ["bound", "ranks", "gpu"])
def test_adapters_in_use_cannot_starve_one_that_waits(where):
    """Requests for a and b never stop coming; c gets in all the same, after a bounded wait."""
    world = World(**{"bound": {"adapters": 2}, "ranks": {"ranks": 16}, "gpu": {"places": 2}}[where])
    world.add(3, "a"), world.add(3, "b")
    world.step()
    starved = world.add(3, "c")
    ahead = 0
    while starved not in world.finished:
        ahead += 1
        world.add(3, "ab"[ahead % 2], max_tokens=3)
        world.step()
        assert ahead < 3 * MAX_OVERTAKES
    assert ahead > MAX_OVERTAKES // 2, "and until then others passed it"
    world.run()


def test_many_small_adapters_cannot_starve_a_large_one():
    world = World(ranks=64)
    world.shelf.ranks["large"] = 64
    for small in "abcdefgh":
        world.add(3, small, max_tokens=6)
    world.step()
    starved = world.add(3, "large")
    ahead = 0
    while starved not in world.finished:
        ahead += 1
        world.add(3, "abcdefgh"[ahead % 8], max_tokens=6)
        world.step()
        assert ahead < 3 * MAX_OVERTAKES
    assert ahead > MAX_OVERTAKES // 2, "and until then others passed it"


def test_over_thousands_of_steps_nobody_waits_long_for_ranks():
    dice = random.Random(3)
    world, waits = World(adapters=6, pages=400, overlap=True), []
    for i, name in enumerate(names := [f"a{i}" for i in range(16)]):
        world.shelf.ranks[name] = (8, 16, 32, 64)[i // 4]  # the less it is used, the larger
    since = {}
    for step in range(5000):
        while len(since) < 24:
            popular = min(15, int(dice.expovariate(0.4)))
            since[world.add(3, dice.choice([names[popular], None]), dice.randint(1, 12))] = step
        if step % 50 == 0:
            world.ranks = dice.uniform(-20, 80)
        world.step()
        for sequence in [s for s in since if s.ended]:
            waits.append(step - since.pop(sequence))
    assert len(waits) > 4000
    assert max(waits) < 5 * MAX_OVERTAKES


def test_a_reservation_does_not_stop_requests_without_an_adapter():
    world = World(adapters=1)
    world.add(3, "a", max_tokens=30)
    world.step()
    world.add(3, "c").overtakes.count = MAX_OVERTAKES
    held_back, base = world.add(3, "a"), world.add(3)
    started = [s for s, _ in world.step()]
    assert base in started
    assert held_back not in started


def test_pins_that_leave_no_room_do_not_turn_a_reservation_into_a_deadlock():
    world = World(places=1)
    world.add(3, "pinned")
    world.step()
    world.shelf.leases["pinned"] += 1  # never released
    world.add(3, "c").overtakes.count = MAX_OVERTAKES
    later = world.add(3, "pinned")
    for _ in range(20):
        world.step()
    assert later in world.finished


def test_who_waits_for_kv_pages_is_not_overtaken():
    world = World(pages=10)
    running = world.add(20, max_tokens=8)
    world.step()
    big, small = world.add(24), world.add(4)
    while running not in world.finished:
        assert [s for s, _ in world.step()] == [running]
    assert [s for s, _ in world.step()] == [big, small]


def test_the_youngest_is_preempted_keeps_its_tokens_and_comes_back_first():
    world = World(pages=6)
    old, young = world.add(7, max_tokens=12), world.add(7, max_tokens=12)
    while young in world.scheduler.running or not world.steps:
        world.step()
    assert old in world.scheduler.running
    assert young.output_length > 0
    kept = list(young.tokens)
    later = world.add(4)
    assert next(iter(world.scheduler.waiting)) is young
    while young in world.scheduler.waiting:
        assert later in world.scheduler.waiting
        world.step()
    world.run()
    assert young.tokens[: len(kept)] == kept
    assert set(world.finished) == {old, young, later}


@pytest.mark.parametrize("overlap", [False, True])
def test_preemption_changes_no_token(overlap):
    roomy, tight = World(pages=100), World(pages=7, overlap=overlap)
    for world in (roomy, tight):
        for _ in range(5):
            world.add(9, max_tokens=16)
        world.run()
    assert tight.computed_tokens > roomy.computed_tokens
    assert sorted(tight.finished.values()) == sorted(roomy.finished.values())


def test_choices_of_one_prompt_compute_its_full_pages_once():
    world = World()
    choices = world.add(4 * PAGE + 2, n=4, max_tokens=1)
    assert [s for s, _ in world.step()] == choices[:1], "the others wait for its pages"
    assert world.step() == [(choice, 2) for choice in choices[1:]]
    assert world.computed_tokens == 4 * PAGE + 2 + 3 * 2


def test_a_prompt_of_full_pages_recomputes_its_last_page_for_the_logits():
    world = World()
    prompt = list(range(3 * PAGE))
    world.add(prompt)
    world.run()
    again = world.add(prompt)
    assert world.step() == [(again, PAGE)]


def test_generated_tokens_are_found_by_the_next_turn():
    world = World()
    first = world.add(6, max_tokens=7)
    world.run()
    turn = world.add([*first.tokens, 1, 2, 3])
    assert world.step() == [(turn, 16 - 12)]


def test_who_waits_for_a_prefix_computes_it_when_the_other_is_aborted():
    world = World(tokens=8)
    prompt = list(range(16))
    leader, follower = world.add(prompt), world.add(prompt)
    assert world.step() == [(leader, 8)]
    world.scheduler.drop(lambda s: s is leader)
    assert world.step() == [(follower, 8)]


def test_with_a_step_in_flight_a_sequence_decodes_on_from_a_token_it_does_not_know():
    world = World(overlap=True)
    sequence = world.add(3, max_tokens=3)
    assert world.step() == [(sequence, 3)]
    assert sequence.pending_rows == [0]
    assert world.step() == [(sequence, 1)]
    assert (len(sequence.tokens), sequence.length) == (4, 5)
    assert world.step() == [(sequence, 1)]
    assert world.step() == [], "all its tokens are drawn"
    assert sequence in world.finished
    assert world.cache.used == 0


def test_a_stop_token_ends_a_sequence_that_runs_on_in_the_step_in_flight():
    world = World(overlap=True)
    sequence = world.add(3, max_tokens=50, stop=range(256))
    world.step()
    assert world.step() == [(sequence, 1)], "nobody knows yet"
    assert world.finished == {sequence: tuple(sequence.tokens)}
    assert sequence.output_length == 0
    assert world.step() == []
    assert world.cache.used == 0


def test_a_prefix_in_flight_is_waited_for_not_computed_twice():
    world = World(overlap=True)
    prompt = list(range(4 * PAGE + 1))
    first = world.add(prompt, max_tokens=1)
    assert world.step() == [(first, 4 * PAGE + 1)]
    again = world.add(prompt, max_tokens=1)
    assert world.step() == []
    assert world.step() == [(again, 1)]


@pytest.mark.parametrize("different", [{"salt": "globex"}, {"adapter": "a"}])
def test_another_tenant_or_adapter_shares_nothing(different):
    world = World()
    prompt = list(range(20))
    world.add(prompt)
    world.run()
    world.add(prompt, **different)
    assert [length for _, length in world.step()] == [20]


def test_dropping_frees_at_every_stage():
    world = World(tokens=8, sequences=2)
    decoding = world.add(3, "a", max_tokens=50)
    world.step()
    prefilling, waiting = world.add(20, "b"), world.add(3, "c")
    world.step()
    assert decoding.remaining == 1
    assert 1 < prefilling.remaining < 20
    assert waiting in world.scheduler.waiting
    assert set(world.scheduler.drop(lambda s: True)) == {decoding, prefilling, waiting}
    world.run(1)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_comes_everyone_ends_and_nothing_is_lost(data):
    integers = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    sequences = integers(1, 4)
    world = World(
        tokens=sequences + integers(0, 8),
        sequences=sequences,
        adapters=integers(1, 3),
        ranks=8 * integers(0, 4),
        pages=10,
        places=integers(1, 3),
        overlap=data.draw(st.booleans()),
    )
    world.shelf.ranks.update(c=16, d=32)
    added, dropped = [], set()
    for _ in range(integers(1, 25)):
        match integers(0, 3):
            case 0 | 1:
                prompt = [7] * integers(1, 20)  # prefixes are shared all the time
                adapter = data.draw(st.sampled_from([None, "a", "b", "c", "d"]))
                stop = range(64) if data.draw(st.booleans()) else ()  # a quarter of all tokens
                added.append(world.add(prompt, adapter, integers(1, 20), stop=stop))
            case 2:
                world.step()
            case 3 if added:
                victim = data.draw(st.sampled_from(added))
                dropped.update(world.scheduler.drop(lambda s, victim=victim: s is victim))
    world.run()
    assert set(world.finished) == set(added) - dropped
    alone = World()
    for sequence, tokens in world.finished.items():
        prompt, most = tokens[: sequence.prompt_length], sequence.max_tokens
        twin = alone.add(prompt, None, most, stop=sequence.stop_ids)
        alone.run()
        assert alone.finished[twin] == tokens
