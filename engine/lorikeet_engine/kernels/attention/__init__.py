"""Attention over paged keys and values: the protocol, its back ends, and the choice among them.

`protocol` says what a back end does, and has a step's PageTable. `flashinfer` serves CUDA,
`paged_decode` is our Triton kernel for the small steps that CUDA graphs hold, `sdpa` is torch's,
for CPUs and as the reference.
"""

from importlib import import_module

import torch

from lorikeet_engine.errors import SettingsError
from lorikeet_engine.kernels.attention.protocol import AttentionBackend, AttentionShape
from lorikeet_engine.kernels.attention.sdpa import SdpaAttention

_FLASHINFER_HEAD_DIMS = (64, 128, 256)


def choose_attention(shape: AttentionShape, device: torch.device) -> AttentionBackend:
    """FlashInfer on CUDA, torch elsewhere and for what FlashInfer has no kernels for.

    Raises SettingsError where FlashInfer is not installed.
    """
    narrow = shape.dtype.itemsize == 2
    if device.type != "cuda" or not narrow or shape.head_dim not in _FLASHINFER_HEAD_DIMS:
        return SdpaAttention()
    try:
        flashinfer = import_module("lorikeet_engine.kernels.attention.flashinfer")
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"device={device}: {error.name} is not installed; "
            "pip install --constraint constraints.txt --editable '.[cuda]'"
        ) from error
    backend: AttentionBackend = flashinfer.FlashInferAttention(shape, device)
    return backend
