"""Mixtures of experts in mixed batches: every request says what PEFT says, token for token."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lorikeet_engine.engine import Engine
from tests.engine.conftest import MOE
from tests.engine.engine_driver import PAGE, Answers, RecordingRunner, build
from tests.engine.moe_adapters import PARAMETERS
from tests.engine.moe_world import MoeWorld
from tests.engine.peft_world import PeftWorld, ask, bring_all

ATTENTION = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
ADAPTERS: dict[str, dict[str, Any]] = {"attention": ATTENTION, **PARAMETERS}
TOKENS = 24
# However the work is cut, the same tokens must come out.
MODES: dict[str, dict[str, Any]] = {
    "at_ease": {},
    "in_chunks": {"max_batch_tokens": 13, "max_running": 13},
    "preempted": {"kv_pages": 10, "max_context": 112},
    "few_adapters": {"max_batch_adapters": 2},
}


@pytest.fixture(scope="module", params=MOE)
def world(
    request: pytest.FixtureRequest,
    tiny_checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> PeftWorld:
    folder = tmp_path_factory.mktemp(request.param)
    return MoeWorld(tiny_checkpoints[request.param], folder, ADAPTERS, TOKENS)


@pytest.fixture
def engine(world: PeftWorld, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = build(world.checkpoint, world.shelf, tmp_path / "cache", **request.param)
    yield engine
    engine.close()


@pytest.mark.parametrize("engine", MODES.values(), ids=MODES, indirect=True)
def test_adapters_of_experts_and_others_answer_as_peft_does_in_one_batch(
    engine: Engine, world: PeftWorld
) -> None:
    answers = Answers(engine)
    bring_all(world, answers)
    assert ask(world, answers) == world.expected


@pytest.mark.parametrize("engine", [{}], ids=[""], indirect=True)
def test_prefix_hits_answer_as_peft_does(engine: Engine, world: PeftWorld) -> None:
    witness, answers = RecordingRunner(engine), Answers(engine)
    ask(world, answers)
    first = witness.tokens
    assert ask(world, answers) == world.expected
    saved = sum((len(prompt) - 1) // PAGE * PAGE for prompt in world.prompts.values())
    assert witness.tokens - first == first - saved


def test_each_adapter_changes_what_the_model_says(world: PeftWorld) -> None:
    asked = {name: world.prompts[name] for name in ADAPTERS}
    base = world.model(None)
    assert all(
        world.generated(base, prompt) != world.expected[name] for name, prompt in asked.items()
    )
