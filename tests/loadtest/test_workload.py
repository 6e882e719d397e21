"""Plan of a load test, its prompts and its report."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from loadtest.report import Report
from loadtest.streamed_answer import LoadRequest, StreamedAnswer
from loadtest.workload import BadOption, Prompts, Workload, targets_of

TARGETS = targets_of(
    {
        "acme": {"tiny": None, "acme/a": "tiny", "shared/s": "tiny"},
        "bolt": {"tiny": None, "bolt/c": "tiny", "shared/s": "tiny"},
    }
)


def test_targets_are_models_with_the_tenants_that_may_use_them() -> None:
    found = {target.model: (target.tenants, target.is_base) for target in TARGETS}
    assert found == {
        "acme/a": (("acme",), False),
        "bolt/c": (("bolt",), False),
        "shared/s": (("acme", "bolt"), False),
        "tiny": (("acme", "bolt"), True),
    }


def test_a_plan_has_the_rate_and_only_tenants_with_access() -> None:
    plan = Workload(rate=50, duration=60, popularity="uniform", base_share=0.2).plan(TARGETS)
    assert len(plan) == pytest.approx(3000, rel=0.1)
    times_s = [ask.at_s for ask in plan]
    assert times_s == sorted(times_s)
    counts = Counter(ask.model for ask in plan)
    assert counts["tiny"] / len(plan) == pytest.approx(0.2, abs=0.03)
    assert counts["acme/a"] / len(plan) == pytest.approx(0.8 / 3, abs=0.03)
    allowed = {target.model: target.tenants for target in TARGETS}
    assert all(ask.tenant in allowed[ask.model] for ask in plan)


def test_equal_seeds_give_equal_plans() -> None:
    workload = Workload(seed=4)
    assert workload.plan(TARGETS) == workload.plan(TARGETS)
    assert workload.plan(TARGETS) != replace(workload, seed=5).plan(TARGETS)


@pytest.mark.parametrize("name", ["conv", "code"])
def test_a_trace_keeps_its_bursts_and_lengths(name: str) -> None:
    workload = Workload(arrivals=f"trace:{name}", lengths="trace", rate=20, duration=100)
    plan = workload.plan(TARGETS)
    assert plan[0].at_s == 0
    assert plan[-1].at_s < 100
    assert len(plan) > 500
    assert all(ask.input_tokens + ask.output_tokens <= workload.context for ask in plan)


def test_gamma_arrivals_come_in_bursts() -> None:
    plan = Workload(arrivals="gamma:4", rate=50, duration=100).plan(TARGETS)
    gaps = np.diff([ask.at_s for ask in plan])
    assert gaps.std() / gaps.mean() > 3


def test_without_adapters_all_requests_are_for_the_base_model() -> None:
    plan = Workload(base_share=0.0).plan(targets_of({"acme": {"tiny": None}}))
    assert {ask.model for ask in plan} == {"tiny"}


@pytest.mark.parametrize(
    "workload",
    [
        Workload(lengths="trace"),
        Workload(lengths="fixed:3"),
        Workload(lengths="fixed:0/4"),
        Workload(arrivals="gamma:0"),
        Workload(rate=0),
        Workload(context=1),
        Workload(base_share=1.5),
    ],
)
def test_invalid_options_are_refused(workload: Workload) -> None:
    with pytest.raises(BadOption):
        workload.plan(TARGETS)


@pytest.mark.parametrize("tokens_of", [len, lambda text: len(text.split())])
def test_prompts_are_never_longer_than_wanted(tokens_of: object) -> None:
    def count(text: str) -> int:
        return 9 + tokens_of(text)  # type: ignore[operator]

    prompts = Prompts.measure(count)
    for tokens in (40, 100, 800):
        made = count(prompts.text(tokens, random.Random(tokens)))
        assert tokens - 6 <= made <= tokens


def answer(due_s: float = 10.0, **noted: Any) -> StreamedAnswer:
    return StreamedAnswer(LoadRequest("acme/a", 5, 3, seed=0), due_s, sent_s=due_s, **noted)


def test_a_report_gives_percentiles_of_each_tier() -> None:
    report = Report()
    for index in range(101):
        first_s = 10 + index / 100
        deltas_s = [first_s, first_s + 0.5, first_s + 0.7]
        noted = {"residency": "gpu", "prompt_tokens": 5, "failure": ""}
        report.answers.append(answer(deltas_s=deltas_s, **noted))
    found = report.as_json({})
    assert found["tiers"]["gpu"]["ttft_s"] == pytest.approx({"p50": 0.5, "p90": 0.9, "p99": 0.99})
    assert found["tiers"]["gpu"]["itl_s"] == pytest.approx({"p50": 0.35, "p90": 0.5, "p99": 0.5})
    assert found["tiers"]["host"]["ttft_s"] == {"p50": None, "p90": None, "p99": None}
    assert (found["prompt_tokens"], found["completion_tokens"]) == (505, 303)
    assert report.passed


def test_a_report_passes_only_if_every_request_was_answered() -> None:
    report = Report()
    assert not report.passed
    report.answers += [answer(failure="503"), answer(), answer(deltas_s=[10.5], failure="")]
    assert not report.passed
    found = report.as_json({})
    assert found["failures"] == {"503": 1, "not answered": 1}
    assert (found["asked"], found["failed"]) == (3, 2)
