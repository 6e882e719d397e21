"""Speculation by prompt lookup changes no token, log probability or end of any answer.

test_random_traffic.py has drafts in random traffic, with preemptions, aborts and failed steps.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from lorikeet_engine.adapter import Composition
from lorikeet_engine.costs import MOST_DRAFTED
from lorikeet_engine.errors import SettingsError
from lorikeet_engine.request import (
    DraftSource,
    LogprobsMode,
    Request,
    SamplingParams,
    SchedulingParams,
)
from lorikeet_engine.scheduling import draft_budget
from lorikeet_engine.scheduling.draft_budget import DraftBudget
from lorikeet_engine.scheduling.fairness import OUTPUT_TOKEN, PROMPT_TOKEN
from tests.engine.descending_grammar import DescendingGrammars
from tests.engine.engine_driver import (
    Answers,
    RecordingRunner,
    build,
    greedy,
    load_adapters,
    nothing_is_held,
    prompt,
)
from tests.engine.half_right import draft_half_right
from tests.engine.peft_adapters import invoking, save_adapter
from tests.engine.sampling.draws import assert_drawn_alike

pytestmark = pytest.mark.usefixtures("one_thread")

DEMO = Path(__file__).parents[2] / "demo"
TOKENS = 40
INVOCATION = [7, 9]
# Most tokens are one of three, so answers soon repeat themselves. A fourth may stop them.
FEW = ((7, 90.0), (9, 91.0), (11, 92.5), (13, 88.5))
DRAWN = {"temperature": 1.0, "logit_bias": FEW, "seed": 5}
PROCESSED = LogprobsMode.PROCESSED
WAYS = {
    "greedy": {"temperature": 0.0, "logit_bias": FEW},
    "logprobs": {"temperature": 0.0, "logit_bias": FEW, "logprobs": 2, "prompt_logprobs": 1},
    "drawn": DRAWN,
    "filtered": {**DRAWN, "top_k": 2, "top_p": 0.9, "min_p": 0.05, "logprobs": 3},
    "processed": {**DRAWN, "top_p": 0.8, "logprobs": 3, "logprobs_mode": PROCESSED},
    "penalties": {**DRAWN, "frequency_penalty": 0.2, "presence_penalty": 0.3, "logprobs": 0},
    "repetition": {**DRAWN, "repetition_penalty": 1.05, "logprobs": 3, "logprobs_mode": PROCESSED},
    "stop": {**DRAWN, "stop_token_ids": (13,), "seed": 1},
    "kept stop": {**DRAWN, "stop_token_ids": (13,), "keep_stop_token": True, "seed": 2},
    "min_tokens": {**DRAWN, "stop_token_ids": (9, 13), "min_tokens": 20},
    "grammar": {"temperature": 0.0, "grammar": "below 250, end under 5, by one from 90 to 70"},
}
FORCING = "below 120, end under 5, by one from 90 to 70"
# The largest of these tokens that a grammar allows is the likeliest, so answers go down slowly.
DOWN = tuple((token, 20 + token / 4) for token in range(3, 240, 8))
GRAMMARS = {
    "greedy": {"temperature": 0.0, "grammar": FORCING},
    "drawn": {"grammar": FORCING, "seed": 3},
    "filtered": {"grammar": FORCING, "seed": 4, "top_p": 0.9, "min_p": 0.05},
    "biases": {"grammar": FORCING, "logit_bias": DOWN},
    "penalties": {"grammar": FORCING, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    "logprobs": {"grammar": FORCING, "logprobs": 2},
    "processed": {"grammar": FORCING, "logprobs": 2, "logprobs_mode": PROCESSED},
    "min_tokens": {"grammar": "below 250, end under 225", "min_tokens": 8, "logit_bias": DOWN},
    "cut": {"grammar": FORCING, "max_tokens": 19, "logit_bias": DOWN},
    "to the end": {"grammar": "below 24, end under 1, by one from 22 to 0", "seed": 8},
    "ending": {"grammar": "below 4, end under 1", "seed": 8},
}


def sampling(way):
    return SamplingParams(**{"max_tokens": TOKENS, "ignore_eos": True, **WAYS[way]})


@pytest.fixture
def eager(monkeypatch):
    """Let all sequences draft that can, at any cost; check that drafts are of their own tokens or
    of answers to the same tenant with the same adapter.
    """
    monkeypatch.setattr(draft_budget, "_LEAST_GAIN", 0.0)
    choose = DraftBudget.choose

    def checked(*arguments, **more):
        drafts = choose(*arguments, **more)
        for sequence, tokens in drafts.tokens.items():
            assert len(tokens) <= MOST_DRAFTED
            kept = arguments[0].answers.of(sequence.answers_key).tokens
            assert {*sequence.tokens, *kept.tolist()}.issuperset(tokens)
        return drafts

    monkeypatch.setattr(DraftBudget, "choose", checked)


def asked(refs, every):
    """Yield requests of all adapters and ways, but only one of `every` pairs."""
    for adapter, (name, ref) in enumerate(refs.items()):
        for at, way in enumerate(WAYS):
            if (adapter + at) % every:
                continue
            ids = prompt(15 + 4 * at)
            if name == "activated":
                ids = invoking(ids, INVOCATION)
            yield Request(f"{name} {way}", (tuple(ids),), sampling(way), 1 + at % 2, ref)


@pytest.mark.parametrize(
    ("family", "every", "overlap"),
    [
        ("llama", 4, True),
        *(
            pytest.param(family, 1, overlap, marks=pytest.mark.soak)
            for family in ("llama", "mistral", "qwen3_moe", "gemma3_text", "glm4_moe_lite")
            for overlap in (True, False)
        ),
    ],
)
def test_all_features_answer_the_same(
    family, every, overlap, eager, tiny_checkpoints, shelf, tmp_path, close_later
):
    checkpoint, linears = tiny_checkpoints[family], ["q_proj", "v_proj", "o_proj"]

    def adapter(name, **lora):
        folder = save_adapter(checkpoint, tmp_path / name, len(name), lora_alpha=16, **lora)
        return shelf.add(folder, name)

    first = adapter("first", r=8, target_modules=linears)
    refs = {
        None: None,
        "first": first,
        "head": adapter("head", r=4, target_modules=["q_proj", "lm_head"]),
        "both": Composition((first, adapter("other", r=3, target_modules=linears)), (1.0, -0.5)),
        "activated": adapter(
            "activated", r=6, target_modules=linears, alora_invocation_tokens=INVOCATION
        ),
    }
    told = {}
    for speculation in ("off", "lookup"):
        engine = build(
            checkpoint,
            shelf,
            tmp_path / speculation,
            grammars=DescendingGrammars(),
            speculation=speculation,
            overlap=overlap,
            max_batch_tokens=256,
            kv_pages=500,
        )
        answers = Answers(close_later(engine))
        load_adapters(answers, refs.values())
        for request in asked(refs, every):
            answers.submit(request)
        answers.all()
        for name, ref in refs.items():  # over cached pages of answers that had drafts
            turns = [*prompt(15), *answers.tokens.get((f"{name} greedy", 0), ()), *prompt(3)]
            answers.submit(greedy(f"{name} greedy, next", turns, adapter=ref))
        answers.all()
        assert not answers.errors
        assert nothing_is_held(engine)
        told[speculation] = answers
    off, on = told["off"], told["lookup"]
    assert on.tokens == off.tokens
    assert on.finish == off.finish
    for choice, outputs in off.outputs.items():
        scores, others = (
            [score for output in each for score in output.logprobs]
            for each in (outputs, on.outputs[choice])
        )
        values = [score.logprob for score in others]
        assert values == pytest.approx([score.logprob for score in scores], abs=1e-4)
        assert len(scores) in (0, len(off.tokens[choice]))
    before, status = off.engine.status(), on.engine.status()
    assert (before.drafted_tokens, before.accepted_tokens) == (0, 0)
    assert 50 < status.accepted_tokens < status.drafted_tokens - 20
    timings = [outputs[-1].timings for outputs in on.outputs.values()]
    assert sum(each.drafted_tokens for each in timings) == status.drafted_tokens
    assert sum(each.accepted_tokens for each in timings) == status.accepted_tokens
    by_way = dict.fromkeys(WAYS, 0)
    for (name, _), outputs in on.outputs.items():
        way = name.split(" ", 1)[1].removesuffix(", next")
        by_way[way] += outputs[-1].timings.accepted_tokens
    if every == 1:
        idle = {way for way, accepted in by_way.items() if not accepted}
        assert idle <= {"grammar", "stop", "kept stop"}  # those may stop early


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_grammars_answer_the_same(overlap, make, monkeypatch):
    """A fifth of the drafted tokens is wrong, and mostly one that the grammar does not allow."""
    told = []
    for speculation in ("off", "lookup"):
        answers = Answers(
            make(
                speculation=speculation,
                overlap=overlap,
                grammars=DescendingGrammars(),
                max_running=128,
                max_batch_tokens=512,
            )
        )
        for at, (name, way) in enumerate(GRAMMARS.items()):
            params = SamplingParams(**{"max_tokens": TOKENS, "temperature": 1.0, "seed": 5, **way})
            answers.submit(Request(name, (tuple(prompt(9 + at)),), params, 2))
        answers.all()
        told.append(answers)
        draft_half_right(monkeypatch, lambda *choice: told[0].tokens[choice])
    off, on = told
    assert on.tokens == off.tokens
    assert on.finish == off.finish
    assert not on.errors
    assert nothing_is_held(on.engine)
    for choice, outputs in off.outputs.items():
        scores, others = (
            [score.logprob for output in each for score in output.logprobs]
            for each in (outputs, on.outputs[choice])
        )
        assert others == pytest.approx(scores, abs=1e-4)
    ends = {choice: outputs[-1].timings for choice, outputs in on.outputs.items()}
    drafting = {name for (name, _), end in ends.items() if end.accepted_tokens}
    assert drafting >= {"greedy", "drawn", "biases", "processed", "min_tokens", "cut", "to the end"}


def test_a_grammar_that_fails_fails_its_request_with_the_same_error(make, monkeypatch):
    def ask(speculation, *faults):
        grammars = DescendingGrammars()
        answers = Answers(make(speculation=speculation, grammars=grammars, max_running=64))
        for fault in faults:
            grammar = f"below 250, end under 3{fault}"
            answers.submit(greedy(fault, prompt(9), max_tokens=TOKENS, grammar=grammar))
        answers.all()
        return answers

    whole = ask("off", "").of("")
    assert len(whole) > 5
    names = ("fail", "crash", "stuck", "panic", "undecided")
    faults = [f", {name} at {token}" for name in names for token in whole[1:5]]
    off = ask("off", *faults)
    draft_half_right(monkeypatch, lambda *_: whole)
    on = ask("lookup", *faults)
    assert all(tokens == whole[: len(tokens)] for tokens in on.tokens.values())
    assert set(on.errors) == set(off.errors) == set(faults)
    assert [str(on.errors[f]) for f in faults] == [str(off.errors[f]) for f in faults]
    assert on.engine.status().accepted_tokens > 0
    assert nothing_is_held(on.engine)


@pytest.fixture
def make(tiny_checkpoints, shelf, tmp_path, close_later):
    """Engines over a tiny checkpoint, closed at the end."""

    def make(family="llama", **settings):
        settings = {"speculation": "lookup", "max_batch_tokens": 256, **settings}
        return close_later(build(tiny_checkpoints[family], shelf, tmp_path / "cache", **settings))

    return make


def repeating(name, tokens=TOKENS, token=7):
    """Request whose answer repeats one token."""
    return greedy(name, prompt(9), max_tokens=tokens, logit_bias=((token, 100.0),))


def test_drafts_go_on_through_forced_tokens(make, eager):
    """The second answer repeats the first one, of whose tokens the grammar forces 31."""
    answers = Answers(make(grammars=DescendingGrammars(), max_running=64))
    grammar = "below 120, end under 5, by one from 90 to 60"
    for name in "ab":
        answers.submit(greedy(name, prompt(9), max_tokens=60, grammar=grammar, logit_bias=DOWN))
        answers.all()
    assert answers.of("a") == answers.of("b")
    assert {*range(60, 91)} < {*answers.of("a")}
    end = answers.outputs["b", 0][-1].timings
    assert end.steps <= 6
    assert end.accepted_tokens >= len(answers.of("b")) - 6


def lengths(batch):
    """Return the number of tokens of each sequence in a batch."""
    return [int(length) for length in batch.query_starts[1:] - batch.query_starts[:-1]]


def test_a_repetition_takes_few_steps(make, eager):
    engine = make()
    witness, answers = RecordingRunner(engine), Answers(engine)
    answers.submit(repeating("r"))
    answers.all()
    assert answers.of("r") == [7] * TOKENS
    steps = answers.outputs["r", 0][-1].timings.steps
    assert steps == len(witness.batches) < 14
    assert 9 < max(map(max, map(lengths, witness.batches[1:]))) <= 1 + MOST_DRAFTED
    assert sum(len(output.token_ids) for output in answers.outputs["r", 0]) == TOKENS
    status = engine.status()
    assert status.output_tokens == TOKENS
    assert TOKENS - steps <= status.accepted_tokens <= status.drafted_tokens


def test_others_are_in_every_step_and_wait_for_no_draft(make, eager):
    engine = make(max_running=32)
    witness, answers = RecordingRunner(engine), Answers(engine)
    drawn = Request("drawn", (tuple(prompt(12)),), SamplingParams(TOKENS, seed=3, ignore_eos=True))
    answers.submit(repeating("r", 200))
    answers.submit(drawn)
    answers.until(lambda: ("drawn", 0) in answers.finish)
    assert answers.outputs["drawn", 0][-1].timings.steps == TOKENS
    assert len(witness.batches) <= TOKENS + 2
    assert any(max(lengths(batch)) > 1 for batch in witness.batches[1:])


def test_a_full_batch_has_no_drafts(make):
    engine = make(max_running=4)
    answers = Answers(engine)
    for name in "abcd":
        answers.submit(repeating(name))
    answers.until(lambda: len(answers.finish) == 4)
    assert engine.status().drafted_tokens == 0


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_5_text",
        *(pytest.param(f, marks=pytest.mark.soak) for f in ("nemotron_h", "granitemoehybrid")),
    ],
)
def test_a_hybrid_goes_back_to_the_state_before_a_rejected_token(
    family, make, monkeypatch, shelf, tiny_checkpoints, tmp_path
):
    """A fifth of the drafted tokens is wrong, and each answer leaves a state for its next turn."""
    folder = save_adapter(
        tiny_checkpoints[family], tmp_path / "a", 1, r=4, target_modules=["o_proj"]
    )
    ref = shelf.add(folder, "a")
    told = []
    for speculation in ("off", "lookup"):
        answers = Answers(make(family, speculation=speculation, max_running=64))
        load_adapters(answers, [ref])
        for at, way in enumerate(WAYS):
            if way != "grammar":
                ids, adapter = tuple(prompt(9 + 8 * at)), ref if at % 2 else None
                answers.submit(Request(way, (ids,), sampling(way), 2, adapter))
        answers.all()
        for way in ("greedy", "penalties"):
            turns = [*prompt(30), *answers.of(way), *prompt(3)]
            answers.submit(greedy(f"{way}, next", turns))
        answers.all()
        assert nothing_is_held(answers.engine)
        told.append(answers)
        draft_half_right(monkeypatch, lambda *choice: told[0].tokens[choice])
    off, on = told
    assert not on.errors
    assert on.tokens == off.tokens
    assert on.finish == off.finish
    status = on.engine.status()
    assert 100 < status.accepted_tokens < status.drafted_tokens - 20


@pytest.mark.parametrize("draws", [512, pytest.param(100_000, marks=pytest.mark.soak)])
def test_drawn_tokens_follow_the_same_distribution(draws, make, monkeypatch):
    """Most drafts say the likeliest token. With and without them, other seeds draw."""
    told = []
    for speculation in ("off", "lookup"):
        sizes = {"max_running": 256, "max_batch_tokens": 1024}
        answers = Answers(make(speculation=speculation, **sizes), within_s=3600.0)
        for at in range(draws // 64):
            params = {**DRAWN, "seed": 1000 * at + 500 * len(told), "temperature": 2.0}
            asked = SamplingParams(6, ignore_eos=True, **params)
            answers.submit(Request(f"{at}", (tuple(prompt(9)),), asked, 64))
            answers.all()
        told.append([tuple(tokens[3:]) for tokens in answers.tokens.values()])
        draft_half_right(monkeypatch, lambda *_: [11] * 6)
    assert_drawn_alike(*told)
    status = answers.engine.status()
    assert 50 < status.accepted_tokens < status.drafted_tokens - 50


def test_a_draft_lengthens_no_answer(make, eager):
    answers = Answers(make())
    for tokens in range(1, 24):
        answers.submit(repeating("r", tokens))
        answers.all()
        assert answers.of("r") == [7] * tokens


def test_drafted_tokens_are_charged_as_prompt_tokens(make, eager):
    engine = make()
    answers = Answers(engine)
    answers.submit(repeating("r"))
    answers.until(lambda: ("r", 0) in answers.tokens)
    (sequence,) = engine._scheduler.running
    counter, steps = sequence.cost.counter, sequence.timings.steps
    before = counter.value
    answers.all()
    status, steps = engine.status(), sequence.timings.steps - steps
    assert status.drafted_tokens > 0
    cost = OUTPUT_TOKEN * steps + PROMPT_TOKEN * status.drafted_tokens
    assert counter.value - before == pytest.approx(cost)


def test_drafts_come_from_answers_to_the_same_tenant_with_the_same_adapter_alone(
    make, eager, shelf, tiny_checkpoints, tmp_path, monkeypatch
):
    """A tenant's secret, a repeated answer, is drafted for it and for nobody else."""
    monkeypatch.setattr(draft_budget, "_LEAST_ACCEPTANCE", 0.0)
    folders = [save_adapter(tiny_checkpoints["llama"], tmp_path / f"{n}", n, r=4) for n in (1, 2)]
    first, second = (shelf.add(folder, folder.name) for folder in folders)
    engine = make()
    answers, drafted = Answers(engine), dict[str, list[tuple[int, ...]]]()
    choose = DraftBudget.choose

    def recorded(*arguments, **more):
        drafts = choose(*arguments, **more)
        for sequence, tokens in drafts.tokens.items():
            if sequence.drafted_from is DraftSource.ANSWERS:
                drafted.setdefault(sequence.request.request_id, []).append(tokens)
        return drafts

    monkeypatch.setattr(DraftBudget, "choose", recorded)
    load_adapters(answers, [first, second])
    ids = tuple(prompt(12))

    def ask(name, tenant, adapter, salt=None):
        request = greedy(name, [*ids], max_tokens=TOKENS, adapter=adapter, salt=salt or tenant)
        answers.submit(replace(request, scheduling=SchedulingParams(tenant=tenant)))
        answers.all()
        return answers.of(name)

    secret = ask("told", "acme", first)
    assert ask("again", "acme", first) == secret
    assert drafted["again"]
    assert answers.outputs["again", 0][-1].timings.steps < TOKENS // 2
    for name, asked in {
        "tenant": ("globex", first),
        "adapter": ("acme", second),
        "base": ("acme", None),
        "salt": ("acme", first, "other"),
    }.items():
        told = ask(name, *asked)
        assert told == secret or asked[1] is not first  # the drafts would have been right
        assert name not in drafted


