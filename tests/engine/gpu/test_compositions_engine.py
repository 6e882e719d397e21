"""Whole engine under compositions, beside adapters alone and DoRA, compared with float32."""

import pytest

from tests.engine.engine_driver import prompt
from tests.engine.float32_reference import ADAPTERS, ALL, Float32Reference

TOKENS = 16
LENGTHS = (17, 63, 133, 300)
SINGLE = {
    "rank8_all": ADAPTERS["rank8_all"],
    "rank16_all": {"r": 16, "lora_alpha": 16, "target_modules": [*ALL, "lm_head", "embed_tokens"]},
    "rank24_some": {
        "r": 24,
        "lora_alpha": 8,
        "target_modules": ["k_proj", "down_proj"],
        "use_rslora": True,
    },
    "dora": {"r": 8, "lora_alpha": 16, "target_modules": ALL, "use_dora": True},
}
COMPOSITIONS = {
    "two": {"rank8_all": 0.5, "rank16_all": -1.0},
    "three": {"rank8_all": 1.5, "rank16_all": 0.5, "rank24_some": 0.75},
}
BESIDE = {
    "alone": ["two"],
    "beside others": [*COMPOSITIONS, "rank8_all", "rank24_some", None],
    "beside DoRA": ["two", "dora", "three", None, "two"],
}
CASES = [
    *(pytest.param(("cuda", n), id=f"cuda-{n}", marks=pytest.mark.gpu) for n in ("llama", "qwen2")),
    pytest.param(("cpu", "qwen2"), id="cpu-qwen2"),
]


@pytest.fixture(scope="module", params=CASES)
def reference(request, tmp_path_factory):
    device, family = request.param
    made = Float32Reference(family, tmp_path_factory.mktemp(family), device, SINGLE)
    for name, weights in COMPOSITIONS.items():
        made.compose(name, weights)
    return made


@pytest.mark.parametrize("beside", BESIDE)
def test_every_answer_equals_the_references(check, beside):
    names = BESIDE[beside]
    check(((name, prompt(LENGTHS[i % len(LENGTHS)], i)) for i, name in enumerate(names)), TOKENS)
