"""Whatever the batch, every request says what PEFT says under the same adapter, token for token."""

from typing import Any

import pytest

from tests.engine.conftest import FAMILIES, MOE
from tests.engine.engine_driver import Answers, RecordingRunner, build, greedy
from tests.engine.peft_world import MODES, PeftWorld, ask, bring_all, check_prefix_hits

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "rank4_qv": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "rank8_all": {"r": 8, "lora_alpha": 16, "target_modules": ALL},
    "rank12_mlp": {"r": 12, "lora_alpha": 12, "target_modules": ["gate_proj", "down_proj"]},
    "rank16_rs": {"r": 16, "lora_alpha": 8, "target_modules": ALL, "use_rslora": True},
    "rank64_ko": {"r": 64, "lora_alpha": 64, "target_modules": ["k_proj", "o_proj"]},
    "patterns": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "k_proj", "up_proj", "down_proj"],
        "rank_pattern": {"q_proj": 32, r"layers\.1\.mlp\.down_proj": 4},
        "alpha_pattern": {"k_proj": 4, r"layers\.0\.mlp\.up_proj": 40},
    },
}
TOKENS = 40


# Of those with a scaled rotary embedding every prompt is longer than their original context.
WORLDS = (*FAMILIES, *MOE, "longrope", "yarn")
OFTEN = (
    "phi3",
    "glm4",
    "qwen3_moe",
    "longrope",
    "yarn",
)  # fused linears; the matrix has all families


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(world, marks=[] if world in OFTEN else pytest.mark.soak) for world in WORLDS
    ],
)
def world(request, tiny_checkpoints, variant_checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = {**tiny_checkpoints, **variant_checkpoints}[request.param]
    return PeftWorld(checkpoint, folder, ADAPTERS, TOKENS)


@pytest.fixture
def engine(world, tmp_path, request, close_later):
    return close_later(build(world.checkpoint, world.shelf, tmp_path / "cache", **request.param))


@pytest.mark.parametrize("engine", MODES.values(), ids=MODES, indirect=True)
def test_every_adapter_in_a_mixed_batch_answers_as_peft_does(engine, world, request):
    witness, answers = RecordingRunner(engine), Answers(engine)
    bring_all(world, answers)
    assert ask(world, answers) == world.expected
    batches = witness.batches
    match request.node.callspec.id.partition("-")[2]:
        case "at_ease":
            assert max(len(batch.segments or ()) for batch in batches) == len(ADAPTERS)
        case "in_chunks":
            assert max(len(batch.token_ids) for batch in batches) == 13
        case "preempted":
            once = sum(len(ids) + TOKENS - 1 for ids in world.prompts.values())
            assert witness.tokens > once, "somebody was computed twice"
        case "few_adapters":
            assert max(len(batch.segments or ()) for batch in batches) == 2


@pytest.mark.parametrize("engine", [{}], ids=[""], indirect=True)
def test_prefix_hits_answer_as_peft_does(engine, world):
    check_prefix_hits(world, engine)


def test_the_adapters_change_what_the_model_says(world):
    plain = Answers(build(world.checkpoint, world.shelf, world.folder / "cache"))
    for name in ADAPTERS:
        plain.submit(greedy(name, world.prompts[name], max_tokens=TOKENS))
    plain.all()
    plain.engine.close()
    assert all(plain.of(name) != world.expected[name] for name in ADAPTERS)
