"""Tensors that hold the KV pages and the states of one rank: their shapes and allocation."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from lorikeet_engine.adapter_format import BaseShape
from lorikeet_engine.kernels.attention.protocol import kv_head_dim
from lorikeet_engine.kernels.delta_net import Heads, Ring
from lorikeet_engine.models.batch import Batch
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.states import RecurrentStates
from lorikeet_engine.settings import EngineSettings

_RING = 3
"""Number of tokens of a sequence that decodes keep beside its states.

A decode writes the states themselves only in each (_RING + 1)-th step, so it takes less time. 0:
each decode writes the states.
"""


def kv_shape(
    config: ModelConfig, shape: BaseShape, pages: int, page_size: int, device: str
) -> tuple[int, ...]:
    """Return the shape of the tensor that holds `pages` KV pages.

    The shape is [pieces of a page, 2, pages, page_size, kv_heads, kv_head_dim]; the second
    dimension is keys and values. A piece holds a layer's keys and values; the model's KvGroups say
    which layers share a page. If layers have keys of different widths, several narrow layers share
    a piece, and the last two dimensions are 1 and the elements of a token in a piece. With latent
    attention, the second dimension is 1: a token's latent and shared key.

    shape: part of the base model that this rank computes.
    """
    groups = config.kv_groups
    if shape.latents is not None:
        return groups.page_layers, 1, pages, page_size, 1, shape.latents.cached
    if shape.full is None:
        heads = shape.kv_heads, kv_head_dim(shape.head_dim, device)
    else:
        widths = [kv_width(shape, layer, device) for layer in range(shape.layers)]
        places = zip(groups.places, widths, strict=True)
        needed = max((place.part + 1) * width for place, width in places if place)
        heads = 1, -(-needed // math.lcm(*widths)) * math.lcm(*widths)
    return groups.page_layers, 2, pages, page_size, *heads


def kv_width(shape: BaseShape, layer: int, device: str) -> int:
    """Return the elements that a layer's keys of one token take in KV pages.

    shape: part of the base model that this rank computes.
    """
    heads = shape.heads_of(layer)
    return heads.kv_heads * kv_head_dim(heads.head_dim, device)


def parts_of_pages(config: ModelConfig, shape: BaseShape, kv: torch.Tensor) -> tuple[int, ...]:
    """Return, for each group of layers, how many of its layers fit into one piece of a page.

    A piece holds one layer's keys and values, or those of several layers if they are narrower.
    Empty if every group has one layer in a piece.

    shape: part of the base model that this rank computes.
    kv: tensor of the KV pages.
    """
    if shape.full is None:
        return ()
    owners = {place.group: layer for layer, place in enumerate(config.kv_groups.places) if place}
    widths = [kv_width(shape, owners[group], kv.device.type) for group in sorted(owners)]
    parts = tuple(kv.shape[-1] // width for width in widths)
    return parts if max(parts) > 1 else ()


def with_parts(batch: Batch, parts: Sequence[int], page_size: int) -> Batch:
    """Return a batch with page number p · n instead of p, where a piece of a page has n parts.

    Attention reads each part of a piece, the keys and values of one layer, as a page of its own.

    parts: number of parts for each group of layers, from parts_of_pages.
    """
    tables = tuple(
        table if n == 1 else replace(table, pages=table.pages * np.int32(n))
        for table, n in zip(batch.page_tables, parts, strict=True)
    )
    more = torch.tensor(parts, device=batch.kv_slots.device)[:, None] - 1
    slots = batch.kv_slots + batch.kv_slots // page_size * (more * page_size)
    return replace(batch, page_tables=tables, kv_slots=slots)


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
    size = kv_shape(config, shape, pages, settings.page_size, settings.device)
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
