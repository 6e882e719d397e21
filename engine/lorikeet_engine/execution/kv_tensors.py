"""Tensors that hold the KV pages and the states of one rank: their shapes and allocation."""

import torch

from lorikeet_engine.adapter_format import BaseShape
from lorikeet_engine.kernels.attention.protocol import kv_head_dim
from lorikeet_engine.kernels.delta_net import Heads, Ring
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.states import RecurrentStates
from lorikeet_engine.settings import EngineSettings

_RING = 3
"""Number of tokens of a sequence that decodes keep beside its states.

A decode writes the states themselves only in each (_RING + 1)-th step, so it takes less time. 0:
each decode writes the states.
"""


def kv_shape(
    config: ModelConfig, shape: BaseShape, settings: EngineSettings, pages: int
) -> tuple[int, ...]:
    """Return the shape of the tensor that holds `pages` KV pages.

    The shape is [layers of a page, 2, pages, page_size, kv_heads, kv_head_dim]; the second
    dimension is keys and values. The model's KvGroups say which layers share a page.

    shape: part of the base model that this rank computes.
    """
    width = kv_head_dim(shape.head_dim, settings.device)
    layers = config.kv_groups.page_layers
    return layers, 2, pages, settings.page_size, shape.kv_heads, width


def allocate_kv(
    config: ModelConfig,
    shape: BaseShape,
    settings: EngineSettings,
    pages: int,
    device: torch.device,
) -> torch.Tensor:
    """Allocate a tensor of zeros for `pages` KV pages on a device.

    shape: part of the base model that this rank computes.
    """
    size = kv_shape(config, shape, settings, pages)
    return torch.zeros(size, dtype=settings.torch_kv_dtype, device=device)


def allocate_states(
    shape: BaseShape,
    slots: int,
    dtype: torch.dtype,
    device: torch.device,
    state_dtype: torch.dtype = torch.float32,
) -> RecurrentStates | None:
    """Allocate the states of `slots` sequences; None for a model whose layers have none.

    shape: part of the base model that this rank computes.
    dtype: dtype of the model, in which the convolution's last inputs are kept.
    state_dtype: dtype of the heads' states.
    """
    net = shape.recurrent
    if net is None:
        return None
    each = sum(kind.has_state for kind in shape.kinds), slots
    inputs = torch.zeros(*each, net.convolution - 1, net.convolved, dtype=dtype, device=device)
    matrices = torch.zeros(
        *each, net.value_heads, net.value_dim, net.key_dim, dtype=state_dtype, device=device
    )
    ring = None
    if _RING:
        heads = Heads(net.key_heads, net.value_heads, net.key_dim, net.value_dim)
        ring = Ring.empty(each, heads, _RING, torch.float32, device)
    return RecurrentStates(inputs, matrices, ring)
