"""Whole engine with weights of 4 bits, compared with float32 of exactly their values."""

import pytest
import torch

from lorikeet_engine.kernels.moe.mxfp4 import Mxfp4Experts
from lorikeet_engine.kernels.w4a16 import PackedWeight, StackedWeight
from tests.engine.engine_driver import Answers, greedy, load_adapters, prompt
from tests.engine.float32_reference import (
    ADAPTERS,
    Float32Reference,
    RecordingSampler,
    compare,
    run_to_end,
)
from tests.engine.models.mxfp4_checkpoints import write_mxfp4
from tests.engine.models.quantized_checkpoints import write_rounded
from tests.engine.moe_adapters import BOTH

ENGINE = {"weight_dtype": "packed"}
TOKENS = 16
LENGTHS = (17, 63, 133)
KINDS = ("groups", "act-order", "orders", "mxfp4")
CASES = [
    *(pytest.param(("cuda", kind), id=f"cuda-{kind}", marks=pytest.mark.gpu) for kind in KINDS),
    *(
        pytest.param(
            ("cpu", kind),
            id=f"cpu-{kind}",
            marks=[] if kind in ("groups", "mxfp4") else pytest.mark.soak,
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
ON_EXPERTS = {
    "experts": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "o_proj"],
        "target_parameters": BOTH,
        "rank_pattern": {"experts.down_proj": 24},
    }
}


@pytest.fixture(scope="module", params=CASES)
def reference(request, tmp_path_factory):
    device, kind = request.param
    if kind == "mxfp4":
        return of_mxfp4(device, tmp_path_factory.mktemp(kind))
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


def of_mxfp4(device, folder):
    """gpt-oss with experts in MXFP4, and with an adapter of them beside adapters of attention."""
    some = {name: ADAPTERS[name] for name in ("rank4_qv", "rank64_ko")} | ON_EXPERTS
    made = Float32Reference("gpt_oss", folder / "made", device, some)
    made.checkpoint, values = write_mxfp4(made.checkpoint, folder / "model")
    for name, weight in made._model.named_parameters():
        name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if name in values:
            weight.data = values.pop(name).to(device)
    assert not values
    return made


def test_every_answer_equals_the_references(reference, engine):
    layer = engine._runner.model._layers[0]
    if engine._runner.model.config.clamp is not None:
        assert isinstance(layer.mlp.experts.down, Mxfp4Experts)
    else:
        assert isinstance(layer.mixer.inputs.weight, PackedWeight | StackedWeight)
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
