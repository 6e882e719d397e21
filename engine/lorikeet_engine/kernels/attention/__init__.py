"""Attention over paged keys and values: the protocol, its back ends, and the choice among them.

`protocol`: interface of the back ends, and PageTable, the KV pages of a step's sequences.
`flashinfer`: back end of large steps on CUDA. On Hopper it uses `hopper_prefill` for long prompts,
    which uses `prefixes` and `merge`.
`paged_decode`: our Triton kernel for small steps, captured in CUDA graphs.
`sdpa`: torch's attention, for CPUs and as the reference.
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
    """Return the attention back end for a model and a device: FlashInfer on CUDA, torch on CPUs.

    On CUDA, torch's attention is used only if FlashInfer has no kernels for the shape. Raises
    SettingsError if FlashInfer is not installed, or if KV pages are FP8 and the GPU has no FP8.
    """
    if device.type != "cuda":
        return SdpaAttention(shape.soft_cap, shape.scale)
    if shape.fp8_kv and torch.cuda.get_device_capability(device) < FIRST_WITH_FP8:
        raise SettingsError(
            f"kv_dtype=fp8: {torch.cuda.get_device_name(device)} is older than Ada and Hopper and "
            "has no FP8: want auto, or a newer GPU"
        )
    if reason := why_slow(shape.head_dim, shape.dtype):
        log.warning("attention_is_slow", extra={"reason": reason})
        return SdpaAttention(shape.soft_cap, shape.scale)
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
    """Return why a model must use torch's slow attention on CUDA; None if FlashInfer supports it.

    torch's attention computes one sequence at a time and excludes CUDA graphs.
    """
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
