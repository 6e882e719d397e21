"""Penalties, logprobs and grammars through a whole engine: alone, in crowds, one step late.

test_random_traffic.py checks their tokens while sequences are preempted and aborted.
"""

import threading
from dataclasses import replace

import pytest
import torch
import transformers

from lorikeet_engine.errors import EngineOverloaded, InvalidRequest
from lorikeet_engine.request import FinishReason, Request, SamplingParams, SchedulingParams, Tokens
from tests.engine import engine_driver, hash_model
from tests.engine.blob_shelf import BlobShelf
from tests.engine.blobs import Shelf
from tests.engine.descending_grammar import Panic
from tests.engine.engine_driver import Answers, compile_grammars, greedy, prompt
from tests.engine.hash_model import predict

pytestmark = pytest.mark.usefixtures("one_thread")
WAYS = (
    {"temperature": 0.0},
    {"top_p": 0.8, "frequency_penalty": 1.5, "presence_penalty": -0.5},
    {"logit_bias": ((7, 5.0), (9, -100.0)), "stop_token_ids": (11,), "min_tokens": 3},
    {"grammar": "below 60, end under 20"},
    {"grammar": "below 64, end under 5", "presence_penalty": 2.0, "logprobs": 2},
)


@pytest.fixture
def make(tmp_path, close_later):
    """Engines over a HashModel, closed at the end."""

    def make(**settings):
        shelf = Shelf(tmp_path / "blobs")
        sizes = {"kv_pages": 200, "max_running": 16, "max_batch_tokens": 64, **settings}
        return close_later(hash_model.build(tmp_path, shelf, **sizes)[0])

    return make


def request(name, way, seed=5, n=1, ids=(1, 7, 9)):
    return Request(
        name, (tuple(ids),), SamplingParams(**{"max_tokens": 30, **way, "seed": seed}), n
    )


class TestTokens:
    @pytest.mark.parametrize("overlap", [False, True])
    def test_requests_with_any_options_answer_alike_in_one_batch_and_alone(self, make, overlap):
        answers = Answers(make(overlap=overlap))
        asked = [request(f"{i}", way, i, n=2, ids=(1, i + 3)) for i, way in enumerate(WAYS)]
        for call in asked:
            answers.submit(call)
        answers.all()
        for i, call in enumerate(asked):
            for choice in (0, 1):
                want = predict(call.prompts[0], call.sampling, i + choice, 800)
                key = (call.request_id, choice)
                assert (answers.tokens[key], answers.finish[key]) == want

    def test_a_choice_under_a_grammar_ends_when_no_token_can_follow(self, make):
        answers = Answers(make())
        answers.submit(request("r", {"grammar": "below 9, end under 0", "max_tokens": 50}))
        answers.all()
        assert answers.of("r")[-1] == 0
        assert answers.finish["r", 0] is FinishReason.STOP

    def test_max_tokens_may_end_a_choice_in_the_middle_of_its_grammar(self, make):
        answers = Answers(make())
        answers.submit(request("r", {"grammar": "below 64, end under 0", "max_tokens": 1}))
        answers.all()
        assert len(answers.of("r")) == 1
        assert answers.finish["r", 0] is FinishReason.LENGTH


class TestWaiting:
    def steps(self, engine, *calls):
        """Return, by request, the steps in which its tokens came."""
        for call in calls:
            engine.submit(call)
        compile_grammars(engine)
        came = {call.request_id: [] for call in calls}
        for step in range(60):
            for output in engine.step():
                came[output.request_id] += [step] * len(output.token_ids)
        return came

    def test_a_choice_under_a_grammar_is_in_every_step_and_delays_no_other(self, make):
        plain = request("plain", {"ignore_eos": True})
        bound = request("bound", {"grammar": "below 64, end under 0", "logit_bias": ((60, 90.0),)})
        alone = self.steps(make(), plain)["plain"]
        came = self.steps(make(), plain, bound)
        assert came["plain"] == alone == list(range(alone[0], alone[0] + 30))
        gaps = [b - a for a, b in zip(came["bound"], came["bound"][1:], strict=False)]
        assert set(gaps) == {1}

    def test_a_choice_with_penalties_is_in_every_step(self, make):
        plain = self.steps(make(), request("r", {"ignore_eos": True}))["r"]
        penalised = {"ignore_eos": True, "presence_penalty": 1.0}
        assert self.steps(make(), request("r", penalised))["r"] == plain

    def test_a_grammar_is_compiled_once_for_all_requests_and_delays_no_others(self, make):
        engine, may_compile, compiled = make(), threading.Event(), []
        compile_ = engine._grammars.compile

        def compile_slowly(text):
            assert may_compile.wait(20)
            compiled.append(text)
            return compile_(text)

        engine._grammars.compile = compile_slowly
        answers = Answers(engine)
        for name, way in (("first", WAYS[3]), ("second", WAYS[3]), ("plain", {})):
            answers.submit(request(name, way, n=2))
        answers.until(lambda: ("plain", 1) in answers.finish)
        assert engine.status().live.waiting == 4
        answers.engine.abort("second", 1)
        answers.step()
        assert engine.status().live.waiting == 3
        may_compile.set()
        answers.until(lambda: answers.pending == {"second": 1})
        answers.submit(request("third", WAYS[3]))
        answers.until(lambda: answers.pending == {"second": 1})
        assert compiled == [WAYS[3]["grammar"]]
        want = predict((1, 7, 9), SamplingParams(30, seed=5, **WAYS[3]), 5, 800)[0]
        assert answers.of("first") == answers.of("second") == answers.of("third") == want

    def test_a_request_late_or_aborted_while_its_grammar_compiles_leaves_nothing(self, make):
        engine, may_compile = make(), threading.Event()
        engine._grammars.compile = lambda _: may_compile.wait(20)
        answers = Answers(engine)
        bound = SchedulingParams(max_queue_s=0.05)
        answers.submit(replace(request("late", WAYS[3], n=2), scheduling=bound))
        engine.submit(request("gone", WAYS[4]))
        engine.abort("gone")
        answers.all()
        may_compile.set()
        assert isinstance(answers.errors["late"], EngineOverloaded)
        assert not engine._requests.open_choices
        assert engine.status().live.waiting == 0


