"""Checkpoints of gpt-oss whose experts are rounded to MXFP4, and the values of these experts."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from lorikeet_engine.models.stored_tensors import SINGLE
from tests.engine.models.quantized_checkpoints import saved

LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round weights [experts, d_in, d_out] to MXFP4: return blocks, scales, and the values."""
    by_block = weight.mT.unflatten(-1, (-1, 32))  # [experts, d_out, blocks, 32]
    largest = by_block.abs().amax(-1, keepdim=True)
    exponents = largest.log2().floor() - 2  # 2² is the largest power of two of LEVELS
    scaled = by_block / exponents.exp2()
    codes = (scaled.abs()[..., None] - LEVELS).abs().argmin(-1)
    values = LEVELS[codes] * scaled.sign() * exponents.exp2()
    codes = (codes + 8 * (scaled < 0)).byte()
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    scales = (exponents[..., 0] + 127).byte()
    return blocks, scales, values.flatten(-2).mT.contiguous()


def write_mxfp4(folder: Path, target: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write a copy of a checkpoint with experts in MXFP4; return it and the experts' values."""
    tensors, values = load_file(folder / SINGLE), {}
    for name in [name for name in tensors if name.endswith(EXPERTS)]:
        blocks, scales, values[name] = rounded(tensors.pop(name))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return saved(folder, target, tensors, quantization_config=CONFIG), values


def round_experts(model: torch.nn.Module) -> None:
    """Round the experts of a model of transformers as `write_mxfp4` does."""
    for name, weight in model.named_parameters():
        if name.endswith(EXPERTS):
            weight.data = rounded(weight.data)[2]
