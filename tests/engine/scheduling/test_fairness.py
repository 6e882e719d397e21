"""Fairness between tenants: service, charges, preemption, and no starvation."""

import itertools
from statistics import quantiles

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet_engine.request import SchedulingParams
from lorikeet_engine.scheduling.admission import MAX_OVERTAKES
from lorikeet_engine.scheduling.fairness import OUTPUT_TOKEN, PROMPT_TOKEN, VirtualCounters
from lorikeet_engine.scheduling.sequence import SequenceStatus
from tests.engine.scheduler_harness import COSTS, PAGE, SchedulerHarness

A, B = SchedulingParams("a"), SchedulingParams("b")


def bound(harness, longest, weight=1.0):
    """Return the paper's bound on the difference in service of two tenants that always wait."""
    batch = harness.cache.pages * PAGE
    return 2 * max(PROMPT_TOKEN * longest, OUTPUT_TOKEN * batch) / weight


def keep_waiting(harness, scheduling, count, **request):
    """Add requests until `count` of the tenant's wait."""
    waiting = sum(s.request.scheduling == scheduling for s in harness.scheduler.waiting)
    for _ in range(count - waiting):
        harness.add(**{"prompt": 6, "max_tokens": 8, **request}, scheduling=scheduling)


def spread(differences):
    """Return the largest change of a difference over any span of time."""
    return max(differences) - min(differences)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pages", [100, 12])
def test_two_tenants_that_always_wait_get_equal_service_for_any_requests(overlap, pages):
    harness, ahead = SchedulerHarness(tokens=24, sequences=6, pages=pages, overlap=overlap), []
    for _ in range(600):
        keep_waiting(harness, A, 40)
        keep_waiting(harness, B, 8, prompt=17, max_tokens=3)
        harness.step()
        ahead.append(harness.served["a"] - harness.served["b"])
    assert spread(ahead) <= bound(harness, longest=17)
    assert harness.served.total() > 5 * bound(harness, longest=17), "else this would prove nothing"


def steps_to_first_tokens(noisy_streams):
    """Return a tenant's steps to first tokens: 8 streams, beside a tenant with noisy_streams."""
    harness = SchedulerHarness(tokens=64, sequences=16, pages=400)
    took, streams = [], {A: 8, B: noisy_streams}
    since = {}  # request under way → the step in which it came
    for _ in range(1500):
        for scheduling, most in streams.items():
            for _ in range(most - sum(s.request.scheduling == scheduling for s in since)):
                new = harness.add(30 + harness.arrivals % 7, max_tokens=4, scheduling=scheduling)
                since[new] = harness.steps
        harness.step()
        took += [
            harness.steps - since[s]
            for s in since
            if s.output_length == 1 and s.request.scheduling == A
        ]
        since = {s: step for s, step in since.items() if s.status is not SequenceStatus.FINISHED}
    return took


def test_a_tenant_with_ten_times_the_clients_delays_others_first_tokens_little():
    alike, one_noisy = steps_to_first_tokens(8), steps_to_first_tokens(80)
    assert quantiles(one_noisy, n=100)[98] < 1.25 * quantiles(alike, n=100)[98]
    assert len(one_noisy) > 0.8 * len(alike)


def test_weights_share_in_proportion():
    harness = SchedulerHarness(tokens=24, sequences=6)
    light, heavy = SchedulingParams("light", weight=1.0), SchedulingParams("heavy", weight=3.0)
    for _ in range(2000):
        keep_waiting(harness, light, 10)
        keep_waiting(harness, heavy, 10, prompt=11)
        harness.step()
    assert harness.served["heavy"] / harness.served["light"] == pytest.approx(3.0, rel=0.03)


def test_absence_earns_no_credit():
    harness, ahead = SchedulerHarness(tokens=24, sequences=6), []
    for step in range(900):
        keep_waiting(harness, A, 10)
        if step >= 300:
            keep_waiting(harness, B, 10)
            ahead.append(harness.served["a"] - harness.served["b"])
        harness.step()
    assert harness.served["a"] > 3 * bound(harness, longest=6)
    assert spread(ahead) <= bound(harness, longest=6)


