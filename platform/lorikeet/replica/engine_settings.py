"""Settings of one engine, from the service's settings and this machine's device.

Only engine_settings loads torch on a machine without a GPU: the start of a service calls the other
functions, and must not take seconds.
"""

import ctypes
from typing import TYPE_CHECKING

from lorikeet.settings import Memory, Settings
from lorikeet_engine.adapter_format import AdapterMemory

if TYPE_CHECKING:
    from lorikeet_engine.settings import EngineSettings

_DEFAULT_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
_DEFAULT_KV: dict[str, int | float] = {"cpu": 256 << 20, "cuda": 0.9}
_DEFAULT_SLOT_POOL: dict[str, int | float] = {"cpu": 64 << 20, "cuda": 0.1}
_LEAST_SLOT_POOL: dict[str, int | float] = {"cpu": 16 << 20, "cuda": 0.025}


def device_of(settings: Settings) -> str:
    """Return cpu or cuda; `auto` is cuda if this process sees a CUDA device."""
    if settings.device != "auto":
        return settings.device
    try:
        ctypes.CDLL("libcuda.so.1")  # NVIDIA's driver
    except OSError:
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def engine_settings(settings: Settings, base_model: str) -> "EngineSettings":
    """Return the settings of one base model's engine. Call it on the engine's machine."""
    from lorikeet_engine.device.memory import MemoryShare
    from lorikeet_engine.settings import EngineSettings

    def memory(given: Memory, default: int | float) -> int | MemoryShare:
        size = _memory(given, default)
        return MemoryShare(size) if isinstance(size, float) else size

    device = device_of(settings)
    goal_ms = settings.inter_token_goal_ms
    return EngineSettings(
        model=settings.base_models[base_model],
        cache_dir=settings.cache_dir,
        device=device,
        dtype=_dtype(settings, device),
        weight_dtype=settings.weight_dtype[base_model],
        kv_dtype=settings.kv_dtype[base_model],
        state_dtype=settings.state_dtype[base_model],
        adapter_dtype=_adapter_dtype(settings, device),
        kv_bytes=memory(settings.kv_cache_memory, _DEFAULT_KV[device]),
        kv_host_bytes=settings.kv_host_memory or 0,
        kv_disk_bytes=settings.kv_disk or 0,
        state_bytes=None if settings.state_memory == "auto" else memory(settings.state_memory, 0),
        max_context=settings.max_context.get(base_model),
        max_batch_tokens=settings.max_batch_tokens,
        max_running=settings.max_running,
        max_batch_adapters=settings.max_batch_adapters,
        adapter_gpu_bytes=memory(settings.adapter_gpu_memory, _default_slot_pool(settings, device)),
        moving_border=settings.moving_border,
        adapter_host_bytes=settings.adapter_host_memory,
        adapter_disk_bytes=settings.adapter_disk,
        max_rank=settings.max_rank,
        max_adapter_bytes=settings.max_adapter_bytes,
        max_added_tokens=settings.max_added_tokens,
        inter_token_goal_s=goal_ms / 1000 if goal_ms is not None else None,
        overlap=device == "cuda",
        speculation=settings.speculation,
        tensor_parallel=settings.tensor_parallel[base_model],
    )


def adapter_memory(settings: Settings) -> AdapterMemory:
    """Return the sizes of adapters' memory on GPU and host, and the dtype of packed adapters.

    The GPU's size is None if its setting is a fraction of the device's free memory, not yet known.
    """
    device = device_of(settings)
    slot_pool = _memory(settings.adapter_gpu_memory, _default_slot_pool(settings, device))
    return AdapterMemory(
        _adapter_dtype(settings, device),
        slot_pool if isinstance(slot_pool, int) else None,
        settings.adapter_host_memory,
        settings.tensor_parallel,
    )


def _dtype(settings: Settings, device: str) -> str:
    return settings.dtype if settings.dtype != "auto" else _DEFAULT_DTYPE[device]


def _adapter_dtype(settings: Settings, device: str) -> str:
    given = settings.adapter_dtype
    return given if given != "auto" else _dtype(settings, device)


def _default_slot_pool(settings: Settings, device: str) -> int | float:
    return (_LEAST_SLOT_POOL if settings.moving_border else _DEFAULT_SLOT_POOL)[device]


def _memory(given: Memory, default: int | float) -> int | float:
    """Return bytes, or a share of the free memory."""
    return default if given == "auto" else given
