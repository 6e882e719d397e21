"""Log probabilities are the model's own, and of equals the first are told."""

import pytest
import torch

from lorikeet_engine.request import SamplingParams
from lorikeet_engine.sampling.draws import SamplingRow
from lorikeet_engine.sampling.logprob_readback import LogprobReadback
from lorikeet_engine.sampling.sampler import Sampler
from tests.engine.sampling.draws import VOCAB, logits_of, pool

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_computed_from_the_unchanged_logits(dtype, device):
    logits = logits_of(seed=15, rows=6).to(device, dtype)
    want = logits.float().log_softmax(-1)
    params = SamplingParams(top_p=0.5, presence_penalty=2.0, logit_bias=((1, 50.0),))
    likeliest, penalties = int(logits[4].argmax()), pool(device)
    slot = penalties.begin(params, (), (2, 3))
    rows = [SamplingRow(params, 1, i, banned=(likeliest,), slot=slot) for i in range(6)]
    logprobs = LogprobReadback(logits, {0: 3, 1: 0, 4: 20})
    drawn = Sampler(penalties).sample(logits, rows)
    logprobs.download(logits, drawn)
    told = logprobs.read()
    assert [(row, len(told[row].top)) for row in told] == [(0, 3), (1, 0), (4, 20)]
    for row, of in told.items():
        assert of.logprob == pytest.approx(want[row, drawn[row]].item(), abs=1e-5)
        values, ids = want[row].sort(descending=True, stable=True)
        top = len(of.top)
        assert [token for token, _ in of.top] == ids[:top].tolist()
        assert [x for _, x in of.top] == pytest.approx(values[:top].tolist(), abs=1e-5)
    assert told[4].top[0][0] == likeliest


def test_of_equally_likely_tokens_the_first_are_told():
    logits = torch.zeros(2, VOCAB)
    logits[1] = -3.0
    logits[1, [31, 8]] = -1.0
    logprobs = LogprobReadback(logits, {0: 4, 1: 4})
    logprobs.download(logits, torch.zeros(2, dtype=torch.int64))
    told = logprobs.read()
    assert [token for token, _ in told[0].top] == [0, 1, 2, 3]
    assert [token for token, _ in told[1].top] == [8, 31, 0, 1]


@pytest.mark.parametrize("vocab", [5, 64, 1000, 1280])
def test_the_most_likely_tokens_equal_a_stable_sorts(vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randint(-9, 10, (50, vocab), generator=generator).float()  # mostly equals
    logits[7] = -torch.inf
    logits[8] = -torch.nan
    logprobs = LogprobReadback(logits, dict.fromkeys(range(50), 20))
    logprobs.download(logits, torch.zeros(50, dtype=torch.int64))
    ids = logits.sort(descending=True, stable=True).indices[:, :20].tolist()
    for row, told in logprobs.read().items():
        assert row == 8 or [token for token, _ in told.top] == ids[row]
        assert all(0 <= token < vocab for token, _ in told.top)
