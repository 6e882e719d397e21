"""The large parts of an engine, made from its settings: KV pages, runner, adapters."""

import json
from collections.abc import Callable

import torch

from lorikeet_engine.adapter_format import AdapterLimits, BaseShape
from lorikeet_engine.decode_graphs import DecodeGraphs, StepLimits
from lorikeet_engine.engine_settings import EngineSettings
from lorikeet_engine.kernels.attention import (
    AttentionShape,
    CapturableAttention,
    choose_attention,
)
from lorikeet_engine.kernels.lora.types import LoraWeights
from lorikeet_engine.kv_cache import count_pages
from lorikeet_engine.models import Model, ModelConfig
from lorikeet_engine.residency.disk import AdapterSource
from lorikeet_engine.residency.tiers import Tiers
from lorikeet_engine.runner import Runner

# Rows of the table of adapters, some KiB each: more than an arena holds in practice.
_MAX_SLOTS = 1024


def allocate_kv(
    config: ModelConfig, settings: EngineSettings, device: torch.device
) -> torch.Tensor:
    """[layers, 2, pages, page_size, kv_heads, head_dim], as many pages as kv_bytes holds.

    Raises SettingsError when that is too little for one sequence.
    """
    page = (settings.page_size, config.kv_heads, config.head_dim)
    elements = config.layers * 2 * settings.page_size * config.kv_heads * config.head_dim
    context = settings.max_context or settings.page_size
    pages = count_pages(
        settings.kv_bytes, elements * settings.torch_dtype.itemsize, settings.page_size, context
    )
    shape = (config.layers, 2, pages, *page)
    return torch.zeros(shape, dtype=settings.torch_dtype, device=device)


def build_runner(
    model: Model, weights: LoraWeights, kv: torch.Tensor, settings: EngineSettings, context: int
) -> Runner:
    """A runner; where attention can be captured, with the graphs of decode steps.

    kv: as allocate_kv gives it. context: the longest sequence in tokens. Raises SettingsError
    when the device's attention kernels are not installed.
    """
    c, page_size = model.config, settings.page_size
    shape = AttentionShape(c.heads, c.kv_heads, c.head_dim, page_size, model.dtype)
    attention = choose_attention(shape, model.device)
    if not isinstance(attention, CapturableAttention):
        return Runner(model, attention, weights, kv)
    limits = StepLimits(
        sequences=settings.max_running,
        adapters=settings.max_batch_adapters,
        rank=settings.max_rank,
        pages=settings.max_running * -(-context // page_size),
    )
    graphs = DecodeGraphs(model, attention, weights, kv, limits)
    return Runner(model, attention, weights, kv, graphs)


def build_tiers(
    settings: EngineSettings, source: AdapterSource, device: torch.device, wake: Callable[[], None]
) -> Tiers:
    """Where adapters live and how they move, with both arenas allocated."""
    config = json.loads((settings.model / "config.json").read_text())
    return Tiers(
        BaseShape.from_config(config),
        AdapterLimits(settings.max_rank, settings.max_adapter_bytes),
        source,
        device=device,
        dtype=settings.torch_adapter_dtype,
        gpu_bytes=settings.adapter_gpu_bytes,
        host_bytes=settings.adapter_host_bytes,
        disk_bytes=settings.adapter_disk_bytes,
        cache_dir=settings.cache_dir,
        max_slots=_MAX_SLOTS,
        wake=wake,
    )
