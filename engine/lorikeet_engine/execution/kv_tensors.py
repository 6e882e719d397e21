"""Tensor that holds the KV pages of one rank: its shape and its allocation."""

import torch

from lorikeet_engine.adapter_format import BaseShape
from lorikeet_engine.kernels.attention.protocol import kv_head_dim
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.settings import EngineSettings


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
