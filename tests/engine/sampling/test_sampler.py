"""Tokens are drawn from the distribution that was asked for, and repeatably."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from lorikeet_engine.errors import InvalidRequest
from lorikeet_engine.request import SamplingParams
from lorikeet_engine.sampling.logprobs import Logprobs
from lorikeet_engine.sampling.sampler import NOT_FINITE, Sampler, SamplingRow

pytestmark = pytest.mark.usefixtures("one_thread")
VOCAB = 40
DRAWS = 100_000


def logits_of(seed, rows=1, spread=2.0):
    return spread * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def sample(logits, rows):
    return Sampler().sample(logits.clone(), rows).tolist()


def reference(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution of one row, token by token, in plain Python."""
    scaled = [x / temperature for x in logits.double().tolist()]
    weights = [torch.tensor(x - max(scaled)).exp().item() for x in scaled]
    ranking = sorted(range(len(weights)), key=lambda i: -weights[i])[: top_k or None]
    total = sum(weights[i] for i in ranking)
    kept, reached = [], 0.0
    for token in ranking:
        if reached >= top_p * total:
            break
        kept.append(token)
        reached += weights[token]
    kept = [token for token in kept if weights[token] >= min_p]  # the likeliest weighs 1
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 1.7},
        {"top_k": 5},
        {"top_k": 1},
        {"top_k": VOCAB + 1},
        {"top_p": 0.8},
        {"top_p": 0.01},
        {"top_p": 0.1},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"top_p": 0.9, "min_p": 0.02},
        {"temperature": 0.8, "top_k": 12, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(choice):
    logits = logits_of(seed=1)
    want = reference(logits[0], **choice)
    params = SamplingParams(**choice)
    rows = [SamplingRow(params, seed=17, step=step) for step in range(DRAWS)]
    counts = torch.bincount(torch.tensor(sample(logits.expand(DRAWS, -1), rows)), minlength=VOCAB)
    assert set(counts.nonzero().flatten().tolist()) <= set(want)
    chi2 = sum((counts[t].item() - DRAWS * p) ** 2 / (DRAWS * p) for t, p in want.items())
    freedom = len(want) - 1
    assert chi2 <= freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations


def test_greedy_is_the_first_of_the_largest_logits():
    logits = logits_of(seed=2, rows=3)
    logits[1, [7, 30]] = 50.0
    greedy = SamplingRow(SamplingParams(temperature=0.0), seed=0, step=0)
    want = logits.argmax(dim=-1).tolist()
    want[1] = 7
    assert sample(logits, [greedy] * 3) == want


@pytest.mark.parametrize("temperature", [1e-9, 1e-300])
def test_a_vanishing_temperature_is_greedy(temperature):
    logits = logits_of(seed=2)
    row = SamplingRow(SamplingParams(temperature=temperature), seed=0, step=0)
    assert sample(logits, [row]) == logits.argmax(dim=-1).tolist()


def test_a_long_tail_of_rare_tokens_keeps_its_share():
    logits = torch.zeros(1, 200_001)
    logits[0, 0] = 17.0  # the others have 4e-8 each, less than half a float32 step below 1
    rows = [SamplingRow(SamplingParams(), seed=4, step=step) for step in range(1000)]
    rare = sum(sample(logits, [row]) != [0] for row in rows)
    want = 1000 * 200_000 / (200_000 + math.exp(17.0))  # 8.2
    assert abs(rare - want) <= 2.5 * want**0.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "choice",
    [
        {"temperature": 0.0},
        {},
        {"top_k": 9, "top_p": 0.9},
        {"presence_penalty": 1.5, "frequency_penalty": -0.5, "logit_bias": ((3, 2.0), (9, -1.0))},
    ],
    ids=str,
)
def test_a_gpu_draws_what_the_cpu_draws(choice):
    logits = logits_of(seed=9, rows=64)
    params = SamplingParams(**choice)
    even = np.packbits(np.arange(VOCAB) % 2 == 0, bitorder="little")
    rows = [
        SamplingRow(
            params,
            seed=2,
            step=step,
            output=(4, 8, 4) if params.has_penalties else (),
            pending_row=step if params.has_penalties else None,
            allowed=even if step % 3 else None,
        )
        for step in range(64)
    ]
    previous = torch.arange(64) % VOCAB
    on_gpu = Sampler().sample(logits.cuda(), rows, previous.cuda()).tolist()
    assert on_gpu == Sampler().sample(logits.clone(), rows, previous).tolist()


