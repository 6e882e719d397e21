"""Whole engine over a hybrid of delta nets and attention: states change no token."""

import pytest

from lorikeet_engine.scheduling.kv_cache import KVCache
from tests.engine.engine_driver import (
    PAGE,
    Answers,
    RecordingRunner,
    build,
    greedy,
    nothing_is_held,
    prompt,
)

HYBRID = "qwen3_5_text"


@pytest.fixture
def make(tiny_checkpoints, shelf, tmp_path, close_later):
    """Engines over the hybrid's tiny checkpoint, closed at the end."""

    def make(**settings):
        folder = tiny_checkpoints[HYBRID]
        return close_later(build(folder, shelf, tmp_path / "cache", **settings))

    return make


def tokens_of(engine, prompts, **options):
    answers = Answers(engine)
    for i, ids in enumerate(prompts):
        answers.submit(greedy(f"{i}", ids, **options))
    answers.all()
    return answers.tokens


@pytest.mark.parametrize("tokens", [1, 3, 64, 70])
def test_chunks_change_no_token(make, tokens):
    prompts = [prompt(length, length) for length in (200, 1, 63, 64, 65)]
    cut = make(max_batch_tokens=max(8, tokens), max_running=min(5, max(8, tokens)))
    assert tokens_of(cut, prompts) == tokens_of(make(), prompts)


def test_preemption_changes_no_token(make):
    prompts = [prompt(70, seed) for seed in range(5)]
    tight = make(kv_pages=16, max_context=200)
    witness = RecordingRunner(tight)
    roomy = make()
    assert tokens_of(tight, prompts, max_tokens=60) == tokens_of(roomy, prompts, max_tokens=60)
    assert witness.tokens > 5 * 130, "somebody was computed twice"
    assert nothing_is_held(tight)


def test_choices_of_one_prompt_compute_it_once(make):
    engine = make()
    witness, ids = RecordingRunner(engine), prompt(200)
    answers = Answers(engine)
    answers.submit(greedy("many", ids, n=4, max_tokens=5))
    answers.all()
    (alone,) = tokens_of(make(), [ids], max_tokens=5).values()
    assert [answers.of("many", choice) for choice in range(4)] == [alone] * 4
    again = 200 - 192  # tokens behind the last state that is saved in the prompt
    assert witness.tokens == 200 + 3 * again + 4 * 4


def test_a_prompt_begins_behind_the_last_state_that_is_saved_in_its_prefix(make):
    engine = make()
    witness, system = RecordingRunner(engine), prompt(10 * PAGE)
    asked = [system + prompt(100, seed) for seed in (1, 2, 3)]
    computed = []
    for i, ids in enumerate(asked):
        before = witness.tokens
        answers = Answers(engine)
        answers.submit(greedy(f"{i}", ids, max_tokens=1))
        answers.all()
        computed.append(witness.tokens - before)
        assert answers.tokens == {(f"{i}", 0): tokens_of(make(), [ids], max_tokens=1)["0", 0]}
    # the second finds the pages alone, and saves a state where it parts from the first
    assert computed == [260, 260, 260 - 128]


def test_a_failed_step_spoils_no_state(make):
    engine = make()
    witness, ids = RecordingRunner(engine), prompt(150)
    first = tokens_of(engine, [ids])
    witness.error = RuntimeError("out of luck")
    answers = Answers(engine)
    answers.submit(greedy("failed", ids))
    answers.all()
    assert "failed" in answers.errors
    assert tokens_of(engine, [ids]) == first
    assert nothing_is_held(engine)


def test_states_are_found_under_the_same_salt_only(make):
    engine = make()
    witness, ids = RecordingRunner(engine), prompt(150)
    for salt, want in (("acme", 150), ("acme", 150 - 128), ("globex", 150)):
        before = witness.tokens
        answers = Answers(engine)
        answers.submit(greedy(salt, ids, max_tokens=1, salt=salt))
        answers.all()
        assert witness.tokens - before == want


def test_more_prompts_than_slots_evict_the_oldest_state(make):
    engine = make(max_running=1)  # three slots: two states are cached beside the running one
    witness = RecordingRunner(engine)

    def computed(seed):
        before = witness.tokens
        tokens_of(engine, [prompt(100, seed)], max_tokens=1)
        return witness.tokens - before

    assert [computed(seed) for seed in (1, 1, 2, 1, 3, 1, 2)] == [100, 36, 100, 36, 100, 36, 100]
    assert KVCache.state_piece == 64
