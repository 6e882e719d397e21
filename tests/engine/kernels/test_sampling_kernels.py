"""The sampling kernels draw exactly what the reference draws; without a GPU, in the interpreter."""

import numpy as np
import pytest
import torch

from lorikeet_engine.kernels import sampling
from lorikeet_engine.kernels.sampling import (
    DRAW_FIELDS,
    LEAST,
    ONE,
    ROW,
    SCALE,
    TOP_K,
    TOP_P,
    UNIFORM,
    fused,
)
from tests.engine.interpreter import DEVICES, INTERPRETED
from tests.engine.kernels.definitions import in_torch

reference = in_torch(sampling)

VOCABS = (4200,) if INTERPRETED else (40, 5000, 128_256, 151_936)
ROWS = 11 if INTERPRETED else 256


def some_logits(vocab, dtype):
    """Rows of many kinds: all alike, partly or mostly impossible, far apart; the last is NaN."""
    logits = 2 * torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[3] = 0.0
    logits[4, ::3] = -torch.inf
    logits[6, 10:] = -torch.inf
    logits[7] *= 50
    logits[-1] = torch.nan
    return logits.to(dtype)


def some_draws(seed):
    rng = np.random.default_rng(seed)
    draws = np.zeros((ROWS, DRAW_FIELDS), np.int64)
    draws[:, ROW] = rng.permutation(ROWS)
    draws[:, UNIFORM] = rng.integers(-(2**63), 2**63 - 1, ROWS)
    inverse = 1.4427 / rng.choice([1.0, 0.3, 2.0, 1e-9], ROWS)
    draws[:, SCALE] = inverse.astype(np.float32).view(np.int32)
    draws[:, TOP_K] = rng.choice([0, 0, 1, 5, 30, 300], ROWS)
    draws[:, TOP_P] = rng.choice([1.0, 0.95, 0.5, 0.05], ROWS).view(np.int64)
    draws[:, LEAST] = np.maximum(1, rng.choice([0, 0, 0.05, 0.5], ROWS) * ONE)
    return torch.from_numpy(draws)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
def test_the_kernels_draw_the_references_tokens(vocab, dtype, device):
    logits, draws = some_logits(vocab, dtype), some_draws(vocab)
    best = logits.amax(-1)
    want, got = torch.full((ROWS,), -7), torch.full((ROWS,), -7, device=device)
    reference.draw_tokens(logits, best, want, draws)
    fused.draw_tokens(logits.to(device), best.to(device), got, draws.to(device))
    assert got[:-1].tolist() == want[:-1].tolist()
    assert (want[:-1] >= 0).all()