def test_waiting_for_an_adapter_earns_no_credit():
    harness, ahead = SchedulerHarness(tokens=24, sequences=6), []
    harness.tiers.remote = {"slow"}
    for step in range(900):
        keep_waiting(harness, A, 10)
        keep_waiting(harness, B, 10, adapter="slow")
        if step == 300:
            harness.tiers.remote = set()
        harness.step()
        if step > 300:
            ahead.append(harness.served["a"] - harness.served["b"])
    assert spread(ahead) <= bound(harness, longest=6)
    assert harness.served["b"] > bound(harness, longest=6)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_the_fairness_bound_holds_for_random_traffic(data):
    """Hold the bound for any two tenants, for as long as both wait."""
    integers = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    sequences = integers(1, 5)
    harness = SchedulerHarness(
        tokens=sequences + integers(0, 12),
        sequences=sequences,
        pages=12,
        overlap=data.draw(st.booleans()),
    )
    tenants = [
        SchedulingParams(name, data.draw(st.sampled_from([1.0, 1.0, 2.0, 5.0]))) for name in "abc"
    ]
    limit, added = bound(harness, longest=30), []
    spans = {}  # pair of tenants → lead of the first over time, while both wait
    for _ in range(integers(5, 25)):
        for _ in range(integers(0, 8)):
            scheduling = data.draw(st.sampled_from(tenants))
            added.append(harness.add(integers(1, 30), None, integers(1, 17), scheduling=scheduling))
        if added and integers(0, 4) == 0:
            harness.scheduler.drop({data.draw(st.sampled_from(added))}.__contains__)
        for _ in range(integers(1, 9)):
            before = {s.request.scheduling for s in harness.scheduler.waiting}
            harness.step()
            waiting = before & {s.request.scheduling for s in harness.scheduler.waiting}
            for one in tenants:
                for other in tenants:
                    span = spans.setdefault((one.tenant, other.tenant), [])
                    if not {one, other} <= waiting:
                        span.clear()
                    shares = [harness.served[t.tenant] / t.weight for t in (one, other)]
                    span.append(shares[0] - shares[1])
                    assert spread(span) <= limit
    harness.run()


def test_a_tenant_that_finds_an_empty_queue_starts_at_the_level_of_the_last_one():
    counters = VirtualCounters()
    busy, comer = counters.open_sequence("busy", 1.0), counters.open_sequence("comer", 1.0)
    counters.start_waiting(busy)
    busy.charge(500)
    counters.stop_waiting(busy)
    busy.charge(20)  # the request goes on to run
    counters.start_waiting(comer)
    assert comer.value == 520


def test_a_cold_load_is_charged_to_the_tenant_that_asked_for_it():
    """Each request of one tenant needs a load; the other sends as many tokens without loads."""
    harness, ahead = SchedulerHarness(tokens=24, sequences=6, adapters=100), []
    harness.tiers.takes_s, load = 10 * COSTS.prompt_token_s, 10 * PROMPT_TOKEN
    for _ in range(600):
        keep_waiting(harness, A, 8, adapter=f"a{harness.arrivals}")
        keep_waiting(harness, B, 8)
        harness.step()
        loads = len(harness.tiers.on_gpu)
        ahead.append(harness.served["a"] + load * loads - harness.served["b"])
    request = PROMPT_TOKEN * 6 + OUTPUT_TOKEN * 8
    assert spread(ahead) <= bound(harness, longest=6) + 8 * load
    ratio = harness.served["a"] / harness.served["b"]
    assert ratio == pytest.approx(request / (request + load), rel=0.1)


def test_cached_tokens_are_not_charged():
    harness = SchedulerHarness()
    first = harness.add(list(range(5 * PAGE + 1)), max_tokens=1, scheduling=A)
    harness.run()
    again = harness.add(list(range(5 * PAGE + 1)), max_tokens=1, scheduling=A)
    harness.run()
    assert again.cost.counter is first.cost.counter
    assert again.timings.cached_tokens == 5 * PAGE
    whole = PROMPT_TOKEN * (5 * PAGE + 1) + OUTPUT_TOKEN
    assert first.cost.counter.value == whole + PROMPT_TOKEN + OUTPUT_TOKEN


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_computed_again_after_a_preemption_are_not_charged(overlap):
    harness = SchedulerHarness(pages=7, overlap=overlap)
    made = [harness.add(9, max_tokens=16, scheduling=A) for _ in range(5)]
    harness.run()
    assert any(sequence.timings.preemptions for sequence in made)
    assert made[0].cost.counter.value == 5 * (9 * PROMPT_TOKEN + 16 * OUTPUT_TOKEN)


def test_tokens_of_an_aborted_request_are_charged():
    harness = SchedulerHarness()
    doomed = harness.add(5, max_tokens=50, scheduling=A)
    for _ in range(10):
        harness.step()
    harness.scheduler.drop(lambda s: s is doomed)
    assert doomed.cost.counter.value == 5 * PROMPT_TOKEN + 10 * OUTPUT_TOKEN


def test_within_a_tenant_the_higher_priority_goes_first_then_the_older():
    harness = SchedulerHarness(sequences=1)
    priorities = {
        harness.add(3, scheduling=SchedulingParams("a", priority=p)): p for p in (0, 2, 1, 2, -1)
    }
    harness.run()
    assert [priorities[s] for s in harness.finished] == [2, 2, 1, 0, -1]
    twos = [s for s in harness.finished if priorities[s] == 2]
    assert twos == sorted(twos, key=lambda s: s.arrival)


def test_a_priority_counts_only_within_its_tenant():
    harness = SchedulerHarness(sequences=1)
    for _ in range(3):
        harness.add(3, scheduling=SchedulingParams("a", priority=9)), harness.add(3, scheduling=B)
    harness.run()
    assert [s.request.scheduling.tenant for s in harness.finished] == ["a", "b"] * 3


def test_a_long_prompt_that_runs_keeps_no_other_tenant_waiting():
    harness = SchedulerHarness(tokens=8)
    long = harness.add(60, scheduling=A)
    assert harness.step() == [(long, 8)]
    short = [harness.add(5, scheduling=B), harness.add(5, scheduling=B)]
    assert harness.step() == [(long, 8)], "which came first"
    assert harness.step() == [(short[0], 5), (short[1], 3)]
    assert harness.step() == [(short[0], 1), (long, 7)]


def test_prompts_that_run_share_the_steps_tokens():
    harness, computed = SchedulerHarness(tokens=8, pages=400), {"a": 0, "b": 0}
    for scheduling in (A, A, A, B):
        harness.add(200, scheduling=scheduling)
    for _ in range(40):
        for sequence, length in harness.step():
            computed[sequence.request.scheduling.tenant] += length
        assert abs(computed["a"] - computed["b"]) <= 2 * 8


def test_the_youngest_sequence_of_the_tenant_furthest_ahead_is_preempted():
    harness = SchedulerHarness(pages=9)
    ahead = [harness.add(7, max_tokens=14, scheduling=A) for _ in range(2)]
    harness.step()
    behind = harness.add(7, max_tokens=14, scheduling=B)
    while not any(s.timings.preemptions for s in (*ahead, behind)):
        harness.step()
    assert [s.timings.preemptions for s in (*ahead, behind)] == [0, 1, 0]
    harness.run()


def begun_after(harness, sequence):
    """Return the number of steps until a sequence begins."""
    began = harness.steps
    while sequence not in harness.scheduler.running:
        harness.step()
        assert harness.steps < began + 500, "it never begins"
    return harness.steps - began


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("room", [{"sequences": 4}, {"pages": 44}])
def test_a_tenant_that_holds_all_slots_or_pages_is_preempted_for_another(room, overlap):
    harness = SchedulerHarness(**room, overlap=overlap)
    long = [harness.add(7, max_tokens=80, scheduling=A) for _ in range(4)]
    while sum(s.output_length for s in long) < 120:
        harness.step()
    assert begun_after(harness, harness.add(7, max_tokens=4, scheduling=B)) <= 3
    assert [s.timings.preemptions for s in long[:2]] == [0, 0], "only the youngest give way"
    harness.run()
    assert all(s.output_length == 80 for s in long)


