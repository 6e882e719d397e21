"""The masks' kernel forbids what the reference does; without a GPU, in Triton's interpreter."""

import pytest
import torch

from lorikeet_engine.kernels import masks
from lorikeet_engine.kernels.masks import fused
from tests.engine.interpreter import DEVICES, INTERPRETED
from tests.engine.kernels.definitions import in_torch

reference = in_torch(masks)

VOCABS = (5, 64, 4200) if INTERPRETED else (5, 64, 4200, 128_256, 151_936)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", VOCABS)
def test_the_kernel_leaves_the_logits_that_the_reference_leaves(vocab, dtype, device):
    random = torch.Generator().manual_seed(vocab)
    logits = torch.randn(9, vocab, generator=random).to(dtype)
    logits[4, ::3] = torch.nan
    allowed = torch.randint(256, (4, -(-vocab // 8)), generator=random, dtype=torch.uint8)
    allowed[0] = 0
    rows = torch.tensor([8, 2, 4, 5])
    got = logits.to(device, copy=True)
    fused.forbid_others(got, rows.to(device), allowed.to(device))
    want = logits.clone()
    reference.forbid_others(want, rows, allowed)
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)
    for at, row in enumerate(rows):
        bits = [bool(allowed[at, t // 8] >> t % 8 & 1) for t in range(min(vocab, 50))]
        assert (want[row, :50] == -torch.inf).tolist() == [not bit for bit in bits]
    others = [row for row in range(9) if row not in rows]
    assert torch.equal(want[others], logits[others])
