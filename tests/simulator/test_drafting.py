"""Predicted gains of drafts, compared with the engine's scheduler over steps of predicted time."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from loadtest.engine.speculation import text
from lorikeet.simulator.drafting import Drafting
from lorikeet_engine.costs import DRAFT_GAP_S, StepCosts
from lorikeet_engine.request import DraftSource
from lorikeet_engine.scheduling.draft_budget import DraftBudget
from tests.engine.scheduler_harness import FixedBudget, SchedulerHarness

COSTS = StepCosts()
PROMPT, ANSWER = 512, 400
PREDICTORS = {"mtp": DraftSource.MTP, "draft": DraftSource.DRAFT}


def scheduled_per_s(drafting, decodes):
    """Return the tokens per second that each decode gets from the engine's scheduler, until the
    first answer ends, in steps that take the time that the costs predict.
    """
    random = np.random.default_rng(7)
    harness = SchedulerHarness(tokens=2048, sequences=COSTS.max_running, pages=80_000)
    budget = DraftBudget(COSTS, predictor=PREDICTORS.get(drafting.source), vocabulary=9)
    budget.adapter = SimpleNamespace(rank=64) if drafting.source == "draft" else None
    harness.scheduler._drafts = budget
    copied = drafting.found if drafting.source == "lookup" else 0.0
    prompts = random.integers(0, 128_256, (decodes, PROMPT)).tolist()
    texts = {
        harness.add(prompt, max_tokens=ANSWER): text(tuple(prompt), ANSWER + 32, copied, at)
        for at, prompt in enumerate(prompts)
    }
    host_s = device_s = begin_s = 0.0
    made, flight = -1, []
    while not harness.finished:
        plan = harness.scheduler.plan(FixedBudget(math.inf))
        before, flight = flight, plan.chunks
        if before and (made < 0) and all(s.decodes for s in texts):
            made, begin_s = 0, host_s
        harness.scheduler.launched(flight, {})
        rows = sum(chunk.length + len(chunk.noise) for chunk in flight)
        context = sum(chunk.start for chunk in flight)
        seen = sum((len(c.drafted) + len(c.noise)) * c.start for c in flight)
        if flight:
            noise_s = COSTS.lora_s + 64 * COSTS.rank_s if plan.draft else 0.0
            step_s = noise_s + COSTS.step_s(rows, 0, context, seen=seen)
            device_s = max(device_s, host_s + DRAFT_GAP_S) + step_s
            flight = [(chunk, device_s, plan.predicts) for chunk in flight]
        for chunk, read_s, predicts in before:
            host_s = max(host_s, read_s)
            sequence, answer = chunk.sequence, texts[chunk.sequence]
            if not chunk.completes:
                harness.scheduler.written(chunk)
                continue
            at = len(sequence.tokens) - PROMPT
            pairs = zip(chunk.drafted, answer[at:], strict=False)
            accepted = next((i for i, (a, b) in enumerate(pairs) if a != b), len(chunk.drafted))
            if chunk.drafted:
                chunk = harness.scheduler.verified(chunk, accepted, ())
            harness.scheduler.written(chunk)
            count = len(chunk.noise) if plan.draft or chunk.noise else int(predicts)
            true = random.geometric(1 - drafting.acceptance) - 1
            said = answer[at + accepted + 1 :][:count]
            said[true:] = [-7] * len(said[true:])
            if made >= 0:
                made += 1 + accepted
            if sequence.accept(answer[at + accepted], tuple(said)) is not None:
                harness.finished[sequence] = ()
    return made / decodes / (host_s - begin_s)


@pytest.mark.parametrize(
    ("drafting", "decodes", "within"),
    [
        (Drafting("lookup", 27 / 28), 1, 0.15),
        (Drafting("lookup", 27 / 28), 16, 0.1),
        (Drafting("mtp", 0.8), 1, 0.05),
        (Drafting("mtp", 0.8), 32, 0.05),
        (Drafting("draft", 0.75), 1, 0.15),
        (Drafting("draft", 0.75), 16, 0.05),
    ],
)
def test_the_gain_is_that_of_the_engine_s_scheduler(drafting, decodes, within):
    context = decodes * (PROMPT + ANSWER / 2)
    expected = drafting.per_s(COSTS, decodes, 0, context)
    found = scheduled_per_s(drafting, decodes)
    assert found == pytest.approx(expected, rel=within)


@pytest.mark.parametrize("source", ["lookup", "mtp", "draft"])
def test_a_full_batch_gains_nothing_by_drafts(source):
    for decodes in (200, 256):
        plain_s = COSTS.step_s(decodes, 0, 300 * decodes)
        assert Drafting(source, 0.9).per_s(COSTS, decodes, 0, 300 * decodes) == 1 / plain_s
