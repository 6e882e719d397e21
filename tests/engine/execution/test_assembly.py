"""Device memory of an engine: slot pool and KV cache are sized by the memory measured as free."""

import logging
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loadtest.engine.random_model import LLAMA_3_1_8B, random_model, write_config
from lorikeet_engine.adapter import Residency
from lorikeet_engine.adapter_format import BaseShape
from lorikeet_engine.device.memory import MemoryShare, free_bytes
from lorikeet_engine.errors import SettingsError
from lorikeet_engine.execution.assembly import assemble
from lorikeet_engine.execution.memory_plan import count_pages, count_slots
from lorikeet_engine.execution.step_timer import StepTimer
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.settings import EngineSettings
from lorikeet_engine.telemetry.start_up import StartUpStages
from tests.engine.blobs import Shelf

CONFIG = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
SETTINGS = EngineSettings(
    Path(), Path(), max_running=4, max_batch_adapters=3, adapter_host_bytes=1 << 20
)
PAGE_BYTES = 2 * 2 * 16 * 1 * 128 * 4  # layers, k and v, tokens, heads, head_dim, float32
CPU = torch.device("cpu")
GIB = 1 << 30


@pytest.fixture
def config(tmp_path):
    return ModelConfig.from_folder(write_config(tmp_path / "model", CONFIG))


@pytest.fixture
def build(tmp_path):
    """Assemble an engine's parts; `facts` are the fields that the log has of them."""

    def build(**changes):
        folder = write_config(tmp_path / "model", CONFIG)
        settings = replace(SETTINGS, model=folder, cache_dir=tmp_path / "cache", **changes)
        return assemble(settings, Shelf(tmp_path / "blobs"), random_model, lambda: None)

    return build


def started(free):
    """Memory measurements of a start that has `free` bytes left."""
    start = StartUpStages(CPU)
    start.free = free
    return start


def test_kv_pages_follow_from_bytes_or_from_a_share(config):
    def pages(kv_bytes):
        settings = replace(SETTINGS, kv_bytes=kv_bytes)
        return count_pages(config, config.shape, settings, started(1000 * PAGE_BYTES))

    assert pages(10 * PAGE_BYTES) == pages(11 * PAGE_BYTES - 1) == 10
    assert pages(MemoryShare(0.25)) == 250
    assert pages(MemoryShare(1.0)) == 1000


@pytest.mark.parametrize(
    ("kv_bytes", "context", "message"),
    [
        (10 * PAGE_BYTES, 161, rf"kv_bytes={10 * PAGE_BYTES}: room for 160 tokens .* 161 needs"),
        (
            MemoryShare(0.5),
            161,
            r"kv_bytes=MemoryShare\(of_free=0.5\): room for 96 tokens .* 161 needs",
        ),
        (PAGE_BYTES - 1, None, "room for 0 tokens"),
        (13 * PAGE_BYTES, None, r"room for 208 tokens in 0\.00 GiB"),
    ],
    ids=["bytes", "share", "not one page", "more than is free"],
)
def test_too_little_memory_is_refused_with_the_numbers_and_the_remedy(
    config, kv_bytes, context, message
):
    settings = replace(SETTINGS, kv_bytes=kv_bytes, max_context=context)
    with pytest.raises(SettingsError, match=message) as refused:
        count_pages(config, config.shape, settings, started(12 * PAGE_BYTES))
    assert "are left: lower max_context, adapter_gpu_bytes" in refused.value.message


def test_a_share_of_memory_is_above_0_and_at_most_1():
    for of_free in (0.0, -0.1, 1.01):
        with pytest.raises(SettingsError, match="above 0 and up to 1"):
            MemoryShare(of_free)


