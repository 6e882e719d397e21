"""Division of a device's memory: weights, adapters' slot pool, steps, states, and KV pages.

In a model with delta nets, each running sequence has a state of fixed size, and states are cached
behind prefixes (scheduling/state_pool.py). States and KV pages share what all other parts leave.
First come the states of max_running sequences, and one more, with which the next sequence begins.
The rest is divided so that there is a cached state for each _TOKENS_OF_STATE tokens of KV pages,
since a prefix is found only by both.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lorikeet_engine.adapter_format import BaseShape
from lorikeet_engine.device.border_memory import BorderUnit
from lorikeet_engine.device.memory import MemoryShare, gib, resolve
from lorikeet_engine.errors import SettingsError
from lorikeet_engine.execution.kv_tensors import allocate_states, kv_shape
from lorikeet_engine.execution.page_copies import buffer_bytes
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.parallel.shard import WHOLE, Shard
from lorikeet_engine.scheduling.page_needs import PageNeeds
from lorikeet_engine.settings import EngineSettings
from lorikeet_engine.telemetry.start_up import DeviceMemory

_TOKENS_OF_STATE = 2048  # tokens of KV pages for each cached state
_CUDA_BYTES = 7 << 28  # CUDA's context, graphs, kernels, FlashInfer's and cuBLAS's workspaces


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of one device that each part of an engine takes.

    weights: bytes of the base model's weights.
    slot_pool: bytes of the adapters' weights.
    steps: bytes that the largest step, the CUDA graphs and copies of KV pages take.
    states: bytes of the states of delta nets; 0 for a model without delta nets.
    cached_states: number of these states that do not belong to running sequences.
    kv: bytes of the KV pages.
    kv_dtype: dtype of keys and values, from EngineSettings.
    kv_tokens: tokens whose keys and values fit into the KV pages. Where layers with windows save
        pages, this holds for sequences of max_context tokens.
    max_context: maximum number of tokens of prompt plus output that model and settings allow.
    kv_of_longest: bytes of KV pages that one sequence of max_context tokens needs.
    lendable: bytes of KV pages that adapters may borrow; 0 with a fixed border.
    """

    weights: int
    slot_pool: int
    steps: int
    states: int
    cached_states: int
    kv: int
    kv_dtype: str
    kv_tokens: int
    max_context: int
    kv_of_longest: int
    lendable: int = 0

    @property
    def total(self) -> int:
        """Bytes of all parts together."""
        return self.weights + self.slot_pool + self.steps + self.states + self.kv


def plan_memory(
    config: ModelConfig, weights: int, settings: EngineSettings, free: int, shard: Shard = WHOLE
) -> MemoryPlan:
    """Plan how the `free` bytes of a device would be divided when an engine starts.

    weights: bytes of the base model's weights on this device.
    shard: part of the model on this device.

    The memory of steps is an estimate; a starting engine measures it. Raises SettingsError if not
    all parts fit, or if one sequence does not fit into the KV pages.
    """
    memory = DeviceMemory(free)
    _take(memory, "weights", weights)
    shape = shard.part_of(config.shape)
    _take(memory, "slot pool", arena_bytes(config, shape, settings, memory.free))
    _take(memory, "steps and graphs", step_bytes(config, shape, settings))
    slots, pages = count_states_and_pages(config, shape, settings, memory, lambda number: number)
    page_bytes, needs = _page_bytes(config, shape, settings), page_needs(config, settings)
    check_speculation(shape, settings)
    kv_tokens, lendable = needs.tokens(pages, config.max_context), 0
    if settings.moving_border:
        unit = border_unit(config, shape, settings)
        longest = needs.in_steps(min(config.max_context, kv_tokens))
        units = pages // unit.pages
        lendable = (units - least_units(units, longest, unit)) * unit.bytes
    return MemoryPlan(
        weights=weights,
        slot_pool=memory.bytes["slot pool"],
        steps=memory.bytes["steps and graphs"] + _copy_bytes(config, shape, settings),
        states=memory.bytes.get("states", 0),
        cached_states=max(0, slots - least_states(settings)),
        kv=pages * page_bytes,
        kv_dtype=settings.kv_dtype,
        kv_tokens=kv_tokens,
        max_context=config.max_context,
        kv_of_longest=needs.in_steps(config.max_context) * page_bytes,
        lendable=lendable,
    )


def check_speculation(shape: BaseShape, settings: EngineSettings) -> None:
    """Raise SettingsError if the settings ask for a draft LoRA in a model with recurrent states.

    Noise would change the states.
    """
    if settings.speculation == "draft" and shape.recurrent is not None:
        raise SettingsError(
            "speculation=draft: a draft LoRA is served by models of attention alone, and this one "
            "has layers with recurrent states: want lookup, mtp or off",
            field="speculation",
        )


