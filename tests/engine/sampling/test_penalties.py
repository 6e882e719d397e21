"""Penalties and biases change logits as they say, for every token that was there or is sampled."""

import time

import pytest
import torch
import transformers

from lorikeet_engine.request import SamplingParams
from lorikeet_engine.sampling.draws import SamplingRow
from lorikeet_engine.sampling.penalties import Penalties
from tests.engine.sampling.draws import (
    DRAWS,
    VOCAB,
    assert_drawn,
    changed,
    logits_of,
    pool,
    reference,
    sample,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "choice",
    [
        {"frequency_penalty": 0.4},
        {"presence_penalty": 1.5},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.8},
        {"logit_bias": ((3, 2.0), (9, -1.0), (12, -100.0))},
        {"frequency_penalty": -0.2, "presence_penalty": 0.5, "temperature": 1.4, "top_k": 9},
        {"repetition_penalty": 1.2, "logit_bias": ((3, -2.0), (17, 4.0)), "top_p": 0.9},
        {
            "repetition_penalty": 1.5,
            "frequency_penalty": 0.3,
            "presence_penalty": -0.7,
            "logit_bias": ((5, 1.0), (30, 3.0)),
            "temperature": 0.8,
            "min_p": 0.02,
        },
    ],
    ids=str,
)
def test_draws_follow_the_distribution_that_penalties_and_biases_leave(choice):
    logits, params = logits_of(seed=1), SamplingParams(**choice)
    prompt, output = (3, 8, 8, 30), (5, 5, 0, 39, 5, 17, 0)
    filters = {k: v for k, v in choice.items() if k in ("temperature", "top_k", "top_p", "min_p")}
    want = reference(changed(logits[0], params, prompt, output), **filters)
    penalties = pool()
    slot = penalties.begin(params, prompt, output)
    rows = [SamplingRow(params, seed=17, step=step, slot=slot) for step in range(DRAWS)]
    assert_drawn(sample(logits.expand(DRAWS, -1), rows, penalties), want)


