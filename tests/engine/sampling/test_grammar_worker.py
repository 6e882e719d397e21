"""Work on grammars: tenants take turns, each has its bounds, and nothing is done twice."""

import gc
import os
import subprocess
import sys
import threading
import time

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


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is the process's there")
def test_threads_and_processes_that_compile_grammars_give_way_to_others():
    command = [sys.executable, "-c", "import os; print(os.nice(0))"]

    def niceness(_):
        return os.nice(0), int(subprocess.check_output(command))

    worker = GrammarWorker(niceness)
    thread, process = worker.result("g", "acme").result(20)
    worker.close()
    assert thread == process == min(os.nice(0) + grammar_worker._NICENESS, 19)


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
    worker._usual_s = 1.2
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
    assert refused.value.retry_after_s == 2.4
    assert not worker.result("a2", "acme").done()


def kept(worker, grammars):
    """Select the grammars that are cached, without using them."""
    return [grammar for grammar in grammars if grammar in worker._kept]


def test_a_tenant_with_many_large_grammars_keeps_only_its_share(worker, work):
    work.may_begin.set()
    small, large = ["b", "c"], [f"a{i:02}".ljust(100_000) for i in range(64)]
    for grammar in (small[0], *large, small[1]):
        worker.result(grammar, grammar[0]).result(20)
    assert kept(worker, [*small, *large]) == [*small, *large[-3:]]  # of 8.6 MB each, in 32 MiB
    work.done.clear()
    assert worker.result(large[-3], "d").done()
    worker.result("a".ljust(100_000), "a").result(20)
    assert kept(worker, large) == [large[-3], large[-1]]  # the last used stay


def test_over_the_bound_the_tenant_with_most_memory_loses_its_oldest_result(worker, work):
    work.may_begin.set()
    grammars = [f"{tenant}{i}".ljust(120_000) for tenant in "abcd" for i in range(3)]
    others = [f"{tenant}0".ljust(120_000) for tenant in "efg"]
    for grammar in (*grammars, *others):
        worker.result(grammar, grammar[0]).result(20)
    assert sum(work.bytes for work in worker._kept.values()) <= grammar_worker._KEPT_BYTES
    gone = {grammars[0], grammars[3]}  # the oldest of a, then of b: 13 of 10 MB each are kept
    assert set(kept(worker, [*grammars, *others])) == {*grammars, *others} - gone


def test_a_result_unused_for_a_minute_is_dropped(worker, work, monkeypatch):
    monkeypatch.setattr(grammar_worker, "_UNUSED_S", 0.5)
    work.may_begin.set()
    for grammar in ("used", "unused"):
        worker.result(grammar, "acme").result(20)
    until_s = time.monotonic() + 20
    while "unused" in worker._kept and time.monotonic() < until_s:
        assert worker.result("used", "acme").done()
        time.sleep(0.05)
    assert kept(worker, ["used", "unused"]) == ["used"]


def test_a_tenant_whose_requests_hold_too_much_compiled_is_refused(worker, work):
    work.may_begin.set()
    held = [worker.result(f"a{i}".ljust(100_000), "acme") for i in range(31)]  # of 8.6 MB each
    with pytest.raises(EngineOverloaded, match="schemas in use take 254 MiB") as refused:
        worker.result("more".ljust(100_000), "acme")
    assert refused.value.code == "rate_limit_exceeded"
    assert held[-1].result(20)
    worker.result("b".ljust(100_000), "globex").result(20)
    held.clear()
    gc.collect()
    worker.result("a".ljust(100_000), "acme").result(20)


def test_a_grammar_that_raised_is_tried_again(worker, work):
    work.may_begin.set()
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            worker.result("bad", "acme").result(20)
    assert work.done == ["bad", "bad"]


def test_closing_fails_all_waiting_grammars(worker, work):
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
