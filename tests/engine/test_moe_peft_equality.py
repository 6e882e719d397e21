"""Mixtures of experts in mixed batches: every request says what PEFT says, token for token."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorikeet_engine.engine import Engine
from tests.engine.conftest import MOE
from tests.engine.engine_driver import Answers, build
from tests.engine.moe_adapters import PARAMETERS
from tests.engine.moe_world import MoeWorld
from tests.engine.peft_world import MODES, PeftWorld, ask, bring_all, check_prefix_hits

ATTENTION = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
ADAPTERS: dict[str, dict[str, Any]] = {"attention": ATTENTION, **PARAMETERS}
TOKENS = 24


@pytest.fixture(scope="module", params=MOE)
def world(
    request: pytest.FixtureRequest,
    tiny_checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> PeftWorld:
    folder = tmp_path_factory.mktemp(request.param)
    return MoeWorld(tiny_checkpoints[request.param], folder, ADAPTERS, TOKENS)


@pytest.fixture
def engine(
    world: PeftWorld,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    close_later: Callable[[Engine], Engine],
) -> Engine:
    return close_later(build(world.checkpoint, world.shelf, tmp_path / "cache", **request.param))


@pytest.mark.parametrize("engine", MODES.values(), ids=MODES, indirect=True)
def test_adapters_of_experts_and_others_answer_as_peft_does_in_one_batch(
    engine: Engine, world: PeftWorld
) -> None:
    answers = Answers(engine)
    bring_all(world, answers)
    assert ask(world, answers) == world.expected


@pytest.mark.parametrize("engine", [{}], ids=[""], indirect=True)
def test_prefix_hits_answer_as_peft_does(engine: Engine, world: PeftWorld) -> None:
    check_prefix_hits(world, engine)


def test_each_adapter_changes_what_the_model_says(world: PeftWorld) -> None:
    asked = {name: world.prompts[name] for name in ADAPTERS}
    base = world.model(None)
    assert all(
        world.generated(base, prompt) != world.expected[name] for name, prompt in asked.items()
    )
