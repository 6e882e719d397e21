"""doctor counts the states of a hybrid, and says what to lower where they do not fit."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lorikeet.doctor.finding import Finding, Severity
from lorikeet.doctor.memory import check_device_memory
from lorikeet.doctor.planned_start import PlannedStart
from lorikeet_engine.errors import EngineError, SettingsError
from lorikeet_engine.execution.memory_plan import MemoryPlan, plan_memory
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.settings import EngineSettings
from tests.engine.conftest import HYBRID, MAMBA, SIZES


def examined(plan: MemoryPlan | EngineError) -> Finding:
    start: Any = SimpleNamespace(
        device_free=1 << 30,
        plans={"qwen": plan},
        device="cpu",
        settings=SimpleNamespace(tensor_parallel={"qwen": 1}),
    )
    (finding,) = check_device_memory(cast("PlannedStart", start))
    return finding


LAYERS = {"num_hidden_layers": len(MAMBA["nemotron_h"]["layers_block_type"])}


@pytest.fixture(params=[HYBRID["qwen3_5_text"], MAMBA["nemotron_h"] | LAYERS])
def planned(request, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SIZES | request.param))
    settings = EngineSettings(tmp_path, tmp_path, max_running=8, state_bytes=1 << 20)
    return ModelConfig.from_folder(tmp_path), settings


def test_the_memory_of_a_hybrid_says_how_many_states_are_cached(planned):
    config, settings = planned
    plan = plan_memory(config, 0, settings, 1 << 30)
    found = examined(plan)
    assert found.severity is not Severity.PROBLEM
    states = f"for LORIKEET_MAX_RUNNING requests and {plan.cached_states} cached ones, KV"
    assert states in found.message


def test_too_many_running_requests_for_the_states_are_a_problem_with_a_remedy(planned):
    config, settings = planned
    with pytest.raises(SettingsError) as refused:
        plan_memory(config, 0, replace(settings, max_running=2000), 1 << 30)
    found = examined(refused.value)
    assert found.severity is Severity.PROBLEM
    assert "max_running=2000 needs 2001" in found.message
    assert "lower LORIKEET_MAX_RUNNING" in found.fix
    assert "LORIKEET_STATE_DTYPE=qwen=bfloat16" in found.fix
