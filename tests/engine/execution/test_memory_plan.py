"""An engine divides a device's memory as planned."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loadtest.engine.random_model import GEMMA_3_12B, LLAMA_3_1_8B, write_config
from lorikeet_engine.device.memory import MemoryShare
from lorikeet_engine.engine import Engine
from lorikeet_engine.errors import ModelError, SettingsError
from lorikeet_engine.execution.memory_plan import plan_memory
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.llama import load_model, rehearse_load
from lorikeet_engine.parallel.shard import Shard
from lorikeet_engine.scheduling.page_needs import PageNeeds
from lorikeet_engine.settings import EngineSettings
from tests.engine.blob_shelf import BlobShelf
from tests.engine.conftest import FAMILIES, MOE
from tests.engine.engine_driver import Answers, greedy, prompt
from tests.engine.tiny_engine import SETTINGS, tiny_engine

GIB = 1 << 30
WEIGHTS = 16_060_522_496  # Llama-3.1-8B in bfloat16
ON_GPU = replace(
    SETTINGS,
    device="cuda",
    dtype="bfloat16",
    adapter_dtype="bfloat16",
    kv_bytes=MemoryShare(0.9),
    adapter_gpu_bytes=MemoryShare(0.1),
    max_running=256,
    max_batch_tokens=8192,
)


@pytest.fixture
def llama_8b(tmp_path: Path) -> ModelConfig:
    return ModelConfig.from_folder(write_config(tmp_path / "8b", LLAMA_3_1_8B))


def test_a_rehearsal_finds_the_tensors_of_a_load(
    tiny_checkpoints: dict[str, Path],
) -> None:
    for name in (*FAMILIES, *MOE):
        folder = tiny_checkpoints[name]
        config, weights = rehearse_load(folder, torch.float32)
        assert config == load_model(folder, torch.device("cpu"), torch.float32).config
        stored = folder / "model.safetensors"
        assert weights == pytest.approx(stored.stat().st_size, rel=0.05)
        half = rehearse_load(folder, torch.bfloat16)[1]
        # whose norms, or whose router's scales, are float32
        if not (config.norms_plus_one or config.experts_beside):
            assert half == weights / 2
        assert weights / 2 <= half < 0.51 * weights


def test_a_rehearsal_misses_a_shard(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_checkpoints["sharded"], tmp_path / "model")
    rehearse_load(folder, torch.float32)
    gone = sorted(folder.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ModelError, match="does not exist") as lacking:
        rehearse_load(folder, torch.float32)
    assert lacking.value.field == gone.name


def test_a_rehearsal_sees_tensors_of_another_model(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_checkpoints["llama"], tmp_path / "model")
    shutil.copy(tiny_checkpoints["qwen3"] / "model.safetensors", folder)
    with pytest.raises(ModelError, match="want"):
        rehearse_load(folder, torch.float32)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_an_engine_has_the_kv_tokens_that_were_planned(tmp_path: Path, kv_dtype: str) -> None:
    with_room = replace(SETTINGS, kv_bytes=1 << 20, kv_dtype=kv_dtype)
    engine = tiny_engine(tmp_path, settings=with_room)
    try:
        pages = engine.status().live.kv_pages_total
    finally:
        engine.close()
    config = ModelConfig.from_folder(tmp_path / "model")
    plan = plan_memory(config, 0, with_room, GIB)
    assert plan.kv_tokens == pages * with_room.page_size
    assert plan.kv <= 1 << 20


def test_the_plan_of_an_8b_model_on_an_h200_matches_measurements(
    llama_8b: ModelConfig,
) -> None:
    """docs/benchmarks.md: 14.1 GiB of weights that share embeddings, 12.5 for adapters, 3.8 for
    steps, and 97.1 for 795,216 tokens.
    """
    plan = plan_memory(llama_8b, int(14.1 * GIB), ON_GPU, int(139.1 * GIB))
    assert plan.slot_pool == pytest.approx(12.5 * GIB, rel=0.01)
    assert plan.steps == pytest.approx(3.8 * GIB, rel=0.1)
    assert plan.kv_tokens == pytest.approx(795_216, rel=0.01)


def test_an_fp8_cache_holds_twice_the_tokens_of_a_16_bit_one(llama_8b: ModelConfig) -> None:
    plans = [
        plan_memory(llama_8b, WEIGHTS, replace(ON_GPU, kv_dtype=kv_dtype), 80 * GIB)
        for kv_dtype in ("auto", "fp8")
    ]
    assert plans[1].kv_tokens == pytest.approx(2 * plans[0].kv_tokens, abs=ON_GPU.page_size)
    assert plans[1].kv == pytest.approx(plans[0].kv, rel=0.001)


def test_each_of_two_gpus_has_room_for_more_than_twice_the_tokens(llama_8b: ModelConfig) -> None:
    alone = plan_memory(llama_8b, WEIGHTS, ON_GPU, 80 * GIB)
    shared = plan_memory(llama_8b, WEIGHTS // 2, ON_GPU, 80 * GIB, Shard(0, 2))
    assert shared.kv / shared.kv_tokens == alone.kv / alone.kv_tokens / 2
    assert shared.kv_tokens > 2 * alone.kv_tokens
    assert shared.steps < alone.steps


@pytest.mark.parametrize("step_tokens", [2048, 8192])
def test_layers_with_windows_take_hardly_more_memory_than_their_windows(
    tmp_path: Path, step_tokens: int
) -> None:
    context, settings = 32_768, replace(ON_GPU, max_batch_tokens=step_tokens, max_context=32_768)
    config = ModelConfig.from_folder(write_config(tmp_path / "12b", GEMMA_3_12B), context)
    plan = plan_memory(config, 24 * GIB, settings, 80 * GIB)
    token = 2 * 8 * 256 * 2  # bytes of a layer
    between_steps = 8 * context + 40 * (1024 + settings.page_size)
    assert plan.kv / plan.kv_tokens * context <= 1.1 * token * between_steps
    assert plan.kv_of_longest <= 1.1 * token * (8 * context + 40 * (1024 + step_tokens))
    assert plan.kv_tokens > 4.5 * (plan.kv // (48 * token))
    if step_tokens == 2048:  # as docs/own-model.md states
        assert round(plan.kv_of_longest / GIB, 1) == 2.9
        assert round(PageNeeds(16, (None, *[1024] * 5)).between_steps(context) / 1024, 1) == 2.3


def test_an_engine_with_windows_serves_the_longest_planned_sequence(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Give the engine exactly the memory of one sequence of the whole context."""
    folder, context = tiny_checkpoints["olmo3"], 300
    settings = EngineSettings(
        model=folder, cache_dir=tmp_path / "cache", max_context=context, max_batch_tokens=40,
        kv_bytes=1 << 20, max_running=4, adapter_gpu_bytes=1 << 20, adapter_host_bytes=1 << 20,
    )  # fmt: skip
    config = ModelConfig.from_folder(folder, context)
    needed = plan_memory(config, 0, settings, GIB).kv_of_longest
    with pytest.raises(SettingsError, match=f"one sequence of {context} needs"):
        plan_memory(config, 0, replace(settings, kv_bytes=needed - 1), GIB)
    settings = replace(settings, kv_bytes=needed)
    assert plan_memory(config, 0, settings, GIB).kv_tokens == context
    engine = Engine(settings, BlobShelf(tmp_path / "blobs"))
    answers = Answers(engine)
    for name in ("first", "second"):
        answers.submit(greedy(name, prompt(250), max_tokens=50))
    answers.all()
    assert answers.of("first") == answers.of("second")
    assert len(answers.of("first")) == 50
    assert engine.info.max_context == context
    engine.close()


def test_the_part_that_does_not_fit_is_named(llama_8b: ModelConfig) -> None:
    with pytest.raises(SettingsError, match=r"no room for the weights, 14\.96 GiB"):
        plan_memory(llama_8b, WEIGHTS, ON_GPU, 8 * GIB)
    greedy = replace(ON_GPU, adapter_gpu_bytes=20 * GIB)
    with pytest.raises(SettingsError, match="no room for the slot pool, 20"):
        plan_memory(llama_8b, WEIGHTS, greedy, 24 * GIB)
    with pytest.raises(SettingsError, match="no room for the steps and graphs"):
        plan_memory(llama_8b, WEIGHTS, ON_GPU, 16 * GIB)
    long = replace(ON_GPU, max_context=131_072)
    with pytest.raises(SettingsError, match=r"one sequence of 131072 needs 16\.00 GiB"):
        plan_memory(llama_8b, WEIGHTS, long, 24 * GIB)