class TestRefusals:
    def refused(self, engine, way):
        with pytest.raises(InvalidRequest) as refused:
            engine.submit(request("r", way))
        return refused.value.param

    def test_an_invalid_grammar_fails_only_its_request(self, make):
        answers = Answers(make())
        answers.submit(request("bad", {"grammar": "sideways"}, n=2))
        answers.submit(request("good", WAYS[3]))
        answers.all()
        assert answers.errors["bad"].param == "grammar"
        assert answers.errors.keys() == {"bad"}

    def test_a_crash_of_the_grammar_compiler_fails_only_its_request(self, make):
        def panic(_text):
            raise Panic

        answers = Answers(make())
        answers.engine._grammars.compile = panic
        answers.submit(request("bad", WAYS[3]))
        answers.submit(request("good", {}))
        answers.all()
        assert isinstance(answers.errors["bad"], InvalidRequest)
        assert answers.errors.keys() == {"bad"}

    def test_any_grammar_is_refused_by_an_engine_without_grammars(self, make):
        engine = make()
        engine._input_processor._grammars = None
        assert self.refused(engine, {"grammar": "below 9, end under 9"}) == "grammar"

    @pytest.mark.parametrize("token", [-1, 64])
    def test_a_bias_on_a_token_outside_the_vocabulary_is_refused(self, make, token):
        assert self.refused(make(), {"logit_bias": ((3, 1.0), (token, 1.0))}) == "logit_bias"

    @pytest.mark.parametrize("overlap", [False, True])
    @pytest.mark.parametrize("fault", ["fail", "stuck", "crash", "panic", "undecided"])
    def test_an_error_in_a_matcher_fails_only_its_request(self, make, fault, overlap):
        engine = make(overlap=overlap)
        answers = Answers(engine)
        well = {"grammar": "below 60, end under 20", "min_tokens": 2}
        # token 50 is by far the likeliest at first, and breaks the matcher
        ill = {"grammar": f"below 60, end under 20, {fault} at 50", "logit_bias": ((50, 99.0),)}
        answers.submit(request("well", well))
        answers.submit(request("ill", ill, n=2))
        answers.all()
        assert isinstance(answers.errors.pop("ill"), InvalidRequest)
        assert not answers.errors
        assert (
            answers.of("well") == predict((1, 7, 9), SamplingParams(30, seed=5, **well), 5, 800)[0]
        )
        live = engine.status().live
        assert (live.running, live.waiting, live.kv_pages_used) == (0, 0, 0)


class TestLogprobs:
    @pytest.fixture(scope="class")
    def reference(self, tiny_checkpoints):
        return transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoints["llama"])

    @pytest.mark.parametrize("overlap", [False, True])
    def test_logprobs_equal_a_plain_forward_pass(
        self, tiny_checkpoints, reference, tmp_path, overlap
    ):
        shelf = BlobShelf(tmp_path / "blobs")
        engine = engine_driver.build(tiny_checkpoints["llama"], shelf, tmp_path, overlap=overlap)
        stops = tuple(range(100, 160))
        ways = (
            ({"logprobs": 5, "seed": 1}, 1),
            ({}, 1),
            ({"logprobs": 0, "temperature": 1.0, "presence_penalty": 2.0, "seed": 2}, 3),
            ({"logprobs": 20, "temperature": 1.0, "stop_token_ids": stops, "seed": 3}, 2),
        )
        asked = [greedy(f"{i}", prompt(9 + i), n=n, **way) for i, (way, n) in enumerate(ways)]
        told = {}
        for call in asked:
            engine.submit(call)
        finished = 0
        while finished < 7:
            for output in engine.step():
                assert isinstance(output, Tokens)
                pairs = told.setdefault((output.request_id, output.choice), [])
                if output.request_id != "1":
                    assert len(output.logprobs) == len(output.token_ids)
                    pairs += zip(output.token_ids, output.logprobs, strict=True)
                assert output.request_id != "1" or not output.logprobs
                finished += output.finish is not None
        engine.close()
        for (name, _), pairs in told.items():
            call, said = asked[int(name)], [token for token, _ in pairs]
            ids = torch.tensor([[*call.prompts[0], *said]])
            with torch.inference_mode():
                logits = reference(input_ids=ids).logits[0, len(call.prompts[0]) - 1 : -1]
            want = torch.log_softmax(logits, -1)
            for (token, told_of), row in zip(pairs, want, strict=False):
                assert told_of.logprob == pytest.approx(row[token].item(), abs=1e-4)
                assert len(told_of.top) == call.sampling.logprobs
                values = row.topk(len(told_of.top)).values.tolist()
                assert [x for _, x in told_of.top] == pytest.approx(values, abs=1e-4)
                ids_of_top = [i for i, _ in told_of.top]
                assert row[ids_of_top].tolist() == pytest.approx(values, abs=1e-4)
