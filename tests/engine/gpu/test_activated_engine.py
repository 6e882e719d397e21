"""Whole engine under activated LoRA beside other adapters, compared with float32."""

import pytest

from tests.engine.engine_driver import prompt
from tests.engine.float32_reference import ADAPTERS, ALL, Float32Reference

TOKENS = 16
INVOCATION = [7, 9, 7]
ACTIVATED = {
    "one": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ALL,
        "alora_invocation_tokens": INVOCATION,
    },
    "biases": {
        "r": 4,
        "target_modules": ["q_proj", "v_proj", "up_proj"],
        "lora_bias": True,
        "alora_invocation_tokens": INVOCATION,
    },
}
CASES = [
    *(
        pytest.param(("cuda", n), id=f"cuda-{n}", marks=pytest.mark.gpu)
        for n in ("llama", "qwen3_5_text")
    ),
    pytest.param(("cpu", "llama"), id="cpu-llama"),
]


@pytest.fixture(scope="module", params=CASES)
def reference(request, tmp_path_factory):
    device, family = request.param
    adapters = ACTIVATED | {"rank8_all": ADAPTERS["rank8_all"]}
    return Float32Reference(family, tmp_path_factory.mktemp(family), device, adapters)


def invoked(length, at):
    ids = prompt(length)
    return [*ids[:at], *INVOCATION, *ids[at:]]


def test_every_answer_equals_the_references(check):
    """Prompts share what precedes an invocation, and both runs of them differ in prefix hits."""
    once, again = invoked(133, 120), invoked(133, 70)
    asked = [(name, once) for name in ("one", "biases", "rank8_all", None)]
    asked += [
        ("one", again),
        ("biases", prompt(63)),
        ("one", invoked(300, 299)),
        ("rank8_all", again),
    ]
    check(asked, TOKENS)
    check(asked[::-1], TOKENS)


def test_an_activated_adapter_changes_answers_from_its_invocation_on(reference):
    ids = invoked(133, 120)
    change = (reference.logprobs("one", ids) - reference.logprobs(None, ids)).abs().amax(-1)
    assert change[:120].max() < 1e-4
    assert change[120:].max() > reference.tolerance
