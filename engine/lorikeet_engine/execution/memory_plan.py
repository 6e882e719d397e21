"""What an engine would take of a device, reckoned before there is one."""

from dataclasses import dataclass

import torch

from lorikeet_engine.device.memory import gib, resolve
from lorikeet_engine.errors import SettingsError
from lorikeet_engine.execution.assembly import allocate_kv, count_pages
from lorikeet_engine.models import ModelConfig
from lorikeet_engine.settings import EngineSettings
from lorikeet_engine.telemetry.start_up import DeviceRoom

_CUDA_BYTES = 7 << 28  # CUDA's context, graphs, compiled kernels, FlashInfer's and cuBLAS's rooms


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of one device. kv_tokens: how many tokens' keys and values there is room for.

    max_context: prompt plus output in tokens, as far as model and settings allow.
    """

    weights: int
    slot_pool: int
    steps: int
    kv: int
    kv_tokens: int
    max_context: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.slot_pool + self.steps + self.kv


def plan_memory(
    config: ModelConfig, weights: int, settings: EngineSettings, free: int
) -> MemoryPlan:
    """As `assemble` would divide `free` bytes of a device.

    weights: their bytes. What steps take is an estimate; an engine measures it. Raises
    SettingsError where not all fits, or KV pages are too few for one sequence.
    """
    room = DeviceRoom(free)
    _take(room, "weights", weights)
    _take(room, "slot pool", resolve(settings.adapter_gpu_bytes, room.free))
    _take(room, "steps and graphs", step_bytes(config, settings))
    pages = count_pages(config, settings, room)
    page_bytes = allocate_kv(config, settings, 1, torch.device("meta")).nbytes
    return MemoryPlan(
        weights=weights,
        slot_pool=room.bytes["slot pool"],
        steps=room.bytes["steps and graphs"],
        kv=pages * page_bytes,
        kv_tokens=pages * settings.page_size,
        max_context=config.max_context,
    )


def step_bytes(config: ModelConfig, settings: EngineSettings) -> int:
    """About what the largest step and the graphs take.

    Llama-3.1-8B with steps of 8,192 tokens: 3.7 GiB here, 3.8 GiB measured (docs/benchmarks.md).
    """
    itemsize = settings.torch_dtype.itemsize
    shape = config.shape
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    widths = 6 * shape.hidden + qkv + 3 * shape.intermediate  # alive at once in a layer
    activations = settings.max_batch_tokens * widths * itemsize
    # logits, and what sampling with penalties, top-p and logprobs makes of them: six more in float
    logits = settings.max_running * config.vocab_size * (itemsize + 6 * 4)
    fixed = _CUDA_BYTES if settings.device.startswith("cuda") else 0
    return activations + logits + fixed


def _take(room: DeviceRoom, name: str, size: int) -> None:
    if size > room.free:
        raise SettingsError(f"there is no room for the {name}, {gib(size)}: {room}")
    room.take(name, size)
