"""Drafts of the model's head for multi-token prediction (MTP) change no answer."""

import pytest

from lorikeet_engine.request import DraftSource, Request, SamplingParams
from lorikeet_engine.scheduling import draft_budget
from lorikeet_engine.scheduling.prompt_lookup import PromptLookup
from tests.engine.descending_grammar import DescendingGrammars
from tests.engine.engine_driver import (
    Answers,
    build,
    greedy,
    load_adapters,
    nothing_is_held,
    prompt,
)
from tests.engine.mtp_heads import with_head
from tests.engine.peft_adapters import save_adapter
from tests.engine.sampling.draws import assert_drawn_alike
from tests.engine.test_speculation import WAYS, sampling

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS = 40


@pytest.fixture(scope="module")
def folders(tiny_checkpoints, tmp_path_factory):
    """Folder of each family's checkpoint with a head that is mostly right."""
    families, made = (
        ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
        tmp_path_factory.mktemp("h"),
    )
    return {f: with_head(tiny_checkpoints[f], made / f, right=True) for f in families}


@pytest.fixture
def make(folders, shelf, tmp_path, close_later):
    """Engines over checkpoints with a head, which draft whatever it costs and find no texts."""

    def make(family="qwen3_5_text", **settings):
        settings = {"speculation": "mtp", "max_batch_tokens": 256, "max_running": 64, **settings}
        return close_later(build(folders[family], shelf, tmp_path / "cache", **settings))

    return make


@pytest.fixture
def eager(monkeypatch):
    """Let all sequences draft that can, at any cost."""
    monkeypatch.setattr(draft_budget, "_LEAST_GAIN", 0.0)
    monkeypatch.setattr(draft_budget, "_LEAST_ACCEPTANCE", 0.0)


@pytest.fixture
def head_alone(eager, monkeypatch):
    """Let the head alone draft."""
    monkeypatch.setattr(PromptLookup, "predict", lambda *_: [])


def counts(status):
    return {each.source: (each.drafted, each.accepted) for each in status.drafts}[DraftSource.MTP]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_head_that_is_right_gives_two_tokens_a_step(overlap, make, head_alone):
    engine = make(overlap=overlap, max_batch_tokens=64)
    answers = Answers(engine)
    for name in "ab":
        answers.submit(greedy(name, prompt(90), max_tokens=TOKENS))
        answers.all()  # the second prompt begins with cached pages
        assert answers.outputs[name, 0][-1].timings.steps < 0.7 * TOKENS
    drafted, accepted = counts(engine.status())
    assert accepted > 0.8 * drafted


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen3_5_text", {}),
        *(
            pytest.param(family, more, marks=pytest.mark.soak)
            for family in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
            for more in ({"overlap": False}, {"kv_dtype": "fp8"}, {"max_batch_tokens": 64})
        ),
    ],
)
def test_answers_are_the_same_with_and_without_the_head(
    family, more, make, head_alone, folders, shelf, tmp_path
):
    """An adapter changes half of them, after which the head is less often right."""
    folder = save_adapter(folders[family], tmp_path / "a", 1, r=4, target_modules=["o_proj"])
    ref, told = shelf.add(folder, "a"), []
    for speculation in ("off", "mtp"):
        engine = make(family, speculation=speculation, grammars=DescendingGrammars(), **more)
        answers = Answers(engine, within_s=240.0)
        load_adapters(answers, [ref])
        for at, way in enumerate(WAYS):
            adapter = ref if at % 2 else None
            answers.submit(Request(way, (tuple(prompt(9 + 4 * at)),), sampling(way), 1, adapter))
        for name, adapter in (("plain", None), ("adapted", ref)):
            ids = prompt(20), prompt(21)
            answers.submit(greedy(name, *ids, max_tokens=TOKENS, adapter=adapter))
        answers.all()
        answers.submit(greedy("next", [*prompt(20), *answers.of("plain"), 5], max_tokens=TOKENS))
        answers.all()
        assert not answers.errors
        assert nothing_is_held(engine)
        told.append(answers)
    off, on = told
    assert on.tokens == off.tokens
    assert on.finish == off.finish
    drafted, accepted = counts(on.engine.status())
    assert 10 < accepted < drafted - 20


def test_a_request_that_comes_meanwhile_waits_for_no_head(make, eager):
    answers = Answers(make())
    answers.submit(greedy("long", prompt(9), max_tokens=60))
    answers.until(lambda: len(answers.tokens.get(("long", 0), ())) > 10)
    answers.submit(greedy("late", prompt(70), max_tokens=TOKENS))
    answers.all()
    drafted, accepted = counts(answers.engine.status())
    assert 0 < accepted <= drafted
    alone = Answers(make(speculation="off"))
    for name, ids, tokens in (("long", prompt(9), 60), ("late", prompt(70), TOKENS)):
        alone.submit(greedy(name, ids, max_tokens=tokens))
        alone.all()
    assert alone.tokens == answers.tokens


@pytest.mark.parametrize("draws", [512, pytest.param(100_000, marks=pytest.mark.soak)])
def test_drawn_tokens_follow_the_same_distribution(draws, make, head_alone):
    """With and without the head, the tokens are drawn by other seeds."""
    told, sizes = [], {"max_batch_tokens": 512, "state_bytes": 64 << 20}
    params = {"temperature": 1.0, "top_k": 4, "ignore_eos": True}
    for speculation in ("off", "mtp"):
        answers = Answers(make(speculation=speculation, **sizes), within_s=3600.0)
        for at in range(-(-draws // 32)):
            asked = SamplingParams(5, seed=1000 * at + 500 * len(told), **params)
            answers.submit(Request(f"{at}", (tuple(prompt(9)),), asked, 32))
            answers.all()
        told.append([tuple(tokens[2:]) for tokens in answers.tokens.values()])
    assert_drawn_alike(*told)
    drafted, accepted = counts(answers.engine.status())
    assert 50 < accepted < drafted - 50
