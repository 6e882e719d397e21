"""Work on grammars: tenants take turns, each has its bounds, and nothing is done twice."""

import threading

import pytest

from lorikeet_engine.errors import EngineClosed, EngineOverloaded, InvalidRequest
from lorikeet_engine.sampling import grammar_worker
from lorikeet_engine.sampling.grammar_worker import GrammarWorker


class Work:
    """Notes what it does, once it may; grammars of "bad …" raise."""

    def __init__(self):
        self.done = []
        self.begun, self.may_begin = threading.Event(), threading.Event()

    def __call__(self, grammar):
        self.begun.set()
        assert self.may_begin.wait(20)
        self.done.append(grammar)
        if grammar.startswith("bad"):
            raise InvalidRequest(grammar)
        return grammar.upper()


@pytest.fixture
def work():
    return Work()


@pytest.fixture
def worker(work):
    worker = GrammarWorker(work)
    yield worker
    work.may_begin.set()
    worker.close()


def test_tenants_take_turns_whoever_came_first(worker, work):
    flood = [worker.result(f"a{i}", "acme") for i in range(20)]
    assert work.begun.wait(20)
    others = [worker.result(f"{name}{i}", name) for i in range(2) for name in ("b", "c")]
    work.may_begin.set()
    assert [future.result(20) for future in others] == ["B0", "C0", "B1", "C1"]
    assert flood[-1].result(20) == "A19"
    rest = [f"a{i}" for i in range(3, 20)]
    assert work.done == ["a0", "a1", "b0", "c0", "a2", "b1", "c1", *rest]


def test_a_grammar_that_is_kept_or_waits_is_not_worked_on_again(worker, work):
    first, second = worker.result("g", "acme"), worker.result("other", "acme")
    again = worker.result("other", "acme")
    globex = worker.result("other", "globex")  # not behind acme's
    work.may_begin.set()
    assert [f.result(20) for f in (first, second, again, globex)] == ["G", *["OTHER"] * 3]
    assert worker.result("g", "globex").done()
    assert work.done == ["g", "other"]


def test_a_tenant_with_too_many_waiting_is_refused_and_told_when_to_come_back(
    worker, work, monkeypatch
):
    monkeypatch.setattr(grammar_worker, "_MAX_WAITING", 3)
    worker._usual_s = 2.0
    worker.result("begun", "acme")
    assert work.begun.wait(20)
    for i in range(3):
        worker.result(f"a{i}", "acme")
    with pytest.raises(EngineOverloaded, match="send the request again in 2 s") as refused:
        worker.result("more", "acme")
    assert refused.value.code == "rate_limit_exceeded"
    worker.result("b", "globex")
    with pytest.raises(EngineOverloaded) as refused:
        worker.result("more", "acme")
    assert refused.value.retry_after_s == 4.0
    assert not worker.result("a2", "acme").done()


def test_a_tenant_with_many_grammars_loses_its_own_first(worker, work, monkeypatch):
    monkeypatch.setattr(grammar_worker, "_KEPT", 6)
    work.may_begin.set()
    for grammar, tenant in [("b", "b"), *((f"a{i}", "acme") for i in range(20)), ("c", "c")]:
        worker.result(grammar, tenant).result(20)
    work.done.clear()
    for grammar in ("b", "a16", "a17", "a18", "a19", "c"):
        assert worker.result(grammar, "d").done()
    worker.result("a15", "d").result(20)
    assert work.done == ["a15"]
    worker.result("a16", "d").result(20)  # which had to go for it
    assert work.done == ["a15", "a16"]


def test_what_raises_is_tried_again(worker, work):
    work.may_begin.set()
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            worker.result("bad", "acme").result(20)
    assert work.done == ["bad", "bad"]


def test_closing_fails_what_waits(worker, work):
    first, second = worker.result("a", "acme"), worker.result("b", "acme")
    closing = threading.Thread(target=worker.close)
    closing.start()
    with pytest.raises(EngineClosed, match="send the request again"):
        second.result(20)
    work.may_begin.set()
    closing.join()
    assert first.done()
    with pytest.raises(EngineClosed):
        worker.result("a", "acme")
