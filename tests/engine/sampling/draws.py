"""Draws of the sampler, and the distribution that they must follow."""

from collections import Counter

import torch

from lorikeet_engine.sampling.penalties import Penalties
from lorikeet_engine.sampling.sampler import Sampler

VOCAB = 40
DRAWS = 100_000
EVEN = torch.tensor([[0b01010101] * (VOCAB // 8)], dtype=torch.uint8)
"""A bitmask of the tokens with even ids."""


def logits_of(seed, rows=1, spread=2.0):
    return spread * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def pool(device="cpu"):
    return Penalties(80, VOCAB, torch.device(device))


def sample(logits, rows, penalties=None):
    return Sampler(penalties or pool()).sample(logits.clone(), rows).tolist()


def changed(logits, params, prompt, output):
    """Return one row's logits after penalties and biases, computed in plain Python."""
    wanted = logits.double().tolist()
    for token in {*prompt, *output}:
        r = params.repetition_penalty
        wanted[token] = wanted[token] / r if wanted[token] > 0 else wanted[token] * r
    for token, bias in params.logit_bias:
        wanted[token] += bias
    for token, count in Counter(output).items():
        wanted[token] -= count * params.frequency_penalty + params.presence_penalty
    return torch.tensor(wanted)


def reference(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Return the distribution of one row, computed token by token in plain Python."""
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


def assert_drawn_alike(some, others):
    """Check that equally many draws of two kinds follow one distribution, by a chi-square test.

    Values that were drawn less than 10 times count as one.
    """
    assert len(some) == len(others)
    first, second = Counter(some), Counter(others)
    total = first + second
    often = [value for value, count in total.items() if count >= 10]
    pairs = [(first[value], second[value]) for value in often]
    kept, of_kept = (sum(each) for each in zip(*pairs, strict=True))
    pairs.append((len(some) - kept, len(others) - of_kept))
    chi2 = sum((a - b) ** 2 / (a + b) for a, b in pairs if a + b)
    freedom = len(often) - 1
    assert freedom > 5, total
    assert chi2 <= freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations


def assert_drawn(tokens, want):
    """Check that tokens follow a distribution, by a chi-square test."""
    counts = torch.bincount(torch.tensor(tokens), minlength=VOCAB)
    assert set(counts.nonzero().flatten().tolist()) <= set(want)
    chi2 = sum((counts[t].item() - DRAWS * p) ** 2 / (DRAWS * p) for t, p in want.items())
    freedom = len(want) - 1
    assert chi2 <= freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations
