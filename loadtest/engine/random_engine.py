"""Engine of random weights with random adapters on its host: the engine of the benchmarks."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadtest.engine.random_adapters import (
    EmptySource,
    Targets,
    fill_device,
    fill_host,
    random_layout,
    random_refs,
)
from loadtest.engine.random_model import LLAMA_3_1_8B, random_model, shape_of, write_config
from lorikeet_engine.engine import Engine, EngineSettings
from lorikeet_engine.residency.disk.cache import AdapterSource
from lorikeet_engine.residency.packed_image import PackedLayout

RANK = 16
NO_OTHERS: Mapping[Targets, int] = {}
# Batch sizes of the comparison with vLLM, and KV pages for all its sequences.
SETTINGS = EngineSettings(
    model=Path(),
    cache_dir=Path(),
    device="cuda",
    dtype="bfloat16",
    adapter_dtype="bfloat16",
    kv_bytes=20 << 30,
    max_context=2048,
    max_batch_tokens=8192,
    max_running=256,
    max_batch_adapters=128,
    max_rank=RANK,
)


def random_engine(
    folder: Path,
    *,
    adapters: int = 0,
    room: int = 0,
    on_host: int | None = None,
    others: Mapping[Targets, int] = NO_OTHERS,
    config: Mapping[str, Any] = LLAMA_3_1_8B,
    settings: EngineSettings = SETTINGS,
) -> Engine:
    """Build an engine with `random_refs(adapters)`, of rank RANK, on its host.

    folder: folder for temporary files.
    room: number of adapters for which the GPU has room.
    on_host: number of adapters for which the host has room, if not for all; then all are on the
        GPU, which must have room for them, and none stays on the host.
    others: further adapters by their targets, on the host; the GPU has room for all of them.
    settings: all settings except folders and memory for adapters.
    """
    most = min(room + sum(others.values()), settings.max_batch_adapters)
    draft = settings.speculation == "draft"  # takes one, though it is one of the others
    settings = replace(settings, max_batch_adapters=max(1, most) + draft)
    at_once = adapters if on_host is None else min(on_host, adapters)
    engine, layout = roomy_engine(folder, EmptySource(), room, at_once, config, settings, others)
    fill = fill_host if at_once == adapters else fill_device
    fill(engine._tiers, layout, random_refs(adapters))
    for on, count in others.items():
        their_layout = random_layout(shape_of(config), RANK, on, settings.tensor_parallel)
        fill_host(engine._tiers, their_layout, random_refs(count, on))
    return engine


def roomy_engine(
    folder: Path,
    source: AdapterSource,
    on_gpu: int,
    on_host: int,
    config: Mapping[str, Any],
    settings: EngineSettings,
    others: Mapping[Targets, int] = NO_OTHERS,
    rank: int = RANK,
) -> tuple[Engine, PackedLayout]:
    """Build an engine with memory for adapters, but with no adapters yet; return it and the layout
    of an adapter.

    source: where the engine fetches adapters.
    on_gpu, on_host: number of adapters of `rank` for which GPU and host have room.
    others: number of further adapters by their targets, for which both have room too.
    settings: all settings except folders and memory for adapters.
    """
    shape, itemsize = shape_of(config), settings.torch_adapter_dtype.itemsize
    layout = random_layout(shape, rank, world=settings.tensor_parallel)
    gpu_elements, host_elements = on_gpu * layout.elements, on_host * layout.image_elements
    for on, count in others.items():
        other = random_layout(shape, rank, on, settings.tensor_parallel)
        gpu_elements += count * other.elements
        host_elements += count * other.image_elements
    settings = replace(
        settings,
        model=write_config(folder / "model", config),
        cache_dir=folder / "cache",
        adapter_gpu_bytes=gpu_elements * itemsize,
        adapter_host_bytes=host_elements * itemsize,
    )
    return Engine(settings, source, random_model), layout