@pytest.mark.parametrize("choice", [{}, {"top_p": 0.9}, {"top_k": 20}], ids=str)
def test_a_seed_draws_the_same_tokens_in_any_batch(choice):
    logits = logits_of(seed=3, rows=50)
    steps = [SamplingRow(SamplingParams(**choice), seed=5, step=step) for step in range(50)]
    alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(steps)]
    others = [{"temperature": 0.0}, {"top_p": 0.5, "top_k": 3}, {"temperature": 1.9}]
    for i, row in enumerate(steps):
        crowd = [SamplingRow(SamplingParams(**other), seed=i, step=9) for other in others]
        mixed = torch.cat((logits_of(seed=4, rows=3), logits[i : i + 1]))
        assert sample(mixed, [*crowd, row])[-1] == alone[i]
    assert sample(logits, steps) == alone


def test_seeds_and_steps_draw_differently():
    logits = torch.zeros(64, VOCAB)
    params = SamplingParams()
    by_step = sample(logits, [SamplingRow(params, seed=1, step=i) for i in range(64)])
    by_seed = sample(logits, [SamplingRow(params, seed=i, step=1) for i in range(64)])
    assert by_step != by_seed
    assert len(set(by_step)) > 20
    assert len(set(by_seed)) > 20


@pytest.mark.parametrize("seed", [-(2**63), 2**64 + 1])
def test_any_integer_is_a_seed(seed):
    assert 0 <= sample(logits_of(seed=1), [SamplingRow(SamplingParams(), seed, 0)])[0] < VOCAB


@pytest.mark.parametrize(
    "choice", [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.5}], ids=str
)
def test_banned_ids_never_come(choice):
    logits = logits_of(seed=6)
    best, second = logits[0].topk(2).indices.tolist()
    rows = [SamplingRow(SamplingParams(**choice), 1, step, banned=(best,)) for step in range(500)]
    drawn = sample(logits.expand(500, -1), rows)
    assert best not in drawn
    assert second in drawn


@pytest.mark.parametrize("choice", [{"temperature": 0.0}, {}, {"top_p": 0.9}], ids=str)
def test_a_row_draws_nothing_but_what_it_is_allowed(choice):
    even = np.packbits(np.arange(VOCAB) % 2 == 0, bitorder="little")
    params = SamplingParams(**choice)
    logits = logits_of(seed=7).expand(400, -1)
    free = [SamplingRow(params, 1, step) for step in range(200)]
    bound = [SamplingRow(params, 1, step, allowed=even) for step in range(200)]
    drawn = sample(logits, [*free, *bound])
    assert all(token % 2 == 0 for token in drawn[200:])
    assert drawn[:200] == sample(logits[:200], free)
    logits = logits.clone()
    logits[:, 1::2] = -torch.inf
    assert drawn[200:] == sample(logits[200:], free)


