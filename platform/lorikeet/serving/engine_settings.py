"""From the service's settings to one engine's: names become devices, shares become bytes."""

import os
from pathlib import Path

import torch

from lorikeet.settings import Memory, Settings
from lorikeet_engine.engine_settings import EngineSettings

_DEFAULT_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}


def device_of(settings: Settings) -> str:
    """`auto` is cuda where this process sees a CUDA device."""
    if settings.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return settings.device


def engine_settings(settings: Settings, base_model: str) -> EngineSettings:
    """What the engine of one base model is told, on the machine where it will run.

    A share of memory is a share of what is free once the base model's weights are loaded.
    """
    model = settings.base_models[base_model]
    device = device_of(settings)
    dtype = settings.dtype if settings.dtype != "auto" else _DEFAULT_DTYPE[device]
    free = _free_bytes(device) - _weight_bytes(model)
    return EngineSettings(
        model=model,
        cache_dir=settings.cache_dir,
        device=device,
        dtype=dtype,
        adapter_dtype=settings.adapter_dtype if settings.adapter_dtype != "auto" else dtype,
        kv_bytes=_bytes(settings.kv_memory, free),
        max_context=settings.context,
        max_batch_tokens=settings.max_batch_tokens,
        max_running=settings.max_running,
        max_batch_adapters=settings.max_batch_adapters,
        adapter_gpu_bytes=_bytes(settings.adapter_gpu_memory, free),
        adapter_host_bytes=settings.adapter_host_memory,
        adapter_disk_bytes=settings.adapter_disk,
        max_rank=settings.max_rank,
        max_adapter_bytes=settings.max_adapter_bytes,
        overlap=device == "cuda",
    )


def _bytes(memory: Memory, free: int) -> int:
    return memory if isinstance(memory, int) else max(1, int(memory * free))


def _free_bytes(device: str) -> int:
    if device == "cuda":
        free, _total = torch.cuda.mem_get_info()
        return free
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _weight_bytes(model: Path) -> int:
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))
