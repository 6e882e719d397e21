"""Loads of the busy-host benchmark, and its comparison with the quiet host."""

import os
from collections import Counter

import psutil
import pytest

from loadtest.bench_busy_host import HostRuns, with_other_prompts
from loadtest.client import Session
from loadtest.real_service.busy_host import HostLoad, WaitTimes, host_load
from loadtest.streamed_answer import LoadRequest, StreamedAnswer

PINNED = 1 << 20


def children() -> int:
    """Return this process's children, without multiprocessing's own."""
    names = [" ".join(child.cmdline()) for child in psutil.Process().children()]
    return sum("spawn_main" in name or "parent = os.getppid()" in name for name in names)


@pytest.mark.parametrize(
    ("kind", "spinning", "pinning"),
    [
        (HostLoad.QUIET, 0, 0),
        (HostLoad.SPINNING, 2, 0),
        (HostLoad.PINNING, 0, 1),
        (HostLoad.BOTH, 2, 1),
    ],
)
def test_a_load_runs_until_the_end_of_the_block(monkeypatch, kind, spinning, pinning):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    before = children()
    with host_load(kind, PINNED):
        assert children() - before == spinning + pinning
    assert children() == before


def test_a_load_that_cannot_start_raises():
    with pytest.raises((RuntimeError, OSError)), host_load(HostLoad.PINNING, 1 << 60):
        raise AssertionError("it began")


def answer(*deltas_s: float) -> StreamedAnswer:
    request = LoadRequest("m", 5, 3, 0)
    return StreamedAnswer(request, 0.0, sent_s=0.01, deltas_s=list(deltas_s), failure="")


def test_gaps_and_first_tokens_are_compared_with_the_quiet_host():
    quiet = HostRuns([answer(0.1, 0.11, 0.12)], 2.0, Counter(), Counter()).row(HostLoad.QUIET, None)
    runs = HostRuns([answer(0.3, 0.32, 0.34)], 2.0, Counter({"engines": 30.0}), Counter())
    row = runs.row(HostLoad.SPINNING, quiet)
    assert (quiet.first_p50_of_quiet, quiet.gap_p99_of_quiet) == (1.0, 1.0)
    assert row.first_p50_of_quiet == pytest.approx(3.0)
    assert row.gap_p99_of_quiet == pytest.approx(2.0)
    assert row.late_p99 == pytest.approx(10)
    assert row.no_core == {"engines": 15.0}


def test_each_load_gets_the_same_requests_with_prompts_of_its_own():
    sessions = [Session(1.0, (LoadRequest("m", 5, 3, seed=7),))]
    assert with_other_prompts(sessions, 0) == sessions
    assert with_other_prompts(sessions, 2) == [Session(1.0, (LoadRequest("m", 5, 3, seed=9),))]


def test_waits_for_a_core_are_reported_by_process():
    with WaitTimes() as waits:
        pass
    assert all(ms >= 0 for ms in waits.run_delays_ms.values())
