"""Requests that go on from tokens of another engine: the same next tokens as without a move."""

import pytest

from lorikeet_engine.errors import InvalidRequest
from lorikeet_engine.request import FinishReason, Request, SamplingParams, SchedulingParams
from tests.engine.descending_grammar import EOS, DescendingGrammars
from tests.engine.engine_driver import (
    PAGE,
    Answers,
    RecordingRunner,
    build,
    compile_grammars,
    greedy,
    nothing_is_held,
    prompt,
)
from tests.engine.peft_adapters import save_adapter

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = 40
GREEDY = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
DRAWN = {"temperature": 0.9, "max_tokens": TOKENS, "ignore_eos": True}
WAYS = {
    "greedy": SamplingParams(**GREEDY),
    "drawn": SamplingParams(**DRAWN, seed=5),
    "filtered": SamplingParams(**DRAWN, top_k=50, top_p=0.9, min_p=0.01, seed=6),
    "penalties": SamplingParams(
        **DRAWN, frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.2, seed=7
    ),
    "biases": SamplingParams(**GREEDY, logit_bias=((7, 2.0), (9, -3.0)), repetition_penalty=1.3),
    "min_tokens": SamplingParams(
        max_tokens=TOKENS, min_tokens=21, temperature=1.5, seed=8, stop_token_ids=tuple(range(128))
    ),
    "logprobs": SamplingParams(**DRAWN, seed=9, logprobs=2),
    "grammar": SamplingParams(temperature=0.0, max_tokens=TOKENS, grammar="below 250, end under 5"),
    "forced": SamplingParams(
        temperature=1.0,
        seed=10,
        max_tokens=TOKENS,
        grammar="below 200, end under 5, by one from 90 to 70",
    ),
}
CUTS = (0, 1, 2, PAGE - 1, PAGE, PAGE + 1, 20, TOKENS - 1)


@pytest.fixture(scope="module")
def family(request):
    """Family of the engines of `make`: that of a test's parameter, or Llama."""
    return getattr(request, "param", "llama")


@pytest.fixture
def make(family, tiny_checkpoints, shelf, tmp_path, close_later):
    """Engines over the family's tiny checkpoint, closed at the end."""

    def make(**settings):
        arguments = {"grammars": DescendingGrammars(), **settings}
        folder = tiny_checkpoints[family]
        return close_later(build(folder, shelf, tmp_path / "cache", **arguments))

    return make


def asked(way, name="", adapter=None, n=2, made=(), **scheduling):
    """Request for n choices of each of two prompts."""
    prompts = (tuple(prompt(21)), tuple(prompt(35)))
    params = SchedulingParams(**scheduling)
    return Request(f"{way}{name}", prompts, WAYS[way], n, adapter, scheduling=params, made=made)


def made_until(answers, request_id, cut, choices=4):
    """Return the first tokens of each choice; None for choices that end within them."""
    tokens = [tuple(answers.of(request_id, choice)) for choice in range(choices)]
    return tuple(some[:cut] if len(some) > cut else None for some in tokens)


@pytest.mark.parametrize(
    "family",
    [pytest.param("llama", marks=pytest.mark.soak), "mistral", "qwen3_5_text"],
    indirect=True,
    scope="module",
)
def test_a_choice_goes_on_with_the_tokens_that_follow(
    make, family, tiny_checkpoints, shelf, tmp_path
):
    linears = ["q_proj", "down_proj", "in_proj_qkv"]
    folder = tmp_path / "a"
    save_adapter(tiny_checkpoints[family], folder, 0, r=8, lora_alpha=16, target_modules=linears)
    adapters = {None: None, "a": shelf.add(folder, "a")}
    whole = Answers(make(max_running=16))
    named = {way: [*adapters][at % 2] for at, way in enumerate(WAYS)}
    for way, name in named.items():
        whole.submit(asked(way, f" {name}", adapters[name]))
    whole.all()
    # too few pages for all: resumed sequences are preempted
    other = Answers(make(max_running=8, kv_pages=11, max_context=128, max_batch_tokens=48))
    resumed = list[tuple[str, str, int]]()
    for at, (way, name) in enumerate(named.items()):
        for cut in (CUTS[at % len(CUTS)], CUTS[(at + 3) % len(CUTS)]):
            made = made_until(whole, f"{way} {name}", cut)
            if any(some is not None for some in made):
                other.submit(asked(way, f" {name} {cut}", adapters[name], made=made))
                resumed.append((f"{way} {name}", f"{way} {name} {cut}", cut))
    other.all()
    assert not other.errors
    assert len(resumed) > 10
    for before, after, cut in resumed:
        for choice in range(4):
            tokens = whole.of(before, choice)
            if len(tokens) <= cut:
                assert (after, choice) not in other.outputs
                continue
            assert other.of(after, choice) == tokens[cut:], (after, choice)
            assert other.finish[after, choice] is whole.finish[before, choice]
            told = [
                [token.logprob for output in outputs for token in output.logprobs]
                for outputs in (whole.outputs[before, choice], other.outputs[after, choice])
            ]
            assert told[1] == pytest.approx(told[0][cut:], abs=1e-3)
    assert other.engine.status().preemptions > 0
    assert nothing_is_held(other.engine)


