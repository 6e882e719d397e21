"""The penalties' kernel gives the reference's bits; without a GPU, in Triton's interpreter."""

import pytest
import torch

from lorikeet_engine.kernels import penalties
from lorikeet_engine.kernels.penalties import IN_OUTPUT, IN_PROMPT, PenaltyState, fused
from tests.engine.interpreter import DEVICES, INTERPRETED
from tests.engine.kernels.definitions import in_torch

reference = in_torch(penalties)

VOCABS = (40, 4200) if INTERPRETED else (40, 5000, 128_256, 151_936)
SLOTS = 7


def some_state(vocab):
    random = torch.Generator().manual_seed(vocab)
    made = torch.randint(-5, 6, (SLOTS, vocab), generator=random, dtype=torch.int32).clamp(min=0)
    prompt = torch.randint(0, 2, (SLOTS, vocab), generator=random, dtype=torch.int32)
    biases = torch.randn(SLOTS, vocab, generator=random)
    penalties = torch.tensor(
        [[1.3, 0.7, -0.1], [1.0, 0.3, 2.0], [0.77, 0.0, 0.0], [1, 0, 0], [7.3, -2, -1.7]]
    ).repeat(2, 1)[:SLOTS]
    return PenaltyState(made * IN_OUTPUT + prompt * IN_PROMPT, biases, penalties)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", VOCABS)
def test_the_kernel_changes_rows_to_the_last_bit_as_the_reference_does(vocab, dtype, device):
    state = some_state(vocab)
    logits = 5 * torch.randn(9, vocab, generator=torch.Generator().manual_seed(1))
    logits[2, ::3] = -torch.inf
    logits[4, 1] = torch.nan
    logits = logits.to(dtype)
    rows, slots = torch.tensor([8, 2, 0, 4, 5]), torch.tensor([6, 0, 3, 4, 1])
    want = reference.penalise(logits, rows, slots, state)
    on_device = PenaltyState(*(t.to(device) for t in (state.seen, state.biases, state.penalties)))
    got = fused.penalise(logits.to(device), rows.to(device), slots.to(device), on_device)
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(want, logits[rows].float())
