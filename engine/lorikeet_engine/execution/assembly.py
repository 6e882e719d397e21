"""Assembly of an engine from its settings: model, adapter tiers, KV pages and runner."""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from lorikeet_engine.adapter_format import (
    AdapterLimits,
    BaseShape,
    Quantization,
    quantized_linears,
    read_config,
    served_quantization,
)
from lorikeet_engine.costs import StepCosts
from lorikeet_engine.device.border_memory import can_move
from lorikeet_engine.device.memory import resolve
from lorikeet_engine.execution.border import Border, RankBorder
from lorikeet_engine.execution.calibration import measure_step_costs
from lorikeet_engine.execution.memory_plan import (
    check_speculation,
    count_slots,
    count_states_and_pages,
    page_needs,
)
from lorikeet_engine.execution.page_copies import (
    AllocateHostPages,
    PageCopies,
    allocate_rank_memory,
)
from lorikeet_engine.execution.rank_rows import RankRows
from lorikeet_engine.execution.ranks import BuildRunner, CountPages, OneRank, start_ranks
from lorikeet_engine.execution.runner_parts import RunnerParts
from lorikeet_engine.execution.state_buffers import StateBuffers
from lorikeet_engine.execution.steps import ModelRunner
from lorikeet_engine.execution.warm_up import run_every_kind_of_step, run_largest_step
from lorikeet_engine.kernels import w4a16
from lorikeet_engine.kernels.fp8_kv import FP8_KV
from lorikeet_engine.kernels.lora.types import LoraWeights
from lorikeet_engine.kernels.moe import mxfp4
from lorikeet_engine.models.llama import LlamaModel
from lorikeet_engine.models.served_rows import ServedRows
from lorikeet_engine.parallel.rank_group import RankGroup
from lorikeet_engine.request import DraftSource
from lorikeet_engine.residency.disk.cache import AdapterSource
from lorikeet_engine.residency.tiers import Tiers
from lorikeet_engine.sampling.penalties import Penalties
from lorikeet_engine.sampling.sampler import Sampler
from lorikeet_engine.scheduling.draft_budget import DraftBudget
from lorikeet_engine.scheduling.forced_budget import ForcedBudget, ForcedPieces
from lorikeet_engine.scheduling.step_budget import StepBudget
from lorikeet_engine.settings import EngineSettings
from lorikeet_engine.telemetry.start_up import StartUpStages
from lorikeet_engine.telemetry.status import EngineInfo

log = logging.getLogger(__name__)


class LoadModel(Protocol):
    """Function that reads the base model from its folder; load_model is one."""

    def __call__(
        self,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
        max_context: int | None = None,
        rounding: Quantization | None = None,
        ranks: RankGroup | None = None,
        *,
        packed: bool = False,
        mtp: bool = False,
    ) -> LlamaModel:
        """Read the base model, or this rank's part of it, onto the device.

        max_context: upper bound of the context, in tokens; None: the model's own.
        rounding: NF4 or FP8, to which linears are rounded while they are loaded; None: as stored.
        ranks: processes that share the model; None: this process holds all of it.
        packed: whether linears of 4 bits stay packed; False: they become floats.
        mtp: whether to read the head for multi-token prediction.
        """


@dataclass(frozen=True, slots=True)
class Assembly:
    """Parts of an engine, with all memory allocated and all kernels compiled.

    kv_pages: number of KV pages in the runner's KV cache.
    step_budget: bounds the work of steps.
    forced_budget: bounds a step's forced tokens: the only tokens that a grammar allows, appended
        without sampling.
    draft_budget: chooses the drafted tokens of steps; None without speculation.
    ranks: processes that compute the model; just this one without tensor parallelism.
    border: moves memory between adapters and KV pages; None with a fixed border.
    page_copies: copies of KV pages to and from host memory; None without memory for them.
    """

    runner: ModelRunner
    sampler: Sampler
    tiers: Tiers
    kv_pages: int
    info: EngineInfo
    step_budget: StepBudget
    forced_budget: ForcedBudget
    draft_budget: DraftBudget | None
    ranks: OneRank
    page_copies: PageCopies | None
    border: Border | None

    def close(self) -> None:
        """Stop loading adapters, and end the processes of the other GPUs."""
        self.tiers.close()
        if self.page_copies is not None:
            self.page_copies.close()  # before the memory of the pages goes
        try:
            if self.border is not None:
                self.border.close()
        finally:
            self.ranks.close()


def assemble(
    settings: EngineSettings, source: AdapterSource, load: LoadModel, wake: Callable[[], None]
) -> Assembly:
    """Load the model and allocate all the memory that serving needs.

    source: store from which adapters are downloaded.
    load: reads the base model from its folder onto the device.
    wake: called whenever adapters have been loaded.

    Raises ModelError if the base model cannot be loaded. Raises SettingsError if the device has too
    little memory or no attention kernels for the model.
    """
    ranks = start_ranks(settings, load)
    try:
        return _assemble(settings, source, load, wake, ranks)
    except BaseException:
        ranks.close()
        raise


