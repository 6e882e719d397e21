"""Construction of a ModelRunner: attention, KV pages and graphs. The same in every rank."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import torch

from lorikeet_engine.execution.border import RankBorder
from lorikeet_engine.execution.cuda_graphs import CudaGraphs, StepLimits
from lorikeet_engine.execution.kv_tensors import allocate_kv, allocate_states
from lorikeet_engine.execution.steps import ModelRunner
from lorikeet_engine.kernels.attention import choose_attention
from lorikeet_engine.kernels.attention.protocol import (
    AttentionBackend,
    AttentionShape,
    CapturableAttention,
)
from lorikeet_engine.kernels.fp8_kv import FP8_KV
from lorikeet_engine.kernels.lora.types import LoraWeights
from lorikeet_engine.models.llama import LlamaModel
from lorikeet_engine.models.states import RecurrentStates
from lorikeet_engine.settings import EngineSettings

_LONG_CONTEXT = 16_384  # tokens; at half of them, FA3 would save a sixth of a step of 2,048 tokens


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """Parts of a ModelRunner that are kept when it is built again with more KV pages and states."""

    model: LlamaModel
    attention: AttentionBackend
    weights: LoraWeights
    settings: EngineSettings
    border: RankBorder | None = None

    @classmethod
    def of(
        cls,
        model: LlamaModel,
        weights: LoraWeights,
        settings: EngineSettings,
        border: RankBorder | None = None,
    ) -> "RunnerParts":
        """Choose the attention for a model. Raises SettingsError if no attention kernels suit it.

        weights: memory of the adapters' weights on the device.
        border: memory that adapters and KV pages share; None: each has its own.
        """
        shapes = _attention_shapes(model, settings)
        return cls(model, choose_attention(shapes, model.device), weights, settings, border)

    def build(
        self,
        pages: int,
        slots: int,
        runner: Callable[..., ModelRunner] = ModelRunner,
        *,
        trial: bool = False,
    ) -> ModelRunner:
        """Build a runner: allocate `pages` KV pages and, on CUDA, capture graphs.

        slots: number of slots for states; ignored for a model without delta nets.
        runner: class or function that makes the runner.
        trial: whether another runner will replace this one.
        """
        model = self.model
        if self.border is None or trial:
            kv = allocate_kv(model.config, model.shape, self.settings, pages, model.device)
        else:
            kv = self.border.allocate_kv(pages)
        state_dtype = self.settings.torch_state_dtype
        states = allocate_states(model.shape, slots, model.dtype, model.device, state_dtype)
        graphs = _capture(model, self.attention, self.weights, kv, states, self.settings)
        return runner(model, self.attention, self.weights, kv, graphs, states)


def _attention_shapes(model: LlamaModel, settings: EngineSettings) -> list[AttentionShape]:
    """Return the shape of each kind of heads, with the windows of its groups of layers."""
    config, own = model.config, model.shape
    groups, places = range(len(config.kv_groups.windows)), enumerate(config.kv_groups.places)
    heads = dict.fromkeys(groups, own.heads_of(0))
    if own.full is not None:
        heads |= {place.group: own.heads_of(layer) for layer, place in places if place is not None}
    kinds = groupby(groups, key=lambda group: heads[group])
    return [
        AttentionShape(
            own.heads,
            each.kv_heads,
            each.head_dim,
            settings.page_size,
            model.dtype,
            settings.torch_kv_dtype == FP8_KV,
            tuple(config.kv_groups.windows[group] for group in of_kind),
            config.attention_soft_cap,
            config.sinks,
            config.max_context >= _LONG_CONTEXT,
            config.attention_scale,
            0 if own.latents is None else own.latents.kv_rank,
        )
        for each, of_kind in kinds
    ]


def _capture(
    model: LlamaModel,
    attention: AttentionBackend,
    weights: LoraWeights,
    kv: torch.Tensor,
    states: RecurrentStates | None,
    settings: EngineSettings,
) -> CudaGraphs | None:
    """Capture the CUDA graphs of steps; return None if the attention kernels cannot be captured."""
    if not isinstance(attention, CapturableAttention):
        return None
    limits = StepLimits(
        tokens=settings.max_batch_tokens,
        sequences=settings.max_running,
        adapters=settings.max_batch_adapters,
        rank=settings.max_rank,
        # a sequence that divide_by_adapter divides has its pages twice
        pages=2 * settings.max_running * -(-model.config.max_context // settings.page_size),
    )
    return CudaGraphs(model, attention, weights, kv, limits, states)
