"""processed_logprobs are those of the distribution that a token was drawn from."""

import math

import pytest
import torch

from lorikeet_engine.kernels.masks import forbid_others
from lorikeet_engine.request import LogprobsMode, Request, SamplingParams, Tokens
from lorikeet_engine.sampling.draws import SamplingRow
from lorikeet_engine.sampling.processed_logprobs import ProcessedLogprobs
from lorikeet_engine.sampling.sampler import Sampler
from tests.engine import hash_model
from tests.engine.blobs import Shelf
from tests.engine.sampling.draws import EVEN, changed, logits_of, pool, reference

pytestmark = pytest.mark.usefixtures("one_thread")
PENALISED = SamplingParams(
    temperature=0.8, top_k=9, presence_penalty=1.5, repetition_penalty=1.3, logit_bias=((4, 3.0),)
)
PARAMS = (
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, top_k=7),
    SamplingParams(top_p=0.6),
    SamplingParams(temperature=0.9, top_k=12, top_p=0.8, min_p=0.05),
    PENALISED,
)
OUTPUT = (3, 5, 5)
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_processed_logprobs_include_penalties_temperature_and_filters(dtype, device):
    logits = logits_of(seed=7, rows=70).to(dtype)
    params = [PARAMS[i % len(PARAMS)] for i in range(70)]
    penalties = pool(device)
    rows = [
        SamplingRow(p, i, 3, slot=penalties.begin(p, (), OUTPUT) if p.changes_logits else None)
        for i, p in enumerate(params)
    ]
    processed = ProcessedLogprobs(dict.fromkeys(range(70), 3))
    drawn = Sampler(penalties).sample(logits.to(device), rows, processed).tolist()
    told = processed.read()
    assert sorted(told) == list(range(70))
    for row, of in told.items():
        p, own = params[row], logits[row].float()
        if p.changes_logits:
            own = changed(own, p, (), OUTPUT)
        want = reference(own, p.temperature, p.top_k, p.top_p, p.min_p)
        assert of.logprob == pytest.approx(math.log(want[drawn[row]]), abs=1e-4)
        for token, logprob in of.top[: len(want)]:
            assert logprob == pytest.approx(math.log(want[token]), abs=1e-4)
        assert all(logprob == -math.inf for _, logprob in of.top[len(want) :])


def test_the_least_temperatures_give_numbers():
    params = SamplingParams(temperature=1e-300)
    processed = ProcessedLogprobs({0: 3})
    Sampler(pool("cpu")).sample(logits_of(seed=7, rows=1), [SamplingRow(params, 1, 3)], processed)
    assert processed.read()[0].logprob == 0.0


@pytest.mark.parametrize("device", DEVICES)
def test_without_filters_the_least_likely_tokens_have_numbers_too(device):
    logits = logits_of(seed=7, rows=2, spread=3.0)
    params = SamplingParams(temperature=0.05)
    processed = ProcessedLogprobs({1: 20})
    rows = [SamplingRow(params, 1, 3), SamplingRow(params, 2, 3)]
    (_, drawn) = Sampler(pool(device)).sample(logits.to(device), rows, processed).tolist()
    want = (logits[1].double() / 0.05).log_softmax(-1)
    told = processed.read()[1]
    assert told.logprob == pytest.approx(want[drawn].item(), abs=1e-5)
    assert dict(told.top) == pytest.approx({t: want[t].item() for t, _ in told.top}, rel=1e-5)
    assert [token for token, _ in told.top] == want.sort(descending=True).indices[:20].tolist()
    assert told.top[-1][1] < -60


def test_a_greedy_token_has_neither_temperature_nor_filters_but_bans_and_a_grammar():
    logits = logits_of(seed=8, rows=2)
    likeliest = int(logits[0].argmax())
    greedy = SamplingParams(temperature=0.0, top_k=1)
    rows = [SamplingRow(greedy, 0, 0, (likeliest,)), SamplingRow(greedy, 0, 0)]
    want = logits.clone()
    forbid_others(logits, torch.tensor([1]), EVEN)
    want[0, likeliest] = want[1, 1::2] = -torch.inf
    want = want.log_softmax(-1)
    processed = ProcessedLogprobs({0: 0, 1: 0})
    drawn = Sampler(pool()).sample(logits, rows, processed).tolist()
    told = processed.read()
    for row in (0, 1):
        assert told[row].logprob == pytest.approx(want[row, drawn[row]].item(), abs=1e-5)


def test_requests_of_both_modes_share_a_step(tmp_path):
    engine, _ = hash_model.build(tmp_path, Shelf(tmp_path), kv_pages=200)
    outputs: dict[str, list[Tokens]] = {}
    for mode in LogprobsMode:
        sampling = SamplingParams(
            8, temperature=0.5, seed=1, ignore_eos=True, logprobs=0, logprobs_mode=mode
        )
        engine.submit(Request(mode.value, ((5, 6, 7),), sampling))
    while len([o for some in outputs.values() for o in some if o.finish is not None]) < 2:
        engine.wait(1.0)
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    raw, processed = (
        [of.logprob for output in outputs[mode.value] for of in output.logprobs]
        for mode in LogprobsMode
    )
    assert len(raw) == len(processed) == 8
    assert sum(processed) > sum(raw), "half the temperature makes what is drawn likelier"
    engine.close()
