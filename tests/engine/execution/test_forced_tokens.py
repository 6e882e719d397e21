"""Tokens forced by a grammar come several in a step, and equal those sampled one by one."""

from dataclasses import replace

import pytest

from lorikeet_engine.costs import RowsTime, StepCosts
from lorikeet_engine.errors import InvalidRequest
from lorikeet_engine.execution import grammar_masks
from lorikeet_engine.request import FinishReason, Request, SamplingParams
from lorikeet_engine.scheduling import forced_budget
from lorikeet_engine.scheduling.forced_budget import SHARE, ForcedBudget, ForcedPieces
from tests.engine import hash_model
from tests.engine.blobs import Shelf
from tests.engine.engine_driver import Answers, RecordingRunner, compile_grammars
from tests.engine.hash_model import PAGE, predict

pytestmark = pytest.mark.usefixtures("one_thread")

RUN = "below 60, end under 0, by one from 59 to 30"  # thirty forced tokens at first
SAID = list(range(59, 29, -1))


@pytest.fixture
def make(tmp_path, close_later):
    """Engines over a HashModel, closed at the end."""

    def make(**settings):
        shelf = Shelf(tmp_path / "blobs")
        sizes = {"kv_pages": 200, "max_running": 8, "max_batch_tokens": 64, **settings}
        return close_later(hash_model.build(tmp_path, shelf, **sizes)[0])

    return make


def request(name="r", grammar=RUN, n=1, ids=(1, 7, 9), **sampling):
    params = SamplingParams(**{"max_tokens": 40, "seed": 5, "grammar": grammar, **sampling})
    return Request(name, (tuple(ids),), params, n)


def ask(engine, *requests):
    """Run the requests; check all answers against a model that samples token by token."""
    answers = Answers(engine)
    for call in requests:
        answers.submit(call)
    compile_grammars(engine)
    answers.all()
    for call in requests:
        for choice in range(call.n):
            want = predict(call.prompts[0], call.sampling, 5 + choice, 800)
            key = (call.request_id, choice)
            assert (answers.tokens[key], answers.finish[key]) == want
    return answers


def came(answers, name="r", choice=0):
    """Return the number of tokens in each output of a choice."""
    return [len(output.token_ids) for output in answers.outputs[name, choice]]


def steps(answers, name="r", choice=0):
    """Return the number of steps that a choice took part in."""
    return answers.outputs[name, choice][-1].timings.steps


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("overlap", [False, True])
class TestSteps:
    def test_a_run_of_forced_tokens_of_any_length_takes_one_step(self, make, overlap, temperature):
        engine = make(overlap=overlap)
        answers = ask(engine, request(temperature=temperature))
        assert answers.of("r")[:30] == SAID
        assert came(answers) == [30] + [1] * (len(answers.of("r")) - 30)
        assert steps(answers) == len(came(answers))
        status, tokens = engine.status(), len(answers.of("r"))
        assert status.output_tokens == tokens
        assert sum(status.inter_token_s[None].counts) == len(came(answers)) - 1

    def test_choices_have_forced_tokens_of_their_own(self, make, overlap, temperature):
        grammar = "below 60, end under 0, by one from 40 to 20"
        answers = ask(make(overlap=overlap), request(grammar=grammar, n=3, temperature=temperature))
        for choice in range(3):
            said = answers.of("r", choice)
            # the first forced token, if any, is sampled
            forced = sum(20 <= token < said[max(0, at - 1)] <= 41 for at, token in enumerate(said))
            assert sum(came(answers, "r", choice)) == len(said)
            assert len(said) - len(came(answers, "r", choice)) == max(0, forced - 1)
        assert len({len(answers.of("r", choice)) for choice in range(3)}) > 1 or not temperature


class TestEnds:
    @pytest.mark.parametrize("most", [1, 2, 17, 30, 31])
    def test_max_tokens_may_cut_a_run_of_forced_tokens(self, make, most):
        answers = ask(make(), request(max_tokens=most))
        assert came(answers)[0] == min(most, 30)
        assert answers.finish["r", 0] is FinishReason.LENGTH

    @pytest.mark.parametrize("keep", [False, True])
    def test_a_stop_token_among_forced_tokens_ends_the_choice(self, make, keep):
        call = request(stop_token_ids=(45,), keep_stop_token=keep)
        answers = Answers(make())
        answers.submit(call)
        answers.all()
        assert answers.of("r") == list(range(59, 44 if keep else 45, -1))
        assert answers.finish["r", 0] is FinishReason.STOP

    def test_no_token_is_forced_behind_a_forced_stop_token(self, make):
        answers = ask(make(), request(stop_token_ids=(59,)))
        assert answers.of("r") == []

    def test_a_grammar_that_cannot_tell_its_forced_tokens_fails_only_its_request(self, make):
        answers = Answers(make())
        asked = [request("bad", f"{RUN}, unsure at 60"), request("good")]
        for call in asked:
            answers.submit(call)
        answers.all()
        assert isinstance(answers.errors["bad"], InvalidRequest)
        assert answers.of("good")[:30] == SAID


class TestOneByOne:
    """The device must see each token: none are forced, and the output is the same."""

    @pytest.mark.parametrize(
        "more", [{"logprobs": 2}, {"frequency_penalty": 1.0}, {"logit_bias": ((7, 2.0),)}], ids=str
    )
    def test_sampling_options_that_need_each_token_disable_forced_tokens(self, make, more):
        answers = ask(make(), request(**more))
        assert set(came(answers)) == {1}
        outputs = answers.outputs["r", 0]
        assert all(len(o.logprobs) == ("logprobs" in more) for o in outputs)


