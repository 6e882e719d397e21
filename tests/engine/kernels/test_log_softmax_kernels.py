"""The kernels' log probabilities are float32's; without a GPU, in Triton's interpreter."""

import pytest
import torch

from lorikeet_engine.kernels import log_softmax
from lorikeet_engine.kernels.log_softmax import MOST, fused
from tests.engine.interpreter import INTERPRETED
from tests.engine.kernels.definitions import in_torch

reference = in_torch(log_softmax)

OPERATORS = [
    pytest.param(reference, "cpu", id="reference"),
    pytest.param(fused, "cpu", id="interpreter")
    if INTERPRETED
    else pytest.param(fused, "cuda", marks=pytest.mark.gpu, id="cuda"),
]
VOCABS = (5, 64, 4200) if INTERPRETED else (5, 64, 4096, 5000, 128_256, 151_936)
COUNTS = (20, 0, 1, MOST, 7, 20)
ROWS = (9, 3, 0, 4, 11, 6)
SCALES = (1.0, 1.0, 0.125, 2.0, 0.5, 1.0)


def wanted_of(rows):
    rows, counts, scales = map(torch.tensor, zip(*rows, strict=True))
    return torch.stack((rows, counts, scales.view(torch.int32)), dim=1)


def some_logits(vocab, dtype):
    """Rows of many kinds: far apart, partly and mostly impossible, mostly equal, all equal."""
    random = torch.Generator().manual_seed(vocab)
    logits = 3 * torch.randn(12, vocab, generator=random)
    logits[0] *= 10
    logits[3, ::3] = -torch.inf
    logits[4, 2:] = -torch.inf
    logits[6] = 7.0
    logits[9] = torch.randint(-4, 5, (vocab,), generator=random)
    logits[9, vocab // 2 :] -= 2  # whole chunks have none of the likeliest
    return logits.to(dtype)


@pytest.mark.parametrize(("operators", "device"), OPERATORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", VOCABS)
def test_log_probabilities_equal_a_stable_sorts_in_float32(vocab, dtype, operators, device):
    logits = some_logits(vocab, dtype)
    counts = [min(count, vocab) for count in COUNTS]
    wanted = wanted_of(zip(ROWS, counts, SCALES, strict=True))
    tokens = torch.randint(vocab, (12,), generator=torch.Generator().manual_seed(1))
    tokens[3] = -1
    most = max(counts)
    on_device = logits.to(device), wanted.to(device)
    found = operators.likeliest(*on_device, most)
    operators.set_given(found, *on_device, tokens.to(device))
    operators.set_rank(found, *on_device, tokens.to(device))
    told = found.packed.cpu()
    assert told.shape == (len(ROWS), 2 + 2 * most)
    assert found.most == most
    for at, (row, count, scale) in enumerate(zip(ROWS, counts, SCALES, strict=True)):
        want = (logits[row].double() * scale).log_softmax(-1).float()
        ids = logits[row].sort(descending=True, stable=True).indices
        token = tokens[row].clamp(min=0)
        torch.testing.assert_close(told[at, 0], want[token], rtol=0, atol=1e-5)
        assert ids[told[at, 1].view(torch.int32) - 1] == token
        top = told[at, 2 : 2 + count]
        torch.testing.assert_close(top, want[ids[:count]], rtol=0, atol=1e-5)
        told_ids = told[at, 2 + most : 2 + most + count].view(torch.int32)
        assert told_ids.tolist() == ids[:count].tolist()


@pytest.mark.parametrize(("operators", "device"), OPERATORS)
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_rows_of_nan_give_ids_within_the_vocabulary(operators, device):
    logits = torch.randn(4, 70)
    logits[0] = torch.nan
    logits[1] = -torch.nan
    logits[2, 5] = torch.nan
    logits[3] = -torch.inf
    wanted = wanted_of((row, 20, 1.0) for row in range(4)).to(device)
    found = operators.likeliest(logits.to(device), wanted, 20)
    operators.set_given(found, logits.to(device), wanted, torch.tensor([3] * 4, device=device))
    assert found.packed[:, 0].isnan().all()
    ids = found.packed[:, 22:].contiguous().view(torch.int32)
    assert ((ids >= 0) & (ids < 70)).all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_more_tokens_than_the_kernels_find_equal_a_stable_sorts(device):
    logits = some_logits(5000, torch.bfloat16).repeat(3, 1)
    wanted = wanted_of((row, 100, 1.0) for row in range(len(logits))).to(device)
    found = log_softmax.likeliest(logits.to(device), wanted, 100)
    want, ids = logits.float().log_softmax(-1).sort(descending=True, stable=True)
    told = found.packed.cpu()
    torch.testing.assert_close(told[:, 2:102], want[:, :100], rtol=0, atol=1e-5)
    assert told[:, 102:].contiguous().view(torch.int32).tolist() == ids[:, :100].tolist()