class TestPenalties:
    """Repetition, then logit + bias, then − count · frequency − [count > 0] · presence."""

    CHOICES = (
        {"presence_penalty": 2.0},
        {"frequency_penalty": 0.3},
        {"frequency_penalty": -2.0, "presence_penalty": 1.1},
        {"logit_bias": ((3, 100.0), (39, -7.3))},
        {"frequency_penalty": 0.7, "logit_bias": ((0, 1.7), (5, -100.0)), "temperature": 0.6},
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.7, "presence_penalty": 0.5, "logit_bias": ((8, 2.5),)},
    )
    PROMPT = (8, 21, 8, 5)
    MADE = (5, 5, 0, 39, 5, 17, 0)

    def rows(self, penalties, made=MADE, **more):
        """40 for each choice, all in its one slot."""
        rows = []
        for choice in self.CHOICES:
            params = SamplingParams(**{**choice, **more})
            slot = penalties.begin(params, self.PROMPT, made)
            rows += [SamplingRow(params, 7, step, slot=slot) for step in range(40)]
        return rows

    def by_hand(self, logits, rows, made=MADE):
        """Draw from logits that were changed without the sampler."""
        logits = torch.stack(
            [changed(x, row.params, self.PROMPT, made) for x, row in zip(logits, rows, strict=True)]
        )
        plain = [
            SamplingRow(
                SamplingParams(temperature=row.params.temperature, top_p=row.params.top_p),
                7,
                row.step,
            )
            for row in rows
        ]
        return sample(logits.float(), plain)

    @pytest.mark.parametrize("heat", [{}, {"temperature": 0.0}, {"top_p": 0.7}], ids=str)
    def test_rows_draw_as_from_logits_that_were_changed_by_hand(self, heat):
        penalties = pool()
        rows = self.rows(penalties, **heat)
        logits = logits_of(seed=11, rows=len(rows)).bfloat16()
        assert sample(logits, rows, penalties) == self.by_hand(logits, rows)

    def test_choices_of_one_request_begin_alike_despite_requests_between_them(self):
        shared = SamplingParams(repetition_penalty=1.4, logit_bias=((8, 2.5), (3, -1.0)))
        other, prompt = SamplingParams(repetition_penalty=0.7), (8, 21, 8, 5)
        penalties, logits = pool(), logits_of(seed=14, rows=5)
        asked = [(shared, prompt), (other, (1, 2)), (shared, prompt), (other, prompt)]
        slots = [penalties.begin(params, given, ()) for params, given in asked]
        resumed = penalties.begin(shared, prompt, self.MADE)
        rows = [
            SamplingRow(params, 5, step, slot=slot)
            for step, ((params, _), slot) in enumerate(zip(asked, slots, strict=True))
        ]
        rows.append(SamplingRow(shared, 5, 4, slot=resumed))
        given = [(*each, ()) for each in asked] + [(shared, prompt, self.MADE)]
        by_hand = [changed(x, *each) for x, each in zip(logits, given, strict=True)]
        want = sample(
            torch.stack(by_hand).float(), [SamplingRow(SamplingParams(), 5, n) for n in range(5)]
        )
        assert sample(logits, rows, penalties) == want

    def test_a_long_prompt_is_read_once_for_all_choices(self):
        prompt, params = tuple(range(VOCAB)) * 2000, SamplingParams(repetition_penalty=1.4)
        took_s = []
        for count in (1, 64):
            penalties = Penalties(count, VOCAB, torch.device("cpu"))
            slots = [penalties.begin(params, prompt, ()) for _ in range(count)]
            rows = [SamplingRow(params, 0, 0, slot=slot) for slot in slots]
            logits, began_s = logits_of(seed=15, rows=count), time.process_time()
            sample(logits, rows, penalties)
            took_s.append(time.process_time() - began_s)
        assert took_s[1] < 8 * took_s[0]

    def test_each_sampled_token_counts_from_the_next_step_on(self):
        penalties, params = pool(), SamplingParams(temperature=0.0, frequency_penalty=1.0)
        slots = [penalties.begin(params, (), ()) for _ in range(3)]
        logits, made = logits_of(seed=12, rows=3), [[], [], []]
        for step in range(30):
            want = [
                int(changed(x, params, (), said).argmax())
                for x, said in zip(logits, made, strict=True)
            ]
            rows = [SamplingRow(params, 0, step, slot=slot) for slot in slots]
            assert sample(logits, rows, penalties) == want
            for said, token in zip(made, want, strict=True):
                said.append(token)
        assert all(len(set(said)) > 1 for said in made)

    def test_tokens_that_are_there_already_count_as_if_they_had_been_sampled(self):
        logits, params = logits_of(seed=12), SamplingParams(frequency_penalty=0.9)
        penalties, said = pool(), []
        slot = penalties.begin(params, self.PROMPT, ())
        for step in range(20):
            said += sample(logits, [SamplingRow(params, 3, step, slot=slot)], penalties)
            again = penalties.begin(params, self.PROMPT, said[:-1])
            row = SamplingRow(params, 3, step, slot=again)
            assert sample(logits, [row], penalties) == said[-1:]
            again.release()

    def test_a_slot_keeps_no_counts_of_its_last_owner(self):
        penalties = Penalties(len(self.CHOICES), VOCAB, torch.device("cpu"))
        rows = self.rows(penalties, made=tuple(range(VOCAB)))
        logits = logits_of(seed=13, rows=len(rows))
        sample(logits, rows, penalties)
        assert penalties.free == 0
        for _ in range(2):  # the second owners are never filled
            for slot in {row.slot for row in rows}:
                slot.release()
                slot.release()
            assert penalties.free == len(self.CHOICES)
            rows = self.rows(penalties)
        assert sample(logits, rows, penalties) == self.by_hand(logits, rows)

    def test_a_row_without_a_token_counts_none(self):
        penalties, params = pool(), SamplingParams(temperature=0.0, presence_penalty=2.0)
        slot = penalties.begin(params, (), ())
        logits = torch.zeros(1, VOCAB)
        logits[0, 0] = 1.0  # the token that a clamped id would be
        at = torch.tensor([slot.index])
        penalties.change(logits, torch.tensor([0]), at)  # fills the slot
        penalties.count(at, torch.tensor([-1]))
        assert torch.equal(penalties.change(logits, torch.tensor([0]), at), logits)

    def test_plain_rows_beside_them_draw_the_same_tokens_as_alone(self):
        penalties = pool()
        penalised = self.rows(penalties)
        logits = logits_of(seed=13, rows=200 + len(penalised)).bfloat16()
        ways = ({}, {"top_p": 0.8}, {"temperature": 0.0})
        plain = [SamplingRow(SamplingParams(**ways[i % 3]), 3, i) for i in range(200)]
        drawn = sample(logits, [*plain, *penalised], penalties)
        assert drawn[:200] == sample(logits[:200], plain)

    def test_no_bias_revives_a_banned_token(self):
        params, penalties = SamplingParams(logit_bias=((4, 100.0),)), pool()
        slot = penalties.begin(params, (), ())
        rows = [SamplingRow(params, 1, step, (4,), slot) for step in range(200)]
        assert 4 not in sample(logits_of(seed=14).expand(200, -1), rows, penalties)

    @pytest.mark.parametrize("penalty", [1.0, 1.3, 0.6, 2.0])
    def test_the_repetition_penalty_is_that_of_transformers(self, penalty):
        params = SamplingParams(temperature=0.0, repetition_penalty=penalty, presence_penalty=1e-9)
        logits, penalties = logits_of(seed=16, rows=30, spread=0.3), pool()
        slots = [penalties.begin(params, self.PROMPT, self.MADE) for _ in range(30)]
        seen = torch.tensor([*self.PROMPT, *self.MADE]).expand(30, -1)
        want = transformers.RepetitionPenaltyLogitsProcessor(penalty)(seen, logits.clone())
        rows, at = torch.arange(30), torch.tensor([slot.index for slot in slots])
        torch.testing.assert_close(penalties.change(logits, rows, at), want)
