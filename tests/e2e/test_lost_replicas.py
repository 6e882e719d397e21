"""Replicas that die or are stopped under streams with known answers: no stream shows it."""

import itertools
import os
import random
import signal
import time

import openai
import pytest
from ray import serve

from tests.e2e.conftest import REPLICAS, USAGE_FLUSH_S, Service
from tests.e2e.faulty_replica import faults
from tests.e2e.known_streams import Known, KnownStreams, has_near_tie, undisturbed
from tests.e2e.service_processes import complete, engine_processes
from tests.e2e.test_update import changed
from tests.waiting import eventually

KILL_EVERY_S = 10.0
MOST_PAUSE_S = 3.0
MOST_HUNG_PAUSE_S = 5.0
LEAVE_S = 30.0
GREEDY = {"temperature": 0.0}
WAYS = (
    GREEDY,
    {"temperature": 1.0, "seed": 5, "top_p": 0.9},
    {"temperature": 1.0, "seed": 6, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"temperature": 0.8, "seed": 7, "n": 2},
    {"temperature": 0.0, "guided_regex": "([a-z]{3,9} ){9,19}end"},
)


@pytest.fixture(scope="module")
def known(service, crowd) -> list[Known]:
    assert complete(service)
    url = f"{service.url}/v1/completions"
    targets = itertools.cycle([*crowd.adapters(5), crowd.base()])
    found: list[Known] = []
    for at, way in enumerate(WAYS * 2):
        body = {
            **way,
            "prompt": "a few words " * (1 + 7 * at),
            "max_tokens": 100,  # so that 60 streams on two cores lose at most two replicas each
            "ignore_eos": "guided_regex" not in way,
        }
        one = undisturbed(url, next(targets), **body)
        while way == GREEDY and has_near_tie(url, one):
            one = undisturbed(url, next(targets), **body)
        found.append(one)
    return found


def usage_of_crowd(service: Service) -> tuple[int, int, int]:
    """Return the requests, prompt tokens and output tokens that were counted for the tenant."""
    rows = service.admin("GET", "/usage").raise_for_status().json()["data"]
    own = [row for row in rows if row["tenant"] == "crowd"]
    names = "requests", "prompt_tokens", "output_tokens"
    requests, prompt, output = (sum(row[name] for row in own) for name in names)
    return requests, prompt, output


def assert_usage_is_exact(
    service: Service, before: tuple[int, int, int], load: KnownStreams
) -> None:
    """Compare the usage counted since with the known answers' tokens."""
    known = [(1, *seen.known.usage) for seen in load.seen]
    expected = tuple(map(sum, zip(before, *known, strict=True)))
    assert eventually(lambda: usage_of_crowd(service) == expected, 3 * USAGE_FLUSH_S + 5), (
        f"{usage_of_crowd(service)} counted, {expected} used"
    )


def settled_usage(service: Service) -> tuple[int, int, int]:
    """Return the usage that is written once all requests before were counted."""
    time.sleep(2 * USAGE_FLUSH_S + 1)
    return usage_of_crowd(service)


