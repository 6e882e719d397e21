"""Whole engine under adapters with DoRA and biases beside others, compared with float32."""

import pytest

from tests.engine.engine_driver import prompt
from tests.engine.float32_reference import ADAPTERS, ALL, Float32Reference

TOKENS = 16
LENGTHS = (17, 63, 133, 300)
WITH_VECTORS = {
    "dora": {"r": 8, "lora_alpha": 16, "target_modules": ALL, "use_dora": True},
    "dora_of_some": {
        "r": 24,
        "lora_alpha": 8,
        "target_modules": ["k_proj", "down_proj"],
        "use_rslora": True,
        "use_dora": True,
    },
    "biases": {"r": 4, "target_modules": ["q_proj", "o_proj", "up_proj"], "lora_bias": True},
}
CASES = [
    *(pytest.param(("cuda", n), id=f"cuda-{n}", marks=pytest.mark.gpu) for n in ("llama", "qwen2")),
    pytest.param(("cpu", "qwen2"), id="cpu-qwen2"),
]


@pytest.fixture(scope="module", params=CASES)
def reference(request, tmp_path_factory):
    device, family = request.param
    adapters = WITH_VECTORS | {"rank8_all": ADAPTERS["rank8_all"]}
    return Float32Reference(family, tmp_path_factory.mktemp(family), device, adapters)


@pytest.mark.parametrize("beside", [True, False], ids=["beside others", "alone"])
def test_every_answer_equals_the_references(reference, check, beside):
    names = [*reference.refs, "dora"] if beside else ["dora_of_some"]
    check(((name, prompt(LENGTHS[i % len(LENGTHS)], i)) for i, name in enumerate(names)), TOKENS)
