"""Attention over paged keys and values: the protocol, its back ends, and the choice among them.

`protocol`: interface of the back ends, and PageTable, the KV pages of a step's sequences.
`flashinfer`: back end of large steps on CUDA. On Hopper it uses `hopper_prefill` for long prompts,
    which uses `prefixes` and `merge`.
`paged_decode`: our Triton kernel for small steps, captured in CUDA graphs.
`wide_heads`: back end of heads that are too wide for FlashInfer, by `paged_decode` and our Triton
    kernel for prompts, `paged_prefill`.
`by_heads`: back ends of models whose layers differ in their heads.
`sdpa`: torch's attention, for CPUs and as the reference.
"""

import logging
from collections.abc import Sequence
from importlib import import_module

import torch

from lorikeet_engine.errors import SettingsError
from lorikeet_engine.kernels.attention.by_heads import CapturableByHeads
from lorikeet_engine.kernels.attention.protocol import (
    AttentionBackend,
    AttentionShape,
    CapturableAttention,
)
from lorikeet_engine.kernels.attention.sdpa import SdpaAttention
from lorikeet_engine.kernels.fp8 import FIRST_WITH_FP8

_WIDEST_OF_FLASHINFER = 256  # its pinned release has wider heads on Blackwell alone
log = logging.getLogger(__name__)


def choose_attention(shapes: Sequence[AttentionShape], device: torch.device) -> AttentionBackend:
    """Return the attention back end for a model and a device: on CUDA FlashInfer, and our Triton
    kernels for heads that are too wide for it; torch on CPUs.

    On CUDA, torch's attention is used only if there are no kernels for a shape. Raises
    SettingsError if FlashInfer is not installed, if KV pages are FP8 and the GPU has no FP8, or if
    latent attention has widths that the kernels do not take.

    shapes: for each kind of heads that the model's layers have, its shape, with the windows of its
        groups of layers; in the order of these groups.
    """
    shape = shapes[0]
    if device.type != "cuda":
        return SdpaAttention(shape.soft_cap, shape.scale, shape.latent)
    if shape.fp8_kv and torch.cuda.get_device_capability(device) < FIRST_WITH_FP8:
        raise SettingsError(
            f"kv_dtype=fp8: {torch.cuda.get_device_name(device)} is older than Ada and Hopper and "
            "has no FP8: want auto, or a newer GPU"
        )
    if shape.latent:
        check_latents(shape.latent, shape.tail)
    for each in shapes:
        if reason := why_slow(each.value_dim, each.dtype):
            log.warning("attention_is_slow", extra={"reason": reason})
            return SdpaAttention(shape.soft_cap, shape.scale, shape.latent)
    backends, first = list[tuple[range, CapturableAttention]](), 0
    for each in shapes:
        groups = range(first, first + len(each.windows))
        backends.append((groups, _on_cuda(each, device)))
        first = groups.stop
    return backends[0][1] if len(backends) == 1 else CapturableByHeads(backends)


def check_latents(latent: int, rotary: int) -> None:
    """Raise SettingsError unless GPU kernels of latent attention take these widths.

    latent, rotary: elements of a token's latent, and of the key that all heads share. Both must be
        powers of two from 16, and latents have at most 512.
    """
    if any(width < 16 or width & (width - 1) for width in (latent, rotary)) or latent > 512:
        raise SettingsError(
            f"kv_lora_rank={latent}, qk_rope_head_dim={rotary}: GPU kernels take powers of two "
            "from 16, and latents of at most 512: choose another base model, or device=cpu",
            field="device",
        )


def _on_cuda(shape: AttentionShape, device: torch.device) -> CapturableAttention:
    if shape.head_dim > _WIDEST_OF_FLASHINFER or shape.latent:
        wide = import_module("lorikeet_engine.kernels.attention.wide_heads")  # Triton
        of_wide: CapturableAttention = wide.WideAttention(shape, device)
        return of_wide
    try:
        flashinfer = import_module("lorikeet_engine.kernels.attention.flashinfer")
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"device={device}: {error.name} is not installed; "
            "pip install --constraint constraints.txt --editable '.[cuda]'"
        ) from error
    backend: CapturableAttention = flashinfer.FlashInferAttention(shape, device)
    return backend


def why_slow(head_dim: int, dtype: torch.dtype) -> str | None:
    """Return why a model must use torch's slow attention on CUDA; None if other kernels support it.

    torch's attention computes one sequence at a time and excludes CUDA graphs.
    """
    if dtype.itemsize != 2:
        wanted = f"16-bit dtypes, and this is {dtype}"
    elif not 64 <= head_dim <= 512:
        wanted = f"heads of 64 to 512, and these have {head_dim}"
    else:
        return None
    return (
        f"GPU kernels of attention are for {wanted}: torch attends to one sequence after another, "
        "and steps run without CUDA graphs"
    )
