"""Models with windows equal transformers and PEFT, with only the pages that their windows need."""

from typing import Any

import pytest

from lorikeet_engine.scheduling.page_needs import PageNeeds
from tests.engine.engine_driver import PAGE, Answers, RecordingRunner, build, greedy, load_adapters
from tests.engine.peft_world import PeftWorld, ask, check_prefix_hits

WINDOW = 24
WORLDS = (
    "mistral",  # in all layers; in the others only in some
    "ministral",
    "qwen2_window",
    "smollm3_window",
    "olmo3",
    "exaone4",
    "gemma2",
    "gemma3_text",
    "gemma3_deep",
    "gemma4_deep",
    "gemma4_e_deep",
)
OFTEN = ("mistral", "olmo3", "gemma3_deep", "gemma4_deep", "gemma4_e_deep")
ON_RANKS = ("mistral", "gemma4_e_deep")
ADAPTERS: dict[str, dict[str, Any]] = {
    "first": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "second": {"r": 12, "lora_alpha": 12, "target_modules": ["k_proj", "o_proj", "up_proj"]},
}
TOKENS, SHORTEST, CHUNK = 50, 70, 21  # and WINDOW + 2 pages + CHUNK < SHORTEST
MODES: dict[str, dict[str, Any]] = {
    "at_ease": {},
    "in_chunks": {"max_batch_tokens": CHUNK, "max_running": CHUNK},
    "apart": {"max_batch_tokens": CHUNK, "max_running": CHUNK, "overlap": False},
    "preempted": {"kv_pages": 11, "max_context": 140, "max_batch_tokens": 40, "max_running": 4},
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(w, marks=[] if w in OFTEN else pytest.mark.soak) for w in WORLDS],
)
def world(request, tiny_checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return PeftWorld(tiny_checkpoints[request.param], folder, ADAPTERS, TOKENS, SHORTEST)


@pytest.fixture
def make(world, tmp_path, close_later):
    def make(**settings):
        return close_later(build(world.checkpoint, world.shelf, tmp_path / "cache", **settings))

    return make


def needs(engine):
    windows = engine._runner.kv_windows
    return PageNeeds(PAGE, windows, engine._settings.max_batch_tokens)


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(m, marks=[] if m in ("in_chunks", "preempted") else pytest.mark.soak)
        for m in MODES
    ],
)
def test_adapters_in_one_batch_give_pefts_answers(make, world, mode):
    engine = make(**MODES[mode])
    witness, answers = RecordingRunner(engine), Answers(engine)
    load_adapters(answers, world.refs.values())
    assert ask(world, answers) == world.expected
    if mode == "preempted" and len(engine._runner.kv_windows) == 2:  # windows alone stop growing
        assert engine.status().preemptions > 0
    for batch in witness.batches:
        for table, window in zip(batch.page_tables, engine._runner.kv_windows, strict=True):
            seen = (batch.query_starts[1:] - batch.query_starts[:-1]) - 1 + (window or 1000)
            assert (table.kv_lengths < seen + PAGE).all(), "it has pages that nobody sees"
    assert engine.status().live.kv_pages_used == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_a_sequence_holds_no_more_pages_than_it_needs(make, world, overlap):
    engine = make(max_batch_tokens=CHUNK, max_running=CHUNK, overlap=overlap)
    answers, used = Answers(engine), []
    answers.submit(greedy("long", world.prompts[None], max_tokens=TOKENS))
    while answers.pending:
        answers.step()
        used.append(engine.status().live.kv_pages_used)
    of = needs(engine)
    in_flight = of.windowed * of.pages_for(CHUNK) * overlap
    assert max(used) <= of.in_steps(SHORTEST + TOKENS) + in_flight
    assert max(used[-TOKENS // 2 :]) <= of.between_steps(SHORTEST + TOKENS)
    assert of.between_steps(SHORTEST + TOKENS) < len(of.windows) * of.pages_for(SHORTEST + TOKENS)


def test_prefix_hits_give_pefts_answers(make, world):
    check_prefix_hits(world, make())


def test_a_prefix_is_found_up_to_the_cached_pages_of_its_windows(make, world):
    """Drop one page of a window, as long answers in few pages would."""
    engine = make()
    witness, answers = RecordingRunner(engine), Answers(engine)
    ask(world, answers)
    cache, groups = engine._cache, len(engine._runner.kv_windows)
    keys = engine._input_processor.process(greedy("x", world.prompts[None]))[0].kv.full_keys()
    gone = 3  # page; a hit ends before this page, or after all pages that see it
    cache.forget([cache._pages_of[groups - 1][keys[gone]]])
    before = witness.tokens
    short, long = world.prompts[None][: 5 * PAGE - 2], world.prompts[None]
    answers.submit(greedy("short", short, max_tokens=1))
    answers.all()
    assert witness.tokens - before == len(short) - gone * PAGE
    answers.submit(greedy("long", long, max_tokens=TOKENS))
    answers.all()
    assert answers.of("long") == world.expected[None]


@pytest.mark.parametrize(
    "world",
    [pytest.param(w, marks=[] if w in ON_RANKS else [pytest.mark.soak]) for w in WORLDS],
    indirect=True,
    scope="module",
)
@pytest.mark.usefixtures("one_thread", "forked_followers")
def test_two_ranks_give_pefts_answers(make, world):
    engine = make(tensor_parallel=2, max_batch_tokens=CHUNK, max_running=CHUNK)
    assert ask(world, Answers(engine)) == world.expected
