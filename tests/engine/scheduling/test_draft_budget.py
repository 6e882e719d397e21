"""Drafts are made only where the costs of steps say that they gain, and take little from others."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lorikeet_engine.costs import MOST_DRAFTED, MOST_NOISE, StepCosts
from lorikeet_engine.request import DraftSource, SchedulingParams
from lorikeet_engine.scheduling import draft_budget
from lorikeet_engine.scheduling.draft_budget import DraftBudget, Drafts
from lorikeet_engine.scheduling.forced_budget import ForcedPieces
from lorikeet_engine.scheduling.step_budget import PromptBudget, StepBudget
from tests.engine.scheduler_harness import FixedBudget, SchedulerHarness

COSTS = StepCosts()  # of Llama-3.1-8B on an H200
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)


class Predicting:
    """Decoding sequence with predictions that come true with a probability."""

    def __init__(
        self, acceptance, *, pending=0, left=100, stop_ids=(), length=512, forced=(), mtp=0.0
    ):
        self.lookup = SimpleNamespace(
            acceptance=acceptance,
            first_acceptance=acceptance,
            predictor_acceptance=mtp,
            predicted=(7,),
            source=DraftSource.LOOKUP,
            predict=lambda most, _pause: list(range(100, 100 + most)),
        )
        self.output_length, self.length, self.background = 5, length, False
        self.forced, self.decode_tokens = forced, 1 + len(forced)
        self.max_tokens, self.stop_ids = 5 + left, stop_ids
        self.pending_rows, self.decodes = [0] * pending, True


def drafted(*sequences, room=256, alone=True, **settings):
    """Return the number of drafted tokens of each sequence."""
    budget = DraftBudget(COSTS, SIZES, **settings)
    drafts = budget.choose(list(sequences), room, alone=alone)
    return [len(drafts.tokens.get(sequence, ())) for sequence in sequences]


def test_one_sequence_drafts_all_it_can_if_it_mostly_comes_true():
    assert drafted(Predicting(0.9)) == [MOST_DRAFTED]
    assert drafted(Predicting(0.95, pending=1)) == [MOST_DRAFTED]


@pytest.mark.parametrize("alone", [True, False])
def test_poor_predictions_are_not_drafted(alone):
    assert drafted(Predicting(0.2), alone=alone) == [0]
    assert drafted(*(Predicting(0.2) for _ in range(32)), alone=alone) == [0] * 32


def test_beside_others_more_than_a_token_must_come_true():
    others = [Predicting(0.0) for _ in range(7)]
    assert drafted(Predicting(0.6), *others, alone=True)[0] == 0  # 0.6 + 0.36 + … < 1.5
    assert drafted(Predicting(0.95), *others, alone=True) == [MOST_DRAFTED] + [0] * 7


def test_drafts_lengthen_the_steps_of_others_up_to_the_goal():
    drafting = [Predicting(0.99, length=64) for _ in range(12)]
    others = [Predicting(0.0, length=64) for _ in range(12)]
    goal_s = 1.04 * COSTS.step_s(24, 0, 24 * 64)
    found = sum(drafted(*others, *drafting, goal_s=goal_s))
    size = next(size for size in SIZES if size >= 24 + found)
    assert COSTS.step_s(size, 0, 24 * 64, seen=found * 64) <= goal_s
    assert 0 < found < sum(drafted(*others, *drafting))


def test_the_likeliest_tokens_are_drafted_first():
    often, seldom = Predicting(0.9), Predicting(0.5)
    many, few = drafted(often, seldom, room=4)
    assert many > few


def test_the_room_bounds_drafts():
    assert sum(drafted(*(Predicting(0.9) for _ in range(4)), room=5)) <= 5
    assert drafted(Predicting(0.9), room=0) == [0]


def test_a_batch_so_large_that_rows_cost_time_has_no_drafts():
    assert not any(drafted(*(Predicting(0.6) for _ in range(256)), room=256))


def test_no_step_exceeds_the_goal():
    assert drafted(Predicting(0.9), goal_s=4e-3) == [0]
    assert drafted(Predicting(0.9), goal_s=5e-3) == [MOST_DRAFTED]


def test_a_draft_ends_before_the_last_token_and_before_a_stop_id():
    assert drafted(Predicting(0.95, left=4)) == [3]
    assert drafted(Predicting(0.95, left=1)) == [0]
    assert drafted(Predicting(0.95, stop_ids=(103,))) == [3]
    assert drafted(Predicting(0.95, pending=1, stop_ids=(103,))) == [2]


def test_the_token_that_is_not_read_yet_is_not_drafted():
    budget, sequence = DraftBudget(COSTS, SIZES), Predicting(0.95, pending=1)
    (tokens,) = budget.choose([sequence], 256, alone=True).tokens.values()
    assert tokens == tuple(range(101, 101 + len(tokens)))


def test_a_draft_follows_the_forced_tokens_if_they_were_predicted():
    budget, right = DraftBudget(COSTS, SIZES), Predicting(0.95, pending=1, forced=(101, 102))
    (tokens,) = budget.choose([right], 256, alone=True).tokens.values()
    assert tokens == tuple(range(103, 103 + len(tokens)))
    assert drafted(Predicting(0.95, pending=1, forced=(101, 7))) == [0]


def test_a_model_with_delta_nets_drafts_only_what_is_worth_two_steps_in_pieces():
    pieces = ForcedPieces((16, 32, 64), sequences=8)
    assert drafted(Predicting(0.95), pieces=pieces) == [MOST_DRAFTED]
    assert drafted(Predicting(0.5)) != [0] == drafted(Predicting(0.5), pieces=pieces)
    assert not any(drafted(*(Predicting(0.95) for _ in range(9)), pieces=pieces))


def test_sequences_in_the_background_have_no_draft():
    background = Predicting(0.95)
    background.background = True
    assert drafted(background) == [0]


def with_head(*sequences, alone=True, **settings):
    """Return a budget whose model has an MTP head, which predicted in the last step, and its choice
    for these sequences.
    """
    budget = DraftBudget(COSTS, SIZES, predictor=DraftSource.MTP, **settings)
    chunks = [SimpleNamespace(sequence=sequence) for sequence in sequences]
    budget.predicts(chunks, 256, alone=True)
    return budget, budget.choose(list(sequences), 256, alone=alone)


@pytest.mark.parametrize("count", [1, 32])
def test_sequences_pause_until_the_head_s_token_is_read_and_then_draft_together(count):
    pending = [Predicting(0.0, pending=1, mtp=0.8) for _ in range(count)]
    assert with_head(*pending)[1] == Drafts({}, holds=True)
    read = [Predicting(0.0, mtp=0.8) for _ in range(count)]
    drafts = with_head(*read)[1]
    assert drafts == Drafts(dict.fromkeys(read, (7,)), holds=True)
    assert {sequence.drafted_from for sequence in read} == {DraftSource.MTP}


def test_a_sequence_without_a_draft_keeps_no_other_from_drafting():
    ends, goes_on = Predicting(0.0, mtp=0.8, left=1), Predicting(0.0, mtp=0.9)
    stops = Predicting(0.0, mtp=0.9, stop_ids=(7,))
    assert with_head(ends, stops, goes_on)[1].tokens == {}  # of three, one gains too little
    more = [Predicting(0.0, mtp=0.9) for _ in range(6)]
    assert {*with_head(ends, stops, *more)[1].tokens} == {*more}


def test_the_head_drafts_only_where_all_sequences_wait_for_it():
    assert with_head(Predicting(0.0, pending=1, mtp=0.9), alone=False)[1] == Drafts({})
    assert with_head(Predicting(0.0, mtp=0.9), alone=False)[1] == Drafts({})


def test_the_source_of_which_more_tokens_come_true_drafts():
    often, seldom = Predicting(0.9, mtp=0.9), Predicting(0.3, mtp=0.9)
    assert len(with_head(often)[1].tokens[often]) == MOST_DRAFTED
    assert with_head(seldom)[1].tokens == {seldom: (7,)}


def test_a_head_that_is_seldom_right_is_asked_seldom():
    poor = Predicting(0.0, pending=1, mtp=0.2)
    budget, drafts = with_head(poor)
    assert drafts == Drafts({})
    chunks = [SimpleNamespace(sequence=poor)]
    asked = [budget.predicts(chunks, 256, alone=True) for _ in range(9)]
    assert asked == [[]] * 8 + [[1]]


def noise(*sequences, room=None, rank=64, drafted=(), **settings):
    """Return the number of noise tokens behind each sequence, and the budget that chose it."""
    budget = DraftBudget(COSTS, SIZES, predictor=DraftSource.DRAFT, vocabulary=100, **settings)
    budget.adapter = SimpleNamespace(rank=rank)
    chunks = [
        SimpleNamespace(sequence=each, length=1 + len(drafted), drafted=drafted)
        for each in sequences
    ]
    room = 256 - len(chunks) if room is None else room
    return budget.predicts(chunks, room, alone=True), budget


def test_noise_stands_where_its_predictions_pay_for_both_steps():
    one, few = Predicting(0.0, mtp=0.8), [Predicting(0.0, mtp=0.8) for _ in range(32)]
    assert noise(one)[0] == [MOST_NOISE]
    counts, budget = noise(*few)
    assert counts == counts[:1] * 32
    assert 1 < counts[0] <= 7  # 32 · (1 + 7) are 256
    assert noise(*(Predicting(0.0, mtp=0.8) for _ in range(200)))[0] == []
    assert noise(Predicting(0.0, mtp=0.8, left=4))[0] == [2]
    tokens = budget.noise(1000)
    assert {*tokens} == {*range(100)}


def test_a_draft_lora_that_is_seldom_right_is_tried_with_one_token_and_seldom():
    poor = Predicting(0.0, pending=1, mtp=0.2)
    counts, budget = noise(poor)
    assert counts == [1]
    assert budget.choose([poor], 255, alone=True) == Drafts({})
    chunks = [SimpleNamespace(sequence=poor, length=1, drafted=())]
    asked = [budget.predicts(chunks, 255, alone=True) for _ in range(33)]
    assert asked == [[]] * 32 + [[1]]


def test_noise_behind_drafted_tokens_is_left_out_where_it_costs_time():
    assert noise(Predicting(0.0, mtp=0.9), drafted=(5, 6))[0] == [MOST_NOISE]
    many = [Predicting(0.0, mtp=0.9) for _ in range(24)]
    assert noise(*many, drafted=(5, 6, 7))[0] == []


def test_steps_with_noise_keep_the_goal():
    one = Predicting(0.0, mtp=0.9, length=16)

    def goal_s(tokens, noise):
        step_s = COSTS.step_s(tokens, 0, one.length, seen=noise * one.length)
        return (step_s + COSTS.lora_s + 64 * COSTS.rank_s) * (1 + 1e-9)

    assert noise(one, goal_s=goal_s(4, 3))[0] == [3]
    assert noise(one, goal_s=goal_s(1, 0))[0] == []
    behind = tuple(range(10))  # drafted tokens: with 8 of noise, the step is padded to 24
    assert noise(one, drafted=behind)[0] == [MOST_NOISE]
    counts, budget = noise(one, drafted=behind, goal_s=goal_s(16, 8))
    assert counts == []
    one.pending_rows = [0]
    assert budget.choose([one], 255, alone=True) == Drafts({})  # and nothing awaits predictions


def test_steps_whose_predictions_cannot_pay_are_spared_them():
    def predicts(*sequences, alone=True, head_s=0.0):
        budget = DraftBudget(replace(COSTS, head_s=head_s), SIZES, predictor=DraftSource.MTP)
        chunks = [SimpleNamespace(sequence=each) for each in sequences]
        return budget.predicts(chunks, 256 - len(chunks), alone=alone)

    assert predicts(*(Predicting(0.0) for _ in range(32)))
    assert not predicts(Predicting(0.0), head_s=4e-3)
    assert not predicts(Predicting(0.0), alone=False)
    assert not predicts(*(Predicting(0.0) for _ in range(256)))
    prefilling = Predicting(0.0)
    prefilling.decodes = False
    assert not predicts(Predicting(0.0), prefilling)


@pytest.mark.parametrize(
    ("lacks", "predicts"),
    [("adapter", True), ("pages", True), ("foreground", True), ("step", False)],
)
def test_the_head_predicts_unless_a_waiting_request_needs_the_step(lacks, predicts, monkeypatch):
    monkeypatch.setitem(draft_budget._PAUSES, DraftSource.MTP, 0)
    harness = SchedulerHarness(pages=20 if lacks == "pages" else 100)
    harness.scheduler._drafts = DraftBudget(COSTS, predictor=DraftSource.MTP)
    harness.add(3, max_tokens=40)
    harness.step()
    if lacks == "adapter":
        harness.tiers.remote.add("a")
        late = harness.add(9, adapter="a")
    elif lacks == "foreground":
        monkeypatch.setattr(StepBudget, "background_tokens", lambda *_: 0)
        late = harness.add(9, scheduling=SchedulingParams("acme", background=True))
    else:
        if lacks == "step":
            monkeypatch.setattr(PromptBudget, "__bool__", lambda _: False)
        late = harness.add(76)
    asked = []
    for _ in range(3):
        asked.append(harness.scheduler.plan(FixedBudget(math.inf)))
        harness.scheduler.launched(asked[-1].chunks, {})
        harness.read(asked[-1].chunks)
    assert late.kv.computed == 0
    assert [plan.predicts for plan in asked] == [predicts] * 3