class TestPenalties:
    """OpenAI's: logit − count · frequency − [count > 0] · presence, and + bias."""

    CHOICES = (
        {"presence_penalty": 2.0},
        {"frequency_penalty": 0.3},
        {"frequency_penalty": -2.0, "presence_penalty": 1.1},
        {"logit_bias": ((3, 100.0), (39, -7.3))},
        {"frequency_penalty": 0.7, "logit_bias": ((0, 1.7), (5, -100.0)), "temperature": 0.6},
    )
    MADE = (5, 5, 0, 39, 5, 17, 0)

    def reference(self, logits, params, made):
        """One row's logits after biases and penalties, in plain Python."""
        wanted = logits.double().tolist()
        for token, bias in params.logit_bias:
            wanted[token] += bias
        for token, count in Counter(made).items():
            wanted[token] -= count * params.frequency_penalty + params.presence_penalty
        return torch.tensor(wanted)

    def rows(self, **more):
        return [
            SamplingRow(SamplingParams(**{**choice, **more}), 7, step, output=self.MADE)
            for choice in self.CHOICES
            for step in range(40)
        ]

    @pytest.mark.parametrize("heat", [{}, {"temperature": 0.0}, {"top_p": 0.7}], ids=str)
    def test_rows_draw_as_from_logits_that_were_changed_by_hand(self, heat):
        rows = self.rows(**heat)
        logits = logits_of(seed=11, rows=len(rows)).bfloat16()
        by_hand = torch.stack(
            [self.reference(x, row.params, self.MADE) for x, row in zip(logits, rows, strict=True)]
        )
        plain = [SamplingRow(SamplingParams(**self.plain(row)), 7, row.step) for row in rows]
        assert sample(logits, rows) == sample(by_hand.float(), plain)

    def plain(self, row):
        return {"temperature": row.params.temperature, "top_p": row.params.top_p}

    def test_a_pending_token_counts_like_any_other(self):
        rows = self.rows()
        logits = logits_of(seed=12, rows=len(rows))
        for last in (5, 8):  # in the output before, and not
            read = [row._replace(output=(*self.MADE, last)) for row in rows]
            unread = [row._replace(pending_row=i) for i, row in enumerate(rows)]
            previous = torch.full((len(rows),), last)
            sampled = Sampler().sample(logits.clone(), unread, previous).tolist()
            assert sampled == sample(logits, read)
            assert sampled != sample(logits, rows)

    def test_plain_rows_beside_them_draw_what_they_draw_alone(self):
        logits = logits_of(seed=13, rows=400).bfloat16()
        ways = ({}, {"top_p": 0.8}, {"temperature": 0.0})
        plain = [SamplingRow(SamplingParams(**ways[i % 3]), 3, i) for i in range(200)]
        drawn = sample(logits, [*plain, *self.rows()])
        assert drawn[:200] == sample(logits[:200], plain)

    def test_no_bias_revives_a_banned_token(self):
        params = SamplingParams(logit_bias=((4, 100.0),))
        rows = [SamplingRow(params, 1, step, banned=(4,)) for step in range(200)]
        assert 4 not in sample(logits_of(seed=14).expand(200, -1), rows)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("presence_penalty", 2.01),
        ("presence_penalty", -math.inf),
        ("frequency_penalty", -2.01),
        ("frequency_penalty", math.nan),
        ("logit_bias", ((3, 1.0), (4, 100.5))),
        ("logit_bias", ((3, math.nan),)),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("logprobs", -1),
        ("logprobs", 21),
    ],
)
def test_what_cannot_be_is_refused_by_name(param, value):
    with pytest.raises(InvalidRequest, match=param) as refused:
        SamplingParams(**{param: value})
    assert refused.value.param == param


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_logits_as_they_came(dtype, device):
    logits = logits_of(seed=15, rows=6).to(device, dtype)
    want = logits.float().log_softmax(-1)
    params = SamplingParams(top_p=0.5, presence_penalty=2.0, logit_bias=((1, 50.0),))
    likeliest = int(logits[4].argmax())
    rows = [SamplingRow(params, 1, i, banned=(likeliest,), output=(2, 3)) for i in range(6)]
    logprobs = Logprobs(logits, {0: 3, 1: 0, 4: 20})
    drawn = Sampler().sample(logits, rows)
    logprobs.download(logits, drawn)
    told = logprobs.read()
    assert [(row, len(told[row].top)) for row in told] == [(0, 3), (1, 0), (4, 20)]
    for row, of in told.items():
        assert of.logprob == pytest.approx(want[row, drawn[row]].item(), abs=1e-6)
        values, ids = want[row].sort(descending=True, stable=True)
        top = len(of.top)
        assert [token for token, _ in of.top] == ids[:top].tolist()
        assert [x for _, x in of.top] == pytest.approx(values[:top].tolist(), abs=1e-6)
    assert told[4].top[0][0] == likeliest


def test_of_equally_likely_tokens_the_first_are_told():
    logits = torch.zeros(2, VOCAB)
    logits[1] = -3.0
    logits[1, [31, 8]] = -1.0
    logprobs = Logprobs(logits, {0: 4, 1: 4})
    logprobs.download(logits, torch.zeros(2, dtype=torch.int64))
    told = logprobs.read()
    assert [token for token, _ in told[0].top] == [0, 1, 2, 3]
    assert [token for token, _ in told[1].top] == [8, 31, 0, 1]


def test_a_row_of_nan_spoils_no_other():
    logits = logits_of(seed=8, rows=3)
    rows = [SamplingRow(SamplingParams(top_p=p), seed=1, step=0) for p in (1.0, 0.9, 0.9)]
    want = sample(logits, rows)
    logits[1] = torch.nan
    got = sample(logits, rows)
    assert (got[0], got[2]) == (want[0], want[2])
    assert got[1] == NOT_FINITE
