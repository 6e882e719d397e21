"""Adapters on experts, on a GPU in bfloat16, equal the float32 reference."""

import pytest

from tests.engine.engine_driver import prompt
from tests.engine.float32_reference import TOLERANCE, Float32Reference
from tests.engine.gpu.conftest import Check
from tests.engine.moe_adapters import BOTH

pytestmark = pytest.mark.gpu
ADAPTERS = {
    "moe": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj"],
        "target_parameters": BOTH,
        "rank_pattern": {"experts.down_proj": 24},
    }
}
LENGTHS = (1, 17, 63, 300)


@pytest.fixture(scope="module", params=("qwen3_moe", "mixtral", "gpt_oss"))
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Float32Reference:
    folder = tmp_path_factory.mktemp(request.param)
    return Float32Reference(request.param, folder, "cuda", ADAPTERS)


def test_every_answer_equals_the_references(check: Check) -> None:
    names = ["moe" if i % 2 else None for i in range(2 * len(LENGTHS))]
    clear = check(((name, prompt(LENGTHS[i // 2], i)) for i, name in enumerate(names)), 24)
    assert clear > 0.5, "too few tokens are compared"


def test_the_adapter_changes_the_models_answers(reference: Float32Reference) -> None:
    change = reference.logprobs("moe", prompt(63)) - reference.logprobs(None, prompt(63))
    assert change.square().mean().sqrt() > 3 * TOLERANCE