class TestLimits:
    def test_forced_tokens_stay_within_max_batch_tokens(self, make):
        engine = make(max_running=4, max_batch_tokens=10)  # six beside four decodes
        answers = ask(engine, *(request(f"r{i}", ids=(1, i + 3)) for i in range(4)))
        assert max(max(came(answers, f"r{i}")) for i in range(4)) == 7

    def test_a_batch_full_of_decodes_leaves_no_forced_tokens(self, make):
        assert set(came(ask(make(max_running=4, max_batch_tokens=4), request()))) == {1}

    def test_forced_tokens_of_a_step_stay_within_the_rows_of_a_graph(self, make, monkeypatch):
        monkeypatch.setattr(forced_budget, "_MOST", 5)
        assert came(ask(make(), request()))[:6] == [6, 6, 6, 6, 6, 1]

    def test_a_run_cut_by_max_tokens_leaves_its_rest_of_the_budget_to_others(
        self, make, monkeypatch
    ):
        monkeypatch.setattr(forced_budget, "_MOST", 20)
        asked = [request("cut", max_tokens=3), request("other", ids=(1, 4))]
        answers = ask(make(), *asked)  # both requests begin in one step
        assert came(answers, "cut") == [3]
        assert came(answers, "other")[:2] == [19, 11]

    def test_forced_tokens_never_push_a_step_deep_in_a_context_out_of_its_single_graph(
        self, make, monkeypatch
    ):
        monkeypatch.setattr(grammar_masks, "SEEN_IN_PIECES", 3 * (3 + 56) + 1)
        assert max(came(ask(make(), request()))) == 3
        deep = request(ids=[3] * 200)
        assert set(came(ask(make(), deep))) == {1}

    @pytest.mark.parametrize("sequences", [1, 3])
    def test_few_sequences_of_a_step_in_pieces_have_forced_tokens(self, make, sequences):
        engine = make(max_running=8)
        budget = ForcedBudget(56, StepCosts(), (8, 16), ForcedPieces((64,), sequences))
        engine._parts = replace(engine._parts, forced_budget=budget)
        runner = RecordingRunner(engine)
        answers = ask(engine, *(request(f"r{i}", ids=(1, i + 3)) for i in range(6)))
        lengths = [batch.query_starts[1:] - batch.query_starts[:-1] for batch in runner.batches]
        assert max(sum(each > 1) for each in lengths[1:]) == sequences  # after prompts
        assert all(max(came(answers, f"r{i}")) > 20 for i in range(6))


class TestBesideOthers:
    def test_choices_without_a_grammar_are_in_every_step(self, make):
        engine = make()
        plain = request("plain", None, ids=(4, 5), ignore_eos=True)
        answers = ask(engine, plain, *(request(f"r{i}", ids=(1, i + 3)) for i in range(4)))
        assert set(came(answers, "plain")) == {1}
        assert steps(answers, "plain") == 40

    @pytest.mark.parametrize(
        "other",
        [
            request("other", None, ids=(4, 5), ignore_eos=True),
            request("other", ids=(4, 5), logprobs=0),
        ],
        ids=["a plain one", "one by one"],
    )
    def test_forced_tokens_lengthen_steps_by_at_most_the_share_that_others_may_lose(
        self, make, other
    ):
        engine = make(max_running=8)
        costs = StepCosts((RowsTime(1, 1.0), RowsTime(1001, 1001.0)), 0.0, pieces_s=0.0)
        engine._parts = replace(engine._parts, forced_budget=ForcedBudget(56, costs))
        answers = ask(engine, other, *(request(f"r{i}", ids=(1, i + 3)) for i in range(7)))
        forced = sum(sum(came(answers, f"r{i}")) - len(came(answers, f"r{i}")) for i in range(7))
        assert 0 < forced <= SHARE * 8 * steps(answers, "other")

    def test_forced_tokens_fill_a_larger_captured_size_and_requests_take_turns(self, make):
        engine = make(max_running=8)
        costs = StepCosts((RowsTime(8, 1.0), RowsTime(108, 3.0)), 0.0, pieces_s=0.0)
        budget = ForcedBudget(56, costs, (4, 8, 16, 24, 32))  # eight more, every sixth step
        engine._parts = replace(engine._parts, forced_budget=budget)
        runner = RecordingRunner(engine)
        plain = request("plain", None, ids=(4, 5), ignore_eos=True)
        answers = ask(engine, plain, *(request(f"r{i}", ids=(1, i + 3)) for i in range(7)))
        widths = [len(batch.token_ids) for batch in runner.batches[2:16]]  # after prompts
        assert set(widths) == {8, 16}
        assert widths.count(16) == 2
        helped = [i for i in range(7) if max(came(answers, f"r{i}")) > 1]
        assert len(helped) > 1

    def test_preemption_changes_no_forced_token(self, make):
        engine = make(kv_pages=24, max_running=4, max_context=4 * PAGE * 4)
        ask(engine, *(request(f"r{i}", ids=(1, i + 3)) for i in range(4)))
        assert engine.status().preemptions > 0

    def test_forced_tokens_are_cached_like_sampled_tokens(self, make):
        engine = make()
        answers = ask(engine, request(max_tokens=31))
        said = answers.of("r")
        again = ask(engine, request("again", "below 20, end under 0", ids=(1, 7, 9, *said)))
        cached = again.outputs["again", 0][0].timings.cached_tokens
        assert cached == (3 + 30) // PAGE * PAGE
