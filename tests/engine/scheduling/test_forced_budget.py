"""Tokens forced by grammars cost other requests at most a share of their time."""

import random
from collections import Counter

import pytest

from lorikeet_engine.costs import RowsTime, StepCosts
from lorikeet_engine.scheduling.forced_budget import SHARE, ForcedBudget, ForcedPieces

# 10 ms for 64 tokens, and 0.015 ms for each further one; attention costs nothing.
COSTS = StepCosts((RowsTime(64, 10.0e-3), RowsTime(1064, 25.0e-3)), 0.0, pieces_s=0.0)
SEEING = StepCosts((RowsTime(64, 10.0e-3), RowsTime(65, 10.0e-3)), 0.0, prompt_seen_s=1e-6)
SIZES = (32, 64, 96, 128, 160, 192, 224, 256)


def allowed(budget, steps, decodes=64, context=6400):
    """Return the tokens allowed in each of `steps` steps, if all of them are spent."""
    found = []
    for _ in range(steps):
        found.append(budget.tokens_allowed(decodes, context, beside_others=True))
        if found[-1]:
            budget.spend(found[-1], found[-1] * context // decodes)
    return found


def test_no_forced_tokens_are_allowed_until_a_whole_larger_size_is_affordable():
    assert allowed(ForcedBudget(128, COSTS, SIZES), 5) == [0, 32, 0, 32, 32]


def test_padding_of_a_captured_size_is_filled_in_every_step():
    assert allowed(ForcedBudget(128, COSTS, SIZES), 3, decodes=60) == [4, 36, 4]


def test_saved_time_pays_for_larger_steps():
    budget = ForcedBudget(128, COSTS, SIZES)
    for _ in range(6):
        budget.tokens_allowed(64, 6400, beside_others=True)
    assert budget.tokens_allowed(64, 6400, beside_others=True) == 128


def test_savings_lengthen_one_step_by_half_at_most():
    budget = ForcedBudget(10_000, StepCosts((RowsTime(1, 1.0), RowsTime(1001, 1001.0)), 0.0))
    for _ in range(1000):
        budget.tokens_allowed(100, 6400, beside_others=True)
    assert 30 < budget.tokens_allowed(100, 6400, beside_others=True) <= 50


def test_attention_of_forced_tokens_counts():
    few = allowed(ForcedBudget(128, SEEING), 100, context=6400)
    many = allowed(ForcedBudget(128, SEEING), 100, context=64_000)
    assert sum(few) == pytest.approx(10 * sum(many), rel=0.1)


def test_beside_no_other_requests_a_step_may_be_filled():
    budget = ForcedBudget(100, COSTS, SIZES)
    assert budget.tokens_allowed(64, 6400, beside_others=False) == 100
    assert ForcedBudget(300, COSTS, SIZES).tokens_allowed(64, 6400, beside_others=False) == 128
    assert ForcedBudget(0, COSTS, SIZES).tokens_allowed(64, 6400, beside_others=True) == 0


def test_decodes_beyond_all_captured_sizes_leave_no_forced_tokens():
    assert allowed(ForcedBudget(128, COSTS, SIZES), 50, decodes=256) == [0] * 50


@pytest.mark.parametrize("sizes", [(), SIZES])
def test_other_tenants_lose_at_most_the_share_for_any_number_of_forced_tokens(sizes):
    budget, dice, more_s, steps_s = ForcedBudget(128, COSTS, sizes), random.Random(0), 0.0, 0.0
    for _ in range(3000):
        decodes = dice.choice((33, 60, 64, 65, 96, 100))
        tokens = budget.tokens_allowed(decodes, 100 * decodes, beside_others=True)
        taken = dice.randint(0, tokens)
        size, larger = (next((s for s in sizes if s >= n), n) for n in (decodes, decodes + taken))
        steps_s += COSTS.rows_s(size)
        more_s += COSTS.rows_s(larger) - COSTS.rows_s(size)
        if taken:
            budget.spend(taken, 100 * taken)
        assert more_s <= SHARE * steps_s * (1 + 1e-9)
    assert more_s > 0.8 * SHARE * steps_s


PIECES = ForcedPieces((128, 256), sequences=32)
DEARER = StepCosts(COSTS.rows, 0.0, prompt_seen_s=0.0, pieces_s=3.2e-3)


def test_steps_in_pieces_are_filled_up_to_sizes_of_their_own_and_pay_for_leaving_one_graph():
    # 64 more rows take 0.96 ms and the pieces 3.2 ms: what is saved in 14 steps of 10 ms
    found = allowed(ForcedBudget(128, DEARER, SIZES, PIECES), 29)
    assert [step for step, tokens in enumerate(found, 1) if tokens] == [14, 28]
    assert {tokens for tokens in found if tokens} == {64}
    assert sum(allowed(ForcedBudget(128, DEARER, SIZES), 29)) > 3 * sum(found)


def test_no_step_is_divided_into_pieces_that_take_longer_than_can_be_saved():
    dear = StepCosts(COSTS.rows, 0.0, prompt_seen_s=0.0, pieces_s=4.0e-3)
    assert allowed(ForcedBudget(128, dear, SIZES, PIECES), 100) == [0] * 100
    budget = ForcedBudget(128, dear, SIZES, PIECES)
    assert budget.tokens_allowed(64, 6400, beside_others=False) == 128


def test_rows_are_rotated():
    budget, rows = ForcedBudget(128, COSTS), list("abc")
    orders = [budget.rotated(rows) for _ in range(6)]
    assert all(sorted(order) == rows for order in orders)
    assert Counter(order[0] for order in orders) == dict.fromkeys(rows, 2)
