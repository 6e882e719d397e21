"""The large parts of an engine, made from its settings: model, adapters, KV pages, runner."""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from lorikeet_engine.adapter_format import AdapterLimits, BaseShape
from lorikeet_engine.costs import StepCosts
from lorikeet_engine.device.memory import gib, resolve
from lorikeet_engine.errors import SettingsError
from lorikeet_engine.execution.calibration import measure_step_costs
from lorikeet_engine.execution.cuda_graphs import CudaGraphs, StepLimits
from lorikeet_engine.execution.model_runner import ModelRunner
from lorikeet_engine.execution.warm_up import every_kind_of_step, largest_step
from lorikeet_engine.kernels.attention import (
    AttentionBackend,
    AttentionShape,
    CapturableAttention,
    choose_attention,
)
from lorikeet_engine.kernels.lora.types import LoraWeights
from lorikeet_engine.models import LlamaModel, ModelConfig
from lorikeet_engine.residency.disk.cache import AdapterSource
from lorikeet_engine.residency.tiers import Tiers
from lorikeet_engine.scheduling.step_budget import StepBudget
from lorikeet_engine.settings import EngineSettings
from lorikeet_engine.telemetry.start_up import DeviceRoom, StartUp

log = logging.getLogger(__name__)

LoadModel = Callable[[Path, torch.device, torch.dtype, int | None], LlamaModel]


@dataclass(frozen=True, slots=True)
class Assembly:
    """What an engine works with, all its memory allocated and its kernels compiled.

    step_costs: as measured. rank_budget: for the goal of the settings, if there is one.
    """

    runner: ModelRunner
    tiers: Tiers
    kv_pages: int
    step_costs: StepCosts
    rank_budget: StepBudget | None


def assemble(
    settings: EngineSettings, source: AdapterSource, load: LoadModel, wake: Callable[[], None]
) -> Assembly:
    """Load the model and allocate all the memory that serving needs.

    load: reads the base model, as load_model does. wake: called when adapters have arrived.
    Raises ModelError, and SettingsError where memory or the device's attention kernels lack.
    """
    device = torch.device(settings.device)
    start = StartUp(device)
    with start.stage("weights"):
        model = load(settings.model, device, settings.torch_dtype, settings.max_context)
    with start.stage("slot pool"):
        tiers = build_tiers(model.config.shape, settings, source, device, wake, start.free)
    try:
        runner, kv_pages = build_runner(model, tiers.weights, settings, start)
        with start.stage("step costs"):
            step_costs = measure_step_costs(
                runner, kv_pages, tiers.weights, model.config.shape, settings
            )
    except BaseException:
        tiers.close()
        raise
    log.info("engine_assembled", extra=start.facts | {"kv_tokens": kv_pages * settings.page_size})
    goal_s = settings.inter_token_goal_s
    rank_budget = StepBudget(goal_s, step_costs, runner.sizes) if goal_s is not None else None
    return Assembly(runner, tiers, kv_pages, step_costs, rank_budget)


