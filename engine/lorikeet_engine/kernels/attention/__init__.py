"""Attention over paged keys and values: the protocol, its back ends, and the choice among them.

`protocol` says what a back end does, and has a step's PageTable. `flashinfer` serves CUDA, with
`hopper_prefill` for prompts that see much there. `paged_decode` is our Triton kernel for the small
steps that CUDA graphs hold, `sdpa` is torch's, for CPUs and as the reference.
"""

import logging
from importlib import import_module

import torch

from lorikeet_engine.errors import SettingsError
from lorikeet_engine.kernels.attention.protocol import AttentionBackend, AttentionShape
from lorikeet_engine.kernels.attention.sdpa import SdpaAttention
from lorikeet_engine.kernels.fp8 import FIRST_WITH_FP8

log = logging.getLogger(__name__)


def choose_attention(shape: AttentionShape, device: torch.device) -> AttentionBackend:
    """FlashInfer on CUDA, torch elsewhere and for what FlashInfer has no kernels for.

    Raises SettingsError where FlashInfer is not installed, or the GPU has no FP8 for such pages.
    """
    if device.type != "cuda":
        return SdpaAttention(shape.soft_cap)
    if shape.fp8_kv and torch.cuda.get_device_capability(device) < FIRST_WITH_FP8:
        raise SettingsError(
            f"kv_dtype=fp8: {torch.cuda.get_device_name(device)} is older than Ada and Hopper and "
            "has no FP8: want auto, or a newer GPU"
        )
    if reason := why_slow(shape.head_dim, shape.dtype):
        log.warning("attention_is_slow", extra={"reason": reason})
        return SdpaAttention(shape.soft_cap)
    try:
        flashinfer = import_module("lorikeet_engine.kernels.attention.flashinfer")
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"device={device}: {error.name} is not installed; "
            "pip install --constraint constraints.txt --editable '.[cuda]'"
        ) from error
    backend: AttentionBackend = flashinfer.FlashInferAttention(shape, device)
    return backend


def why_slow(head_dim: int, dtype: torch.dtype) -> str | None:
    """Why CUDA attends by torch, sequence by sequence and in no CUDA graph; None if it does not."""
    if dtype.itemsize != 2:
        wanted = f"16-bit dtypes, and this is {dtype}"
    elif not 64 <= head_dim <= 256:
        wanted = f"heads of 64 to 256, and these have {head_dim}"
    else:
        return None
    return (
        f"FlashInfer is used for {wanted}: torch attends to one sequence after another, and steps "
        "run without CUDA graphs"
    )