def count_states_and_pages(
    config: ModelConfig,
    shape: BaseShape,
    settings: EngineSettings,
    memory: DeviceMemory,
    least: Callable[[int], int],
) -> tuple[int, int]:
    """Return the number of slots for states of delta nets, and the number of KV pages.

    There are 0 slots in a model without delta nets. Raises SettingsError if the memory that the
    settings allow is too little for max_running states or for one sequence's pages, or more than is
    free.

    shape: part of the base model that this process computes.
    memory: free memory of the device after all other parts have taken theirs; the states are taken
        from it.
    least: returns the smallest of the numbers that the ranks pass to it.
    """
    slots = 0
    if shape.recurrent is not None:
        slots = least(count_states(config, shape, settings, memory))
        memory.take("states", slots * state_bytes(shape, settings))
    return slots, least(count_pages(config, shape, settings, memory))


def count_states(
    config: ModelConfig, shape: BaseShape, settings: EngineSettings, memory: DeviceMemory
) -> int:
    """Return the number of states of delta nets that fit into the memory that the settings allow.

    If the settings give no fixed size, the number is that of least_states plus one state for each
    _TOKENS_OF_STATE tokens of the KV pages that then fit. No state is added that would take memory
    from given kv_bytes, or from the KV pages of one sequence of max_context tokens.

    shape: part of the base model that this process computes.
    memory: free memory of the device after all parts but the KV pages have taken theirs.

    Raises SettingsError, with max_running as `field`, if the allowed memory is too little for
    least_states, or more than is free.
    """
    each, fewest = state_bytes(shape, settings), least_states(settings)
    allowed = memory.free
    if settings.state_bytes is not None:
        allowed = resolve(settings.state_bytes, memory.free)
    if fewest * each > allowed or allowed > memory.free:
        raise SettingsError(
            f"state_bytes={settings.state_bytes}: room for {allowed // each} states in "
            f"{gib(allowed)}, and max_running={settings.max_running} needs {fewest}, "
            f"{gib(fewest * each)}; {memory}: lower max_running, adapter_gpu_bytes or "
            "max_batch_tokens, set state_dtype to bfloat16, or change state_bytes",
            field="max_running",
        )
    if settings.state_bytes is not None:
        return allowed // each
    page, needs = _page_bytes(config, shape, settings), page_needs(config, settings)
    kv, of_state = settings.kv_bytes, needs.in_steps(_TOKENS_OF_STATE) * page
    rest = memory.free - fewest * each
    if isinstance(kv, MemoryShare):
        cached = kv.of_free * rest / (of_state + kv.of_free * each)
        kept = needs.in_steps(settings.max_context or settings.page_size) * page / kv.of_free
    else:
        cached, kept = kv / of_state, kv
    return fewest + max(0, int(min(cached, (rest - kept) / each)))


def least_states(settings: EngineSettings) -> int:
    """Return the smallest number of states of delta nets with which max_running sequences can run.

    This is one more than the number of these sequences, since a sequence begins with a copy of a
    cached state.
    """
    return settings.max_running + 1


def count_pages(
    config: ModelConfig, shape: BaseShape, settings: EngineSettings, memory: DeviceMemory
) -> int:
    """Return the number of KV pages that fit into the memory that the settings allow.

    shape: part of the base model that this process computes.
    memory: free memory of the device after all other parts have taken theirs.

    Raises SettingsError if the allowed memory is too little for one sequence, or more than is free.
    """
    page_bytes, needs = _page_bytes(config, shape, settings), page_needs(config, settings)
    free = memory.free - _copy_bytes(config, shape, settings)
    kv_bytes = resolve(settings.kv_bytes, free)
    pages, context = kv_bytes // page_bytes, settings.max_context or settings.page_size
    if settings.moving_border:
        pages -= pages % border_unit(config, shape, settings).pages
    needed = needs.in_steps(context)
    if pages >= needed and kv_bytes <= free:
        return pages
    raise SettingsError(
        f"kv_bytes={settings.kv_bytes}: room for {needs.tokens(pages, context)} tokens in "
        f"{gib(kv_bytes)}, and one sequence of {context} needs {gib(needed * page_bytes)}; "
        f"{memory}: lower max_context, adapter_gpu_bytes or max_batch_tokens, or change kv_bytes"
        + (" or state_bytes" if shape.recurrent else "")
    )


def border_unit(config: ModelConfig, shape: BaseShape, settings: EngineSettings) -> BorderUnit:
    """Return the memory that moves at once between the arena and the KV pages of a device.

    shape: part of the base model that this process computes.
    """
    pieces, planes, *page = kv_shape(config, shape, 1, settings.page_size, settings.device)
    page_bytes = math.prod(page) * settings.torch_kv_dtype.itemsize
    return BorderUnit.of(pieces * planes, page_bytes, settings.device)