def test_an_answer_may_move_at_every_token(make):
    whole, other = Answers(make()), Answers(make(max_running=64))
    for way in ("drawn", "penalties", "forced"):
        whole.submit(asked(way, n=1))
        whole.all()
        longest = max(len(whole.of(way, choice)) for choice in range(2))
        for cut in range(longest):
            other.submit(asked(way, f" {cut}", n=1, made=made_until(whole, way, cut, 2)))
        other.all()
        for cut in range(longest):
            for choice in range(2):
                rest = whole.of(way, choice)[cut:]
                assert other.tokens.get((f"{way} {cut}", choice), []) == rest


def test_a_move_back_takes_the_pages_of_prompt_and_answer_from_the_cache(make):
    answers = Answers(make())
    answers.submit(greedy("r", prompt(2 * PAGE + 5), max_tokens=TOKENS))
    answers.all()
    tokens, before = answers.of("r"), answers.engine.status()
    witness, made = RecordingRunner(answers.engine), (tuple(tokens[:30]),)
    answers.submit(Request("again", (tuple(prompt(2 * PAGE + 5)),), WAYS["greedy"], made=made))
    answers.all()
    assert answers.of("again") == tokens[30:]
    assert len(witness.batches[0].token_ids) == (2 * PAGE + 5 + 30) % PAGE
    (first, *_) = answers.outputs["again", 0]
    assert first.timings.cached_tokens == 2 * PAGE + 5  # of the prompt alone
    after = answers.engine.status()
    assert after.cached_tokens - before.cached_tokens == 2 * PAGE + 5


def test_scores_of_a_prompt_are_not_repeated(make):
    answers = Answers(make())
    answers.submit(greedy("r", prompt(20), prompt_logprobs=1))
    answers.all()
    sampling = greedy("", prompt(20), prompt_logprobs=1).sampling
    answers.submit(
        Request("moved", (tuple(prompt(20)),), sampling, made=((*answers.of("r")[:4],),))
    )
    answers.all()
    assert answers.of("moved") == answers.of("r")[4:]
    assert ("r", 0) in answers.scores
    assert ("moved", 0) not in answers.scores


def test_a_moved_request_begins_before_the_tenants_other_requests(make):
    answers = Answers(make(max_running=1))
    for name in ("first", "second"):
        answers.submit(greedy(name, prompt(20), max_tokens=TOKENS))
    answers.step()
    made = (tuple(prompt(3)),)
    moved = Request("moved", (tuple(prompt(20)),), WAYS["greedy"], made=made)
    answers.submit(moved)
    answers.until(lambda: ("moved", 0) in answers.finish)
    assert ("second", 0) not in answers.tokens
    answers.all()


def test_a_moved_request_may_wait_longer_than_a_new_one(make):
    answers = Answers(make(max_running=1))
    answers.submit(greedy("first", prompt(20), max_tokens=100))
    answers.step()
    limits = SchedulingParams(max_queue_s=0.0001)
    for name, made in (("new", ()), ("moved", (tuple(prompt(3)),))):
        sampling = WAYS["greedy"]
        answers.submit(Request(name, (tuple(prompt(20)),), sampling, scheduling=limits, made=made))
    answers.all()
    assert answers.errors.keys() == {"new"}
    assert len(answers.of("moved")) == TOKENS - 3


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (((3,), (4,)), "made"),
        ((None,), "made"),
        (((3, 256),), "made has token ids"),
        ((tuple(prompt(TOKENS)),), f"{TOKENS} tokens are made"),
    ],
)
def test_made_tokens_that_no_answer_goes_on_from_are_refused(make, made, message):
    engine = make()
    with pytest.raises(InvalidRequest, match=message):
        engine.submit(Request("r", (tuple(prompt(9)),), WAYS["greedy"], made=made))


def test_made_tokens_outside_the_grammar_are_refused(make):
    answers = Answers(make())
    answers.submit(Request("r", (tuple(prompt(9)),), WAYS["grammar"], made=((7, 9),)))
    compile_grammars(answers.engine)
    answers.all()
    assert isinstance(answers.errors["r"], InvalidRequest)
    assert "no 9 after 7" in str(answers.errors["r"])


def test_an_answer_of_a_grammar_ends_where_it_would_have_ended(make):
    assert EOS not in range(5, 250)
    answers = Answers(make())
    answers.submit(Request("r", (tuple(prompt(9)),), WAYS["grammar"], made=((7, 1),)))
    answers.all()
    assert answers.finish["r", 0] is FinishReason.STOP
