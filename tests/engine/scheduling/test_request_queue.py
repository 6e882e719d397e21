"""Requests before the scheduler takes them: compiling grammars, loading adapters, aborts."""

import threading
import time

import pytest

from lorikeet_engine.adapter import Residency
from lorikeet_engine.errors import InvalidRequest
from lorikeet_engine.request import Request, SamplingParams, SchedulingParams
from lorikeet_engine.scheduling import deadlines
from lorikeet_engine.scheduling.kv_cache import PageKeys
from tests.engine import hash_model
from tests.engine.blobs import Shelf
from tests.engine.descending_grammar import Descending, Panic
from tests.engine.engine_driver import Answers
from tests.engine.hash_model import SHAPE
from tests.moved_time import MovedTime

pytestmark = pytest.mark.usefixtures("one_thread")
GRAMMAR = "below 60, end under 20"


@pytest.fixture
def shelf(tmp_path):
    return Shelf(tmp_path / "blobs")


@pytest.fixture
def ref(shelf):
    return shelf.make("cold", {(0, 0): 2}, shape=SHAPE)


@pytest.fixture
def answers(tmp_path, shelf):
    engine, _ = hash_model.build(tmp_path, shelf, kv_pages=200, max_running=16, max_batch_tokens=64)
    yield Answers(engine)
    engine.close()


@pytest.fixture
def may_compile(answers):
    """Event that the compilation of grammars waits for."""
    may_compile, compile_ = threading.Event(), answers.engine._grammars.compile

    def compile_slowly(text):
        assert may_compile.wait(20)
        return compile_(text)

    answers.engine._grammars.compile = compile_slowly
    yield may_compile
    may_compile.set()


def request(name, grammar=GRAMMAR, **fields):
    return Request(name, ((1, 7, 9),), SamplingParams(30, seed=5, grammar=grammar), **fields)


def test_a_request_that_can_never_run_is_refused_before_it_is_queued(answers):
    info = answers.engine.info
    for prompt in ((1,) * info.max_context, (1, info.vocab_size)):
        with pytest.raises(InvalidRequest):
            answers.submit(Request("r", (prompt,), SamplingParams(30)))
    answers.submit(request("r"))  # under the same id, since the refused requests are not in flight
    answers.all()
    assert not answers.errors


def test_an_adapter_loads_while_a_grammar_is_compiled(answers, may_compile, ref, monkeypatch):
    moved = MovedTime(monkeypatch, deadlines)
    patience = SchedulingParams(max_load_s=60.0)
    answers.submit(request("r", adapter=ref, scheduling=patience))
    answers.until(lambda: answers.engine.residency(ref) is Residency.GPU)
    moved.ahead_s = 60.0
    answers.step()  # after the request's deadline
    may_compile.set()
    answers.all()
    assert not answers.errors


def test_a_load_during_grammar_compilation_is_charged_to_the_requests_tenant(
    answers, may_compile, ref
):
    engine, asked = answers.engine, SchedulingParams("acme")
    engine._tiers.copy_s = lambda _: 0.0 if ref.digest in engine._tiers._requests else 1000.0
    answers.submit(request("r", adapter=ref, scheduling=asked))
    answers.until(lambda: engine.residency(ref) is Residency.GPU)
    may_compile.set()
    answers.all()
    counter = engine._scheduler._tenants._counters["acme", False]
    assert counter.value > 1000.0 / engine.info.step_costs.prompt_token_s


def test_load_time_excludes_the_wait_before_the_load_was_requested(
    answers, may_compile, ref, shelf
):
    shelf.gates["cold"] = threading.Event()
    engine = answers.engine
    engine.submit(request("r", adapter=ref))
    time.sleep(0.3)  # no step, so the adapter is not requested either
    engine.step()
    time.sleep(0.1)
    shelf.gates["cold"].set()
    may_compile.set()
    outputs = []
    while not any(output.finish for output in outputs):
        engine.wait(5)
        outputs += engine.step()
    timings = outputs[-1].timings
    assert 0.1 <= timings.load_s <= timings.queued_s - 0.3


def test_an_abort_while_a_grammar_is_compiled_loads_no_adapter(answers, may_compile, ref, shelf):
    engine = answers.engine
    engine.submit(request("r", adapter=ref, n=2))
    engine.abort("r")
    engine.step()
    may_compile.set()
    assert not engine._tiers._requests.digests()
    assert not shelf.fetched
    assert not engine._requests.open_choices
    assert engine.status().live.waiting == 0


def test_a_choice_aborted_before_the_first_step_leaves_the_others(answers):
    answers.submit(request("r", n=2))
    answers.engine.abort("r", 1)
    answers.until(lambda: ("r", 0) in answers.finish)
    assert ("r", 1) not in answers.tokens
    assert not answers.engine._requests.open_choices


def test_a_grammar_that_cannot_be_copied_fails_only_its_request(answers, monkeypatch):
    copy = Descending.copy

    def copy_or_break(matcher):
        with answers.engine._requests._lock:  # must not be held while a slow copy runs
            pass
        if matcher.end == 13:
            raise Panic
        return copy(matcher)

    monkeypatch.setattr(Descending, "copy", copy_or_break)
    answers.submit(request("bad", "below 60, end under 13", n=2))
    answers.submit(request("good"))
    answers.all()
    assert isinstance(answers.errors.pop("bad"), InvalidRequest)
    assert not answers.errors
    assert not answers.engine._requests.open_choices


def test_a_prompt_is_hashed_once_for_all_choices_on_the_submitting_thread(answers, monkeypatch):
    hashed, extend = [], PageKeys.extend

    def recorded(keys, *rest):
        hashed.append((threading.current_thread().name, len(rest[1])))
        extend(keys, *rest)

    monkeypatch.setattr(PageKeys, "extend", recorded)
    prompts = ((1,) * 50, (2,) * 60)
    asked = Request("r", prompts, SamplingParams(1, temperature=0.0), n=4)
    caller = threading.Thread(target=answers.submit, args=(asked,), name="caller")
    caller.start()
    caller.join()
    answers.all()
    assert hashed == [("caller", 50), ("caller", 60)]


def test_choices_that_wait_share_their_prompt_and_its_keys(answers):
    """Compare memory: copies for a hundred choices would take a hundred times as much."""
    prompt = tuple(range(40)) * 2
    processor = answers.engine._input_processor
    first, *others = processor.process(Request("r", (prompt,), SamplingParams(max_tokens=9), n=8))
    assert all(other.tokens is first.tokens for other in others)
    assert all(other.kv._keys is first.kv._keys for other in others)
    ended = processor.process(Request("r", (prompt,), SamplingParams(max_tokens=9), n=2))
    ended[0].add_pending(0)
    ended[0].accept(7)
    assert list(ended[0].tokens) == [*prompt, 7]
    assert list(ended[1].tokens) == list(prompt)