def arena_bytes(config: ModelConfig, shape: BaseShape, settings: EngineSettings, free: int) -> int:
    """Return the bytes of the adapters' arena at the start: with a moving border, whole units.

    shape: part of the base model that this process computes.
    free: bytes of the device that the weights have left free.
    """
    size = resolve(settings.adapter_gpu_bytes, free)
    if not settings.moving_border:
        return size
    unit = border_unit(config, shape, settings).bytes
    return -(-size // unit) * unit


def least_units(units: int, longest: int, unit: BorderUnit) -> int:
    """Return the units of KV pages that adapters never borrow: a quarter, and those of one
    sequence.

    units: all units of KV pages.
    longest: pages of the longest sequence.
    """
    return max(-(-units // 4), -(-longest // unit.pages))


def count_slots(elements: int, shape: BaseShape, at_least: int) -> int:
    """Return the number of rows of LoraWeights.table: a limit on the adapters in a slot pool.

    So many adapters of rank 4 on q_proj and v_proj fit into the pool, and hardly any adapter is
    smaller.

    elements: size of the slot pool, in elements of the adapters' dtype.
    at_least: number of distinct adapters in a step; the result is never less.
    """
    qkv = next(iter(shape.groups.values()))
    widths = sum(sum(shape.dims(linear)) for linear in {qkv[0], qkv[-1]})
    layers = sum(shape.has(layer, qkv[0]) for layer in range(shape.layers))
    return max(at_least, elements // (4 * layers * widths))


def page_needs(config: ModelConfig, settings: EngineSettings) -> PageNeeds:
    """Return a PageNeeds, which tells how many KV pages sequences of a given length take."""
    windows = config.kv_groups.windows
    return PageNeeds(settings.page_size, windows, settings.max_batch_tokens)


def _page_bytes(config: ModelConfig, shape: BaseShape, settings: EngineSettings) -> int:
    size = kv_shape(config, shape, 1, settings.page_size, settings.device)
    return math.prod(size) * settings.torch_kv_dtype.itemsize


def _copy_bytes(config: ModelConfig, shape: BaseShape, settings: EngineSettings) -> int:
    """Return the bytes that copies of KV pages to and from the host take on each GPU."""
    page, groups = _page_bytes(config, shape, settings), len(config.kv_groups.windows)
    return buffer_bytes(page, state_bytes(shape, settings), settings, groups)


def step_bytes(config: ModelConfig, shape: BaseShape, settings: EngineSettings) -> int:
    """Estimate the bytes that the largest step and the CUDA graphs take.

    shape: part of the base model that this process computes.

    For Llama-3.1-8B with steps of 8,192 tokens, the estimate is 3.7 GiB and the measured value 3.8
    GiB (docs/benchmarks.md).
    """
    itemsize = settings.torch_dtype.itemsize
    kinds = {shape.heads_of(layer) for layer in range(shape.layers)}
    qkv = max((shape.heads + 2 * each.kv_heads) * each.head_dim for each in kinds)
    if shape.latents is not None:  # queries before and behind the absorbed product, and outputs
        latents = shape.latents
        of_head = shape.head_dim + latents.cached + latents.kv_rank + latents.values
        qkv = latents.query_rank + latents.cached + shape.heads * of_head
    mlp = 3 * max(shape.intermediate, shape.wide_intermediate)
    if config.experts_per_token:  # each of a token's experts has a row, an input and an output
        mlp = config.experts_per_token * (mlp + 2 * shape.hidden)
    widths = 6 * shape.hidden + qkv + mlp  # alive at once in a layer
    inputs = shape.layers * shape.layer_input
    widths = max(widths + inputs, shape.hidden + 3 * inputs)  # while they are computed, thrice
    activations = settings.max_batch_tokens * widths * itemsize
    # Logits, two tensors of their size in 32 bits for penalties, and four more for sampling under
    # penalties and a grammar.
    vocabulary = shape.vocabulary + settings.max_added_tokens
    logits = settings.max_running * vocabulary * (itemsize + 6 * 4)
    fixed = _CUDA_BYTES if settings.device.startswith("cuda") else 0
    return activations + logits + fixed


def state_bytes(shape: BaseShape, settings: EngineSettings) -> int:
    """Return the bytes of the state of one sequence in all delta nets; 0 without delta nets.

    shape: part of the base model that this process computes.
    """
    meta = torch.device("meta")
    states = allocate_states(shape, 1, settings.torch_dtype, meta, settings.torch_state_dtype)
    return 0 if states is None else states.nbytes


def _take(memory: DeviceMemory, name: str, size: int) -> None:
    if size > memory.free:
        raise SettingsError(f"there is no room for the {name}, {gib(size)}: {memory}")
    memory.take(name, size)