def p99(sorted_s: list[float]) -> float:
    return sorted_s[len(sorted_s) * 99 // 100]


@pytest.mark.parametrize(
    ("seconds", "streams"),
    [(9.0, 12), pytest.param(600.0, 60, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])],
)
def test_killed_replicas_cut_no_stream_and_change_no_token(service, known, seconds, streams):
    rng, killed = random.Random(0), 0
    assert complete(service)
    before = settled_usage(service)
    with KnownStreams(f"{service.url}/v1/completions", known, streams) as load:
        assert eventually(lambda: len(load.seen) > streams // 2, within_s=60)
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s or not load.pauses_s:  # a killed one may have no streams
            if len(service.replicas()) > 1:  # else nobody is left to go on
                engine_process, replica = rng.choice(sorted(engine_processes(service).items()))
                os.kill(rng.choice((engine_process, replica)), signal.SIGKILL)
                killed += 1
            time.sleep(KILL_EVERY_S)
    pause_s, first_s = (p99(some) for some in (load.pauses_s, load.firsts_s))
    counts = f"{killed} kills, {len(load.seen)} answers, {len(load.reasons)} moved"
    print(f"{counts}; p99 of pauses {pause_s:.2f} s, of first events {first_s:.2f} s")
    print(load.faults)
    assert killed
    assert load.wrong == []
    assert "replica_lost" in load.reasons
    assert_usage_is_exact(service, before, load)
    assert pause_s < MOST_PAUSE_S + first_s  # the prompt is computed again, as a new one is
    assert complete(service)


@pytest.mark.parametrize("hung", ["replica", "engine"])
def test_streams_leave_a_replica_that_hangs_within_seconds(service, known, hung):
    assert complete(service)
    before = settled_usage(service)
    with KnownStreams(f"{service.url}/v1/completions", known, 12) as load:
        assert eventually(lambda: len(load.seen) > 6, within_s=60)
        for engine_process, replica in engine_processes(service).items():
            stopped = replica if hung == "replica" else engine_process
            os.kill(stopped, signal.SIGSTOP)
            try:
                time.sleep(9)  # less than Serve waits for a health check
            finally:
                os.kill(stopped, signal.SIGCONT)
            if eventually(lambda: load.pauses_s, within_s=6):  # else it had no streams
                break
    print(f"{len(load.seen)} answers, {load.reasons}, pauses {load.pauses_s}")
    assert load.wrong == []
    assert set(load.reasons) == {"silent"}
    assert_usage_is_exact(service, before, load)
    assert p99(load.pauses_s) < MOST_HUNG_PAUSE_S + p99(load.firsts_s)
    assert len(service.replicas()) == REPLICAS


def test_steps_of_many_seconds_move_no_stream(service, known):
    assert complete(service)
    target = known[0].target
    body = {**GREEDY, "prompt": "a few words", "max_tokens": 3, "ignore_eos": True}
    url = f"{service.url}/v1/completions"
    quick = undisturbed(url, target, **body)
    with faults(steps="6"), KnownStreams(url, [quick], 1) as load:
        time.sleep(1)
    (slow,) = load.seen
    assert slow.first_s > 6
    assert slow.is_right, slow
    assert not slow.reasons


def test_streams_go_on_when_the_only_replicas_die(service, known):
    assert complete(service)
    with KnownStreams(f"{service.url}/v1/completions", known[:1], 2) as load:
        assert eventually(lambda: len(load.seen) > 1, within_s=60)
        for process in engine_processes(service):
            os.kill(process, signal.SIGKILL)
    assert load.wrong == []
    assert complete(service)


def test_a_request_that_ends_replicas_ends_two_and_is_refused_by_name(service, crowd):
    assert complete(service)
    before = engine_processes(service).keys()
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key=crowd.base().key, timeout=60)
    with faults(requests="exit"), pytest.raises(openai.UnprocessableEntityError) as refused:
        client.completions.create(model=crowd.base().model, prompt="a", max_tokens=4)
    assert refused.value.code == "replicas_lost"
    assert len(before & engine_processes(service).keys()) == REPLICAS - 2
    assert complete(service)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_streams_leave_replicas_that_an_update_stops(service, crowd):
    url = f"{service.url}/v1/completions"
    assert complete(service)
    long = {"temperature": 1.0, "seed": 9, "prompt": "a", "max_tokens": 900, "ignore_eos": True}
    known = [undisturbed(url, crowd.base(), **long)]
    for update in ({"max_ongoing_requests": 500}, {}):
        before = engine_processes(service).keys()
        with KnownStreams(url, known, 12) as load:
            assert eventually(lambda: any(r["running"] for r in service.replicas()), within_s=30)
            serve.run(changed(**update))
            assert eventually(lambda old=before: old.isdisjoint(engine_processes(service)), LEAVE_S)
        print(f"{len(load.seen)} answers, {load.reasons}, pauses {load.pauses_s[-9:]}")
        assert load.wrong == []
        assert set(load.reasons) == {"drained"}
        assert complete(service)
