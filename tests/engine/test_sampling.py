"""Tokens are drawn from the distribution that was asked for, and repeatably."""

import math

import pytest
import torch

from lorikeet_engine.request import SamplingParams
from lorikeet_engine.sampling import NOT_FINITE, Sampler, SamplingRow

VOCAB = 40
DRAWS = 20_000


def logits_of(seed, rows=1, spread=2.0):
    return spread * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def sample(logits, rows):
    return Sampler().sample(logits.clone(), rows).tolist()


def reference(logits, temperature=1.0, top_k=0, top_p=1.0):
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
    return {token: weights[token] / reached for token in kept}


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
        {"temperature": 0.8, "top_k": 12, "top_p": 0.9},
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
@pytest.mark.parametrize("choice", [{"temperature": 0.0}, {}, {"top_k": 9, "top_p": 0.9}], ids=str)
def test_a_gpu_draws_what_the_cpu_draws(choice):
    logits = logits_of(seed=9, rows=64)
    rows = [SamplingRow(SamplingParams(**choice), seed=2, step=step) for step in range(64)]
    assert sample(logits.cuda(), rows) == sample(logits, rows)


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
def test_a_mask_decides_what_its_own_row_may_draw(choice):
    def only_even(logits):
        logits[1::2] = -torch.inf

    params = SamplingParams(**choice)
    logits = logits_of(seed=7).expand(400, -1)
    free = [SamplingRow(params, 1, step) for step in range(200)]
    masked = [SamplingRow(params, 1, step, mask=only_even) for step in range(200)]
    drawn = sample(logits, [*free, *masked])
    assert all(token % 2 == 0 for token in drawn[200:])
    assert drawn[:200] == sample(logits[:200], free)


def test_a_row_of_nan_spoils_no_other():
    logits = logits_of(seed=8, rows=3)
    rows = [SamplingRow(SamplingParams(top_p=p), seed=1, step=0) for p in (1.0, 0.9, 0.9)]
    want = sample(logits, rows)
    logits[1] = torch.nan
    got = sample(logits, rows)
    assert (got[0], got[2]) == (want[0], want[2])
    assert got[1] == NOT_FINITE