def test_an_unknown_speculation_is_refused(make):
    with pytest.raises(SettingsError, match="speculation='eagle': want off, lookup, mtp or draft"):
        make(speculation="eagle")


@pytest.mark.soak
@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_ranks_of_several_processes_draft_alike(family, make, eager):
    told, grammars = [], DescendingGrammars()
    for ranks in (1, 2):
        engine = make(family, tensor_parallel=ranks, grammars=grammars, max_running=32)
        answers = Answers(engine, within_s=240.0)
        for at, way in enumerate(WAYS):
            answers.submit(Request(way, (tuple(prompt(9 + at)),), sampling(way)))
        answers.all()
        assert not answers.errors
        assert answers.engine.status().accepted_tokens > 50
        told.append(answers.tokens)
        answers.engine.close()
    assert told[0] == told[1]


@pytest.mark.soak
def test_the_demos_adapters_answer_the_same(eager, shelf, tmp_path, close_later):
    folders = sorted(path.parent for path in (DEMO / "adapters").rglob("adapter_config.json"))
    refs = [None, *(shelf.add(folder, folder.name) for folder in folders)]
    sizes = {"adapter_gpu_bytes": 64 << 20, "adapter_host_bytes": 128 << 20, "kv_pages": 2000}
    told = []
    for speculation in ("off", "lookup"):
        cache = tmp_path / speculation
        engine = build(DEMO / "model", shelf, cache, speculation=speculation, **sizes)
        answers = Answers(close_later(engine))
        load_adapters(answers, refs)
        for at, ref in enumerate(refs):
            for heat in (0.0, 0.7):
                params = SamplingParams(48, temperature=heat, seed=at, ignore_eos=True)
                answers.submit(Request(f"{at} {heat}", (tuple(prompt(20)) * 2,), params, 1, ref))
        answers.all()
        told.append(answers.tokens)
    assert len(refs) == 9
    assert engine.status().accepted_tokens > 0
    assert told[0] == told[1]