def test_a_stage_that_runs_out_of_memory_names_the_bytes_of_all_stages():
    start = StartUpStages(CPU)
    with start.stage("weights"):
        pass
    start.bytes["weights"] = 15 * GIB
    with (
        pytest.raises(SettingsError, match=r"no room for the slot pool: .* 15\.00 GiB for the w"),
        start.stage("slot pool"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory.")


def test_memory_that_other_processes_free_in_a_stage_is_not_taken_from_it(monkeypatch):
    free = iter((100, 140, 120))
    monkeypatch.setattr("lorikeet_engine.telemetry.start_up.free_bytes", lambda _: next(free))
    start = StartUpStages(CPU)
    for stage in ("slot pool", "weights"):
        with start.stage(stage):
            pass
    facts = start.facts
    sizes = facts["slot_pool_bytes"], facts["weights_bytes"], facts["free_bytes"]
    assert sizes == (0, 20, 120)


def test_other_errors_of_a_stage_are_raised_unchanged():
    with pytest.raises(RuntimeError, match="illegal"), StartUpStages(CPU).stage("weights"):
        raise RuntimeError("illegal memory access")


def test_the_table_has_rows_for_thousands_of_small_adapters_and_for_all_of_a_step():
    shape = BaseShape.from_config(LLAMA_3_1_8B)
    rank_8_on_q_and_v = 8 * 32 * (4096 + 4096 + 4096 + 1024)
    assert count_slots(2000 * rank_8_on_q_and_v, shape, at_least=128) >= 2000
    assert count_slots(0, shape, at_least=128) == 128


def test_the_log_has_the_memory_and_time_of_each_stage(build, caplog):
    caplog.set_level(logging.INFO, "lorikeet_engine.execution.assembly")
    parts = build(kv_bytes=10 * PAGE_BYTES)
    (record,) = caplog.records
    assert record.getMessage() == "engine_assembled"
    assert record.kv_tokens == parts.kv_pages * SETTINGS.page_size == 160
    assert record.weights_s > 0
    assert record.free_bytes > 0


def test_shares_are_of_the_memory_free_at_the_engines_start(build, monkeypatch):
    monkeypatch.setattr(
        "lorikeet_engine.telemetry.start_up.free_bytes", lambda device: 100 * PAGE_BYTES
    )
    parts = build(kv_bytes=MemoryShare(0.5), adapter_gpu_bytes=MemoryShare(0.25))
    assert parts.kv_pages == 50
    assert parts.tiers.status()[Residency.GPU].capacity_bytes == 25 * PAGE_BYTES


def test_an_engine_that_cannot_start_leaves_no_threads(build):
    before = threading.active_count()
    with pytest.raises(SettingsError):
        build(kv_bytes=1)
    assert threading.active_count() == before


@pytest.mark.gpu
class TestOnGpu:
    @pytest.fixture
    def settings(self):
        return {"device": "cuda", "dtype": "bfloat16", "adapter_dtype": "bfloat16"}

    def test_the_kv_cache_takes_its_share_of_the_memory_that_all_else_leaves(
        self, build, settings, caplog
    ):
        caplog.set_level(logging.INFO, "lorikeet_engine.execution.assembly")
        before = free_bytes(torch.device("cuda"))
        parts = build(**settings, kv_bytes=MemoryShare(0.5), adapter_gpu_bytes=MemoryShare(0.1))
        facts = vars(caplog.records[-1])
        kv_bytes = parts.kv_pages * PAGE_BYTES // 2
        beside = facts["weights_bytes"] + facts["slot_pool_bytes"] + facts["steps_and_graphs_bytes"]
        assert abs(kv_bytes - (before - beside) / 2) < 64 << 20
        assert before / 10 - (64 << 20) < facts["slot_pool_bytes"] < before / 9
        assert abs(facts["free_bytes"] - kv_bytes) < 256 << 20

    def test_an_engine_that_does_not_fit_beside_other_processes_is_refused(self, build, settings):
        device = torch.device("cuda")
        torch.cuda.empty_cache()  # torch could reuse memory that earlier tests left
        taken = torch.empty(free_bytes(device) - 2 * GIB, dtype=torch.uint8, device=device)
        with pytest.raises(SettingsError, match=r"no room for the slot pool: of 2\.00 GiB free"):
            build(**settings, adapter_gpu_bytes=3 * GIB)
        with pytest.raises(SettingsError, match=r"kv_bytes=.* left"):
            build(**settings, kv_bytes=2 * GIB)
        del taken
        torch.cuda.empty_cache()  # or later tests would keep its one large segment

    def test_steps_are_timed_on_pages_of_random_numbers_which_are_zeroed_afterwards(
        self, build, settings, monkeypatch
    ):
        spreads, shortest_s = [], StepTimer.shortest_s

        def watched(steps, chunks):
            spreads.append(steps._runner.kv.float().std().item())
            return shortest_s(steps, chunks)

        monkeypatch.setattr(StepTimer, "shortest_s", watched)
        parts = build(**settings, kv_bytes=1000 * PAGE_BYTES)
        assert len(spreads) > 5
        assert min(spreads) > 0.5
        assert not parts.runner.kv.any()
