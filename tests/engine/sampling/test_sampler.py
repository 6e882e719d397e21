"""Tokens are drawn from the distribution that was asked for, and repeatably."""

import math

import pytest
import torch

from lorikeet_engine.device.async_copies import zeros_to_upload
from lorikeet_engine.errors import InvalidRequest
from lorikeet_engine.execution.grammar_masks import AllowedTokens
from lorikeet_engine.kernels.masks import forbid_others
from lorikeet_engine.request import SamplingParams
from lorikeet_engine.sampling.draws import SamplingRow
from lorikeet_engine.sampling.sampler import NOT_FINITE, Sampler
from tests.engine.sampling.draws import (
    DRAWS,
    EVEN,
    VOCAB,
    assert_drawn,
    logits_of,
    pool,
    reference,
    sample,
)

pytestmark = pytest.mark.usefixtures("one_thread")


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
    assert_drawn(sample(logits.expand(DRAWS, -1), rows), want)


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
@pytest.mark.parametrize(
    "choice",
    [
        {"temperature": 0.0},
        {},
        {"top_k": 9, "top_p": 0.9},
        {"presence_penalty": 1.5, "frequency_penalty": -0.5, "logit_bias": ((3, 2.0), (9, -1.0))},
        {"repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_a_gpu_draws_the_same_tokens_as_the_cpu(choice):
    logits, params = logits_of(seed=9, rows=64), SamplingParams(**choice)
    bound = torch.tensor([i for i in range(64) if i % 3])

    def drawn(device):
        penalties = pool(device)
        slots = [
            penalties.begin(params, (4, 11), (4, 8, 4)) if params.changes_logits else None
            for _ in range(64)
        ]
        sampler, tokens = Sampler(penalties), []
        for turn in range(3):
            rows = [
                SamplingRow(params, 2, 64 * turn + i, slot=slot) for i, slot in enumerate(slots)
            ]
            own = logits.to(device, copy=True)
            forbid_others(own, bound.to(device), EVEN.repeat(len(bound), 1).to(device))
            tokens.append(sampler.sample(own, rows).tolist())
        return tokens

    assert drawn("cuda") == drawn("cpu")


@pytest.fixture
def no_waiting():
    """Makes torch raise what would let the host wait for a GPU."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize(
    "choice",
    [
        {"temperature": 0.0},
        {"top_k": 9, "top_p": 0.9},
        {"presence_penalty": 1.5},
        {"logit_bias": ((3, 2.0), (9, -1.0))},
        {"repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_the_host_waits_for_nothing_while_a_gpu_samples(choice):
    params, prompt = SamplingParams(**choice), (4, 11)
    penalties = pool("cuda")
    slots = [
        penalties.begin(params, prompt, (4, 8)) if params.changes_logits else None for _ in range(3)
    ]
    rows = [SamplingRow(params, 2, i, banned=(3,), slot=slot) for i, slot in enumerate(slots)]
    logits = logits_of(seed=9, rows=3).pin_memory().to("cuda", non_blocking=True)
    every = zeros_to_upload((3, VOCAB // 8), torch.uint8, logits.device).fill_(255)
    AllowedTokens([0, 1, 2], every, {}, {}, {}).forbid_others(logits)
    tokens = Sampler(penalties).sample(logits, rows)
    assert tokens.shape == (3,)


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
def test_a_row_draws_only_allowed_tokens(choice):
    params = SamplingParams(**choice)
    logits = logits_of(seed=7).expand(400, -1).clone()
    forbid_others(logits, torch.arange(200, 400), EVEN.repeat(200, 1))
    free = [SamplingRow(params, 1, step) for step in range(200)]
    drawn = sample(logits, [*free, *free])
    assert all(token % 2 == 0 for token in drawn[200:])
    assert drawn[:200] == sample(logits[:200], free)
    logits = logits.clone()
    logits[:, 1::2] = -torch.inf
    assert drawn[200:] == sample(logits[200:], free)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("presence_penalty", 2.01),
        ("presence_penalty", -math.inf),
        ("frequency_penalty", -2.01),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("logit_bias", ((3, 1.0), (4, 100.5))),
        ("logit_bias", ((3, math.nan),)),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("logprobs", -1),
        ("logprobs", 21),
    ],
)
def test_impossible_parameters_are_refused_by_name(param, value):
    with pytest.raises(InvalidRequest, match=param) as refused:
        SamplingParams(**{param: value})
    assert refused.value.param == param


def test_a_row_of_nan_spoils_no_other():
    logits = logits_of(seed=8, rows=3)
    rows = [SamplingRow(SamplingParams(top_p=p), seed=1, step=0) for p in (1.0, 0.9, 0.9)]
    want = sample(logits, rows)
    logits[1] = torch.nan
    got = sample(logits, rows)
    assert (got[0], got[2]) == (want[0], want[2])
    assert got[1] == NOT_FINITE
