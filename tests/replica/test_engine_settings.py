"""Values of `auto` on each device, and settings that reach the engine."""

import pytest

from lorikeet.replica.engine_settings import adapter_memory, engine_settings
from lorikeet.settings import Settings
from lorikeet_engine.device.memory import MemoryShare


def told(**environ):
    variables = {f"LORIKEET_{name}": value for name, value in environ.items()}
    return engine_settings(Settings.from_env(variables), "lorikeet-demo")


@pytest.mark.parametrize(
    ("device", "dtype", "kv", "slot_pool", "overlap"),
    [
        ("cpu", "float32", 2**28, 2**26, False),
        ("cuda", "bfloat16", MemoryShare(0.9), MemoryShare(0.1), True),
    ],
)
def test_unset_settings_follow_from_the_device(device, dtype, kv, slot_pool, overlap):
    settings = told(DEVICE=device)
    assert (settings.dtype, settings.adapter_dtype) == (dtype, dtype)
    assert (settings.kv_bytes, settings.adapter_gpu_bytes) == (kv, slot_pool)
    assert settings.overlap is overlap


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_set_memory_is_the_same_on_every_device(device):
    settings = told(DEVICE=device, KV_CACHE_MEMORY="70%", ADAPTER_GPU_MEMORY="1GiB")
    assert (settings.kv_bytes, settings.adapter_gpu_bytes) == (MemoryShare(0.7), 2**30)


def test_a_kv_cache_has_the_base_models_dtype_unless_set_to_fp8():
    assert told().kv_dtype == "auto"
    assert told(KV_DTYPE="fp8").kv_dtype == "fp8"
    two = {"BASE_MODELS": "other=/m/other,lorikeet-demo=demo/model"}
    assert told(**two, KV_DTYPE="other=fp8").kv_dtype == "auto"
    assert told(**two, KV_DTYPE="lorikeet-demo=fp8").kv_dtype == "fp8"


@pytest.mark.parametrize(
    ("device", "pool", "dtype", "holds"),
    [
        ("cpu", "auto", "float32", 2**26),
        ("cuda", "auto", "bfloat16", None),  # a share of the device: only the host's is known
        ("cuda", "1MiB", "bfloat16", 2**20),
    ],
)
def test_the_gateway_knows_the_sizes_of_arenas_that_settings_give(device, pool, dtype, holds):
    variables = {"LORIKEET_DEVICE": device, "LORIKEET_ADAPTER_GPU_MEMORY": pool}
    memory = adapter_memory(Settings.from_env(variables | {"LORIKEET_TENSOR_PARALLEL": "2"}))
    assert (memory.dtype, memory.gpu_bytes, memory.host_bytes) == (dtype, holds, 2**28)
    assert memory.gpus == {"lorikeet-demo": 2}


def test_speculation_is_off_by_default():
    assert told().speculation == "off"
    assert told(SPECULATION="lookup").speculation == "lookup"


def test_an_inter_token_goal_is_set_in_milliseconds_and_off_by_default():
    assert told().inter_token_goal_s is None
    assert told(INTER_TOKEN_GOAL_MS="12.5").inter_token_goal_s == pytest.approx(0.0125)


def test_adapters_begin_with_less_where_they_borrow_from_the_kv_cache():
    assert not told().moving_border
    settings = told(DEVICE="cuda", MOVING_BORDER="true")
    assert settings.moving_border
    assert settings.adapter_gpu_bytes == MemoryShare(0.025)
    given = told(DEVICE="cuda", MOVING_BORDER="true", ADAPTER_GPU_MEMORY="1GiB")
    assert given.adapter_gpu_bytes == 2**30
    moving = Settings.from_env({"LORIKEET_DEVICE": "cpu", "LORIKEET_MOVING_BORDER": "true"})
    assert adapter_memory(moving).gpu_bytes == 2**24