def _assemble(
    settings: EngineSettings,
    source: AdapterSource,
    load: LoadModel,
    wake: Callable[[], None],
    ranks: OneRank,
) -> Assembly:
    device = torch.device(settings.device)
    start = StartUpStages(device)
    model = load_weights(load, settings, device, ranks.group, start)
    check_speculation(model.config.shape, settings)
    with start.stage("slot pool"):
        rows = RankRows(ServedRows(model), ranks.followers)
        shape, free = model.config.shape, start.free
        border = rank_border(model, settings, device, free, ranks.least)
        tiers = build_tiers(shape, settings, source, device, wake, free, ranks, rows, border)
    try:
        with start.stage("penalties"):
            penalties = Penalties(settings.max_running, model.config.logits_width, device)
            sampler = Sampler(penalties)
        runner, kv_pages = build_runner(
            model, tiers.weights, sampler, settings, start, ranks, border
        )
        with start.stage("step costs"):
            arena = tiers.arena, tiers.arena_elements
            step_costs = measure_step_costs(runner, kv_pages, *arena, model.shape, settings)
        page_copies = None
        if settings.kv_host_bytes:
            with start.stage("KV pages on the host"):
                page_copies = _page_copies(runner, settings, ranks, wake)
    except BaseException:
        tiers.close()
        if border is not None:
            border.memory.close()
        raise
    needs, context = page_needs(model.config, settings), model.config.max_context
    kv_tokens = needs.tokens(kv_pages, context)
    log.info("engine_assembled", extra=start.facts | {"kv_tokens": kv_tokens})
    info = _info(model, settings, min(context, kv_tokens), step_costs, kv_tokens)
    moving = None
    if border is not None:
        least = needs.in_steps(info.max_context)
        others = ranks.followers
        moving = Border(border, kv_pages, least, tiers, step_costs, others, wake)
    step_budget = StepBudget(settings.inter_token_goal_s, step_costs, runner.prompt_sizes)
    room = settings.max_batch_tokens - settings.max_running
    pieces = None
    if runner.state_slots and runner.prompt_sizes:
        pieces = ForcedPieces(runner.prompt_sizes, StateBuffers.prompts // 2)
    forced_budget = ForcedBudget(room, step_costs, runner.small_sizes, pieces)
    draft_budget = None
    if settings.speculation != "off":
        predictor = {"mtp": DraftSource.MTP, "draft": DraftSource.DRAFT}.get(settings.speculation)
        draft_budget = DraftBudget(
            step_costs,
            runner.small_sizes,
            settings.inter_token_goal_s,
            pieces,
            predictor=predictor,
            vocabulary=model.config.vocab_size,
        )
    return Assembly(
        runner,
        sampler,
        tiers,
        kv_pages,
        info,
        step_budget,
        forced_budget,
        draft_budget,
        ranks,
        page_copies,
        moving,
    )


def rank_border(
    model: LlamaModel,
    settings: EngineSettings,
    device: torch.device,
    free: int,
    least: Callable[[int], int],
) -> RankBorder | None:
    """Allocate the memory that a rank's adapters and KV pages share; None with a fixed border.

    The border is fixed, and the log says so, where the device cannot move memory.

    free: bytes that are free on the device.
    least: returns the smallest of the numbers that the ranks pass to it.
    """
    if not settings.moving_border:
        return None
    if not least(can_move(device)):
        log.warning("border_fixed", extra={"device": str(device)})
        return None
    return RankBorder(model.config, model.shape, settings, device, free, least)


def _page_copies(
    runner: ModelRunner, settings: EngineSettings, ranks: OneRank, wake: Callable[[], None]
) -> PageCopies | None:
    """Allocate host memory for KV pages in all ranks; return None if that is impossible.

    wake: called when pages have been copied to the GPU.
    """
    ranks.announce(AllocateHostPages())
    groups = len(runner.kv_windows)
    memory = allocate_rank_memory(runner.kv, runner.state_tensors, settings, groups, ranks.least)
    if memory is None:
        return None
    page_bytes = runner.kv[:, :, :1].nbytes
    return PageCopies(memory, page_bytes, runner.state_bytes, ranks.followers, wake)


def load_weights(
    load: LoadModel,
    settings: EngineSettings,
    device: torch.device,
    group: RankGroup | None,
    start: StartUpStages,
) -> LlamaModel:
    """Load the base model, or this rank's part of it.

    Raises ModelError if the folder cannot be loaded, and SettingsError if the device has too little
    memory or no kernels for the model.

    load: reads the base model from its folder onto the device.
    group: the processes that share the model; None if this process holds the whole model.
    start: records the memory and the time that loading takes.
    """
    with start.stage("weights"):
        dtype, context = settings.torch_dtype, settings.max_context
        parts = {
            "packed": stays_packed(settings, _capability(device)),
            "mtp": settings.speculation == "mtp",
        }
        model = load(settings.model, device, dtype, context, settings.rounding, group, **parts)
        if settings.max_added_tokens:
            model.add_tokens(settings.max_added_tokens)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # frees the scratch memory of loading
    return model


def stays_packed(settings: EngineSettings, capability: tuple[int, int] | None) -> bool:
    """Return whether the base model's weights of 4 bits stay packed on the device.

    With weight_dtype=auto only experts in MXFP4 do, if they are served in bfloat16 on GPUs that can
    multiply by them, and if each GPU's part has whole blocks of 32. Raises ModelError if
    config.json cannot be read or names an unsupported model.

    capability: compute capability of the GPUs; None on a CPU.
    """
    if settings.weight_dtype != "auto" or capability is None:
        return settings.weight_dtype == "packed"
    if settings.torch_dtype != torch.bfloat16 or capability < w4a16.FIRST_WITH_BFLOAT16:
        return False
    raw = read_config(settings.model)
    stored = quantized_linears(raw)
    if stored is None or stored.format is not Quantization.MXFP4:
        return False
    return BaseShape.from_config(raw).intermediate % (mxfp4.BLOCK * settings.tensor_parallel) == 0


def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _info(
    model: LlamaModel,
    settings: EngineSettings,
    max_context: int,
    step_costs: StepCosts,
    kv_tokens: int,
) -> EngineInfo:
    config = model.config
    packed = stays_packed(settings, _capability(torch.device(settings.device)))
    return EngineInfo(
        config.vocab_size,
        max_context,
        config.eos_token_ids,
        step_costs,
        served_quantization(
            config.quantized_linears, "packed" if packed else settings.weight_dtype
        ),
        fp8_kv=settings.torch_kv_dtype == FP8_KV,
        tensor_parallel=settings.tensor_parallel,
        dtype=settings.dtype,
        generates=model.generates,
        kv_tokens=kv_tokens,
    )


def build_tiers(
    shape: BaseShape,
    settings: EngineSettings,
    source: AdapterSource,
    device: torch.device,
    wake: Callable[[], None],
    free: int,
    ranks: OneRank,
    rows: RankRows | None = None,
    border: RankBorder | None = None,
) -> Tiers:
    """Build the tiers that hold and load adapters, and allocate their memory on GPU and host.

    shape: shape of the whole base model.
    source: store from which adapters are downloaded.
    wake: called whenever adapters have been loaded.
    free: free bytes of the device. The slot pool, the GPU's memory of adapters, takes a share of
        them if the settings say so.
    ranks: processes that compute the model; all get an equally large slot pool.
    rows: rows of the base model, on which DoRA's gains and biases depend; None without a model.
    border: memory that adapters and KV pages share; None: the slot pool has its own.
    """
    dtype, arena = settings.torch_adapter_dtype, None
    if border is None:
        gpu_bytes = most_bytes = ranks.least(resolve(settings.adapter_gpu_bytes, free))
    else:
        gpu_bytes, most_bytes = border.arena_units * border.unit.bytes, border.most_bytes
        arena = border.arena
    return Tiers(
        shape,
        AdapterLimits(settings.max_rank, settings.max_adapter_bytes, settings.max_added_tokens),
        source,
        device=device,
        dtype=dtype,
        gpu_bytes=gpu_bytes,
        host_bytes=settings.adapter_host_bytes,
        disk_bytes=settings.adapter_disk_bytes,
        cache_dir=settings.cache_dir,
        max_slots=count_slots(most_bytes // dtype.itemsize, shape, settings.max_batch_adapters),
        wake=wake,
        world=settings.tensor_parallel,
        followers=ranks.followers,
        base=rows,
        arena=arena,
    )


def build_runner(
    model: LlamaModel,
    weights: LoraWeights,
    sampler: Sampler,
    settings: EngineSettings,
    start: StartUpStages,
    ranks: OneRank,
    border: RankBorder | None = None,
) -> tuple[ModelRunner, int]:
    """Build a runner and return it with its number of KV pages; on CUDA, compile all kernels.

    The memory of steps and graphs is measured: on CUDA a trial runner with one KV page and one
    state runs first. Then the runner is built with as many states and pages as fit into the memory
    that the trial left free. Raises SettingsError if the memory for pages is too little for one
    sequence, if the memory for states is too little for max_running sequences, or if either is more
    than is free.

    weights: memory of the adapters' weights on the device.
    start: records the memory and the time that each stage takes.
    ranks: processes that compute the model; they all build a runner.
    border: memory that adapters and KV pages share; None: each has its own.
    """
    device = model.device
    parts = RunnerParts.of(model, weights, settings, border)

    def build(pages: int, slots: int, *, trial: bool = False) -> ModelRunner:
        ranks.announce(BuildRunner(pages, slots, trial))
        return parts.build(pages, slots, ranks.runner, trial=trial)

    if device.type == "cuda":
        with start.stage("steps and graphs"):
            trial = build(1, 1, trial=True)
            run_largest_step(trial, sampler, settings)
            run_every_kind_of_step(trial, sampler, settings)
        del trial
        gc.collect()
        torch.cuda.empty_cache()
    ranks.announce(CountPages())
    slots, pages = count_states_and_pages(model.config, model.shape, settings, start, ranks.least)
    with start.stage("KV cache"):
        runner = build(pages, slots)
        if device.type == "cuda":
            # takes the memory of steps before another allocation does
            run_largest_step(runner, sampler, settings)
    return runner, pages