def test_a_tenant_is_preempted_while_it_holds_twice_as_much_and_without_thrashing():
    harness = SchedulerHarness(sequences=6, pages=400)
    first = [harness.add(7, max_tokens=60, scheduling=A) for _ in range(12)]
    for _ in range(10):
        harness.step()
    second = [harness.add(7, max_tokens=60, scheduling=B) for _ in range(12)]
    for _ in range(40):
        harness.step()
        assert sum(s.timings.preemptions for s in (*first, *second)) <= 2
    running = [s.request.scheduling.tenant for s in harness.scheduler.running]
    assert sorted(running) == ["a", "a", "a", "a", "b", "b"]
    harness.run()


def test_slots_are_shared_between_tenants_by_weight():
    harness, heavy = SchedulerHarness(sequences=6, pages=400), SchedulingParams("b", weight=2.0)
    for _ in range(12):
        harness.add(7, max_tokens=60, scheduling=A)
    for _ in range(10):
        harness.step()
    for _ in range(12):
        harness.add(7, max_tokens=60, scheduling=heavy)
    for _ in range(12):
        harness.step()
    running = [s.request.scheduling.tenant for s in harness.scheduler.running]
    assert sorted(running) == ["a", "a", "a", "b", "b", "b"]
    harness.run()


def test_no_sequence_is_preempted_for_a_tenant_served_more_or_for_its_own_tenant():
    harness = SchedulerHarness(sequences=4, pages=400)
    for _ in range(3):
        harness.add(40, max_tokens=90, scheduling=A)
    harness.step()
    served = harness.add(300, max_tokens=10, scheduling=B)
    while served not in harness.finished:
        harness.step()
    for scheduling in (A, B, A, B):
        harness.add(7, max_tokens=4, scheduling=scheduling)
    everyone = [*harness.scheduler.running, *harness.scheduler.waiting]
    for _ in range(8):
        harness.step()
    assert not any(s.timings.preemptions for s in everyone)
    harness.run()


def test_an_adapter_kept_out_gets_in_even_if_only_other_tenants_overtake_it():
    """Slots become free singly; on its own tenant's turns base model requests take them."""
    harness, lengths = SchedulerHarness(sequences=6, adapters=1), itertools.cycle((4, 7, 5, 9, 6))

    def begin():
        keep_waiting(harness, A, 8, prompt=3, max_tokens=next(lengths))
        keep_waiting(harness, B, 8, prompt=3, max_tokens=next(lengths), adapter="x")
        return sum(s.timings.steps == 1 and s.adapter is not None for s, _ in harness.step())

    for _ in range(60):
        begin()
    starved = harness.add(3, "c", scheduling=SchedulingParams("a", priority=1))
    begun = 0
    while starved not in harness.finished:
        begun += begin()
        assert begun < 3 * MAX_OVERTAKES
    assert begun > MAX_OVERTAKES // 2, "and until then others passed it"


def test_tenants_that_left_are_forgotten_and_gain_no_credit():
    harness, tenants = SchedulerHarness(sequences=4, tokens=16), 1500
    hog = harness.add(3, max_tokens=4, scheduling=SchedulingParams("t0"))
    for number in range(tenants):
        harness.add(3, max_tokens=1, scheduling=SchedulingParams(f"t{number}"))
        harness.step()
    counters = harness.scheduler._tenants
    assert len(counters) < tenants / 3
    harness.run()
    level = counters.level()
    back = harness.add(3, scheduling=SchedulingParams("t0"))
    assert back.cost.counter is not hog.cost.counter, "it was forgotten"
    assert back.cost.counter.value >= level >= hog.cost.counter.value
