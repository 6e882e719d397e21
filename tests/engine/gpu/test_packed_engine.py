"""Whole engine with weights of 4 bits, compared with float32 of exactly their values."""

import pytest
import torch

from lorikeet_engine.kernels.w4a16 import PackedWeight, StackedWeight
from tests.engine.engine_driver import Answers, greedy, load_adapters, prompt
from tests.engine.float32_reference import (
    Float32Reference,
    RecordingSampler,
    build,
    compare,
    run_to_end,
)
from tests.engine.models.quantized_checkpoints import write_rounded

TOKENS = 16
LENGTHS = (17, 63, 133)
KINDS = ("groups", "act-order", "orders")
CASES = [
    *(pytest.param(("cuda", kind), id=f"cuda-{kind}", marks=pytest.mark.gpu) for kind in KINDS),
    *(
        pytest.param(
            ("cpu", kind), id=f"cpu-{kind}", marks=[] if kind == "groups" else pytest.mark.soak
        )
        for kind in KINDS
    ),
]
RANDOM = torch.Generator().manual_seed(3)


def shared(d_in):
    """Groups of an order that all linears of as many inputs share."""
    drawn = torch.randperm(d_in, generator=torch.Generator().manual_seed(d_in))
    return (torch.arange(d_in) // 32)[drawn]


def own(d_in):
    return (torch.arange(d_in) // 32)[torch.randperm(d_in, generator=RANDOM)]


ORDERS = {"groups": None, "act-order": shared, "orders": own}


@pytest.fixture(scope="module", params=CASES)
def reference(request, tmp_path_factory):
    device, kind = request.param
    made = Float32Reference("llama", tmp_path_factory.mktemp(kind), device)
    made.checkpoint, values = write_rounded(
        made.checkpoint, tmp_path_factory.mktemp("rounded") / "model", ORDERS[kind]
    )
    for name, linear in made._model.named_modules():
        name = name.removeprefix("base_model.model.").removesuffix(".base_layer")
        if f"{name}.weight" in values:
            linear.weight.data = values.pop(f"{name}.weight").to(device)
    assert not values
    return made


@pytest.fixture(scope="module")
def engine(reference, tmp_path_factory):
    settings = {"weight_dtype": "packed", "max_batch_adapters": len(reference.refs)}
    engine = build(reference, tmp_path_factory.mktemp("cache"), **settings)
    yield engine
    engine.close()


def test_every_answer_equals_the_references(reference, engine):
    inputs = engine._runner.model._layers[0].mixer.inputs.weight
    assert isinstance(inputs, PackedWeight | StackedWeight)
    draws, answers = RecordingSampler(engine), Answers(engine)
    load_adapters(answers, reference.refs.values())
    asked = []
    for i, name in enumerate(reference.refs):
        ids, more = prompt(LENGTHS[i % 3], i), {"adapter": reference.refs[name], "seed": 100 * i}
        asked.append((name, greedy(f"r{i}", ids, max_tokens=TOKENS, **more)))
    for _, call in asked:
        answers.submit(call)
    run_to_end(answers)
    for name, call in asked:
        compare(reference, call, name, draws, answers)


def test_a_single_sequence_is_answered_as_the_reference_answers(reference, engine):
    draws, answers = RecordingSampler(engine), Answers(engine)
    call = greedy("alone", prompt(40, 7), max_tokens=TOKENS, seed=7000)
    answers.submit(call)
    run_to_end(answers)
    compare(reference, call, None, draws, answers)