def build_tiers(
    shape: BaseShape,
    settings: EngineSettings,
    source: AdapterSource,
    device: torch.device,
    wake: Callable[[], None],
    free: int,
) -> Tiers:
    """Where adapters live and how they move, with both arenas allocated.

    free: bytes of the device of which the slot pool may be a share.
    """
    dtype = settings.torch_adapter_dtype
    gpu_bytes = resolve(settings.adapter_gpu_bytes, free)
    return Tiers(
        shape,
        AdapterLimits(settings.max_rank, settings.max_adapter_bytes),
        source,
        device=device,
        dtype=dtype,
        gpu_bytes=gpu_bytes,
        host_bytes=settings.adapter_host_bytes,
        disk_bytes=settings.adapter_disk_bytes,
        cache_dir=settings.cache_dir,
        max_slots=count_slots(gpu_bytes // dtype.itemsize, shape, settings.max_batch_adapters),
        wake=wake,
    )


def count_slots(elements: int, shape: BaseShape, at_least: int) -> int:
    """Rows for the adapters that an arena of so many elements can hold.

    Hardly any adapter is smaller than one of rank 4 on q_proj and v_proj, the first and the last
    linear of the first group, and the row is small beside that. at_least: the adapters of a step,
    which have rows in any arena.
    """
    qkv = next(iter(shape.groups.values()))
    widths = sum(sum(shape.dims(linear)) for linear in {qkv[0], qkv[-1]})
    return max(at_least, elements // (4 * shape.layers * widths))


def count_pages(config: ModelConfig, settings: EngineSettings, room: DeviceRoom) -> int:
    """The KV pages that the settings and what is free have room for.

    Raises SettingsError when that is too little for one sequence, or more than is free.
    """
    page_bytes = allocate_kv(config, settings, 1, torch.device("meta")).nbytes
    kv_bytes = resolve(settings.kv_bytes, room.free)
    pages, context = kv_bytes // page_bytes, settings.max_context or settings.page_size
    needed = -(-context // settings.page_size)
    if pages >= needed and kv_bytes <= room.free:
        return pages
    raise SettingsError(
        f"kv_bytes={settings.kv_bytes}: room for {pages * settings.page_size} tokens in "
        f"{gib(kv_bytes)}, and one sequence of {context} needs {gib(needed * page_bytes)}; "
        f"{room}: lower max_context, adapter_gpu_bytes or max_batch_tokens, or change kv_bytes"
    )


def allocate_kv(
    config: ModelConfig, settings: EngineSettings, pages: int, device: torch.device
) -> torch.Tensor:
    """[layers, 2, pages, page_size, kv_heads, head_dim]."""
    shape = config.shape
    size = (shape.layers, 2, pages, settings.page_size, shape.kv_heads, shape.head_dim)
    return torch.zeros(size, dtype=settings.torch_dtype, device=device)


def build_runner(
    model: LlamaModel, weights: LoraWeights, settings: EngineSettings, start: StartUp
) -> tuple[ModelRunner, int]:
    """A runner and how many KV pages it has; on CUDA with all kernels compiled.

    What steps and graphs take is measured, not reckoned: on CUDA the engine is first tried out
    with one KV page, and then built again with all the pages that the trial has left room for.
    Graphs cannot be kept, since they hold the address of the KV pages. Raises SettingsError.
    """
    device, c = model.device, model.config.shape
    shape = AttentionShape(c.heads, c.kv_heads, c.head_dim, settings.page_size, model.dtype)
    attention = choose_attention(shape, device)

    def build(pages: int) -> ModelRunner:
        kv = allocate_kv(model.config, settings, pages, device)
        return ModelRunner(
            model, attention, weights, kv, _capture(model, attention, weights, kv, settings)
        )

    if device.type == "cuda":
        with start.stage("steps and graphs"):
            trial = build(1)
            largest_step(trial, settings)
            every_kind_of_step(trial, settings)
        del trial
        gc.collect()
        torch.cuda.empty_cache()
    pages = count_pages(model.config, settings, start)
    with start.stage("KV cache"):
        runner = build(pages)
        if device.type == "cuda":
            largest_step(runner, settings)  # takes its memory back before anybody else does
    return runner, pages


def _capture(
    model: LlamaModel,
    attention: AttentionBackend,
    weights: LoraWeights,
    kv: torch.Tensor,
    settings: EngineSettings,
) -> CudaGraphs | None:
    """The graphs of small steps where attention can be captured."""
    if not isinstance(attention, CapturableAttention):
        return None
    limits = StepLimits(
        tokens=settings.max_batch_tokens,
        adapters=settings.max_batch_adapters,
        rank=settings.max_rank,
        pages=settings.max_running * -(-model.config.max_context // settings.page_size),
    )
    return CudaGraphs(model, attention, weights, kv, limits)
