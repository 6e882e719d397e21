"""How checkpoints store linears: a random weight as the libraries that define formats store it.

Each is rounded as its format can hold it, simply: no library searches for better numbers here.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lorikeet_engine.kernels.fp8 import DTYPE, LARGEST
from lorikeet_engine.kernels.fp8.reference import quantize_weight
from lorikeet_engine.models.weight_formats import nf4

Tensors = dict[str, torch.Tensor]
BLOCK = GROUP = 128
_FLOATS: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # of eight columns in an integer, the lowest bits first


@dataclass(frozen=True, slots=True)
class Layout:
    """A format. config: what config.json says of it; tensors_of: by a weight's name and values.

    Values are [d_out, d_in], any float dtype; both sides are multiples of BLOCK.
    """

    tensors_of: Callable[[str, torch.Tensor], Tensors]
    config: Mapping[str, Any] = field(default_factory=dict)


def _floats(name: str, weight: torch.Tensor) -> Tensors:
    return {name: weight}


def _fp8_rows(name: str, weight: torch.Tensor) -> Tensors:
    rounded = quantize_weight(weight)
    return {name: rounded.rows, f"{name}_scale": rounded.scales[:, None].bfloat16()}


def _fp8_matrix(name: str, weight: torch.Tensor) -> Tensors:
    scale = weight.float().abs().amax()[None] / LARGEST
    path = name.removesuffix("weight")
    return {
        name: (weight.float() / scale).to(DTYPE),
        f"{name}_scale": scale,
        f"{path}input_scale": torch.ones_like(scale),
    }


def _fp8_blocks(name: str, weight: torch.Tensor) -> Tensors:
    d_out, d_in = weight.shape
    blocks = weight.float().view(d_out // BLOCK, BLOCK, d_in // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3)) / LARGEST
    rows = (blocks / scales[:, None, :, None]).to(DTYPE).view(d_out, d_in)
    return {name: rows, f"{name}_scale_inv": scales}


def _nf4(name: str, weight: torch.Tensor) -> Tensors:
    """Doubly quantised, two levels a byte."""
    levels = torch.tensor(nf4._LEVELS, device=weight.device)
    codes, magnitudes = nf4._nearest(weight.float().view(-1), levels, nf4._BLOCK)
    mean, table = magnitudes.mean(), nf4._eight_bit_levels().to(weight.device)
    nested, nested_magnitudes = nf4._nearest(magnitudes - mean, table, nf4._MAGNITUDES_BLOCK)
    state = {
        "quant_type": "nf4",
        "shape": list(weight.shape),
        "dtype": "bfloat16",
        "blocksize": nf4._BLOCK,
        "nested_blocksize": nf4._MAGNITUDES_BLOCK,
        "nested_dtype": "float32",
        "nested_offset": float(mean),
    }
    return {
        name: (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
        f"{name}.absmax": nested.to(torch.uint8),
        f"{name}.quant_map": levels,
        f"{name}.nested_absmax": nested_magnitudes,
        f"{name}.nested_quant_map": table,
        f"{name}{nf4._STATE}": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def _awq(name: str, weight: torch.Tensor) -> Tensors:
    path, (levels, scales) = name.removesuffix(".weight"), _int4(weight)
    packed_zeros = torch.full_like(scales[:, ::8], -0x77777778, dtype=torch.int32)  # eight 8s
    return {
        f"{path}.qweight": _packed(levels.unflatten(1, (-1, 8))[..., _AWQ_ORDER]),
        f"{path}.qzeros": packed_zeros,
        f"{path}.scales": scales,
    }


def _gptq(name: str, weight: torch.Tensor) -> Tensors:
    path, (levels, scales) = name.removesuffix(".weight"), _int4(weight)
    packed_zeros = torch.full_like(scales[:, ::8], 0x77777777, dtype=torch.int32)  # 8s, less one
    groups = torch.arange(len(levels), dtype=torch.int32, device=weight.device) // GROUP
    return {
        f"{path}.qweight": _packed(levels.unflatten(0, (-1, 8)).transpose(1, 2)),
        f"{path}.qzeros": packed_zeros,
        f"{path}.scales": scales,
        f"{path}.g_idx": groups,
    }


def _int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels 1 to 15 around 8 [d_in, d_out] int64, and groups' scales [groups, d_out] float16."""
    groups = weight.float().t().unflatten(0, (-1, GROUP))
    scales = (groups.abs().amax(1) / 7).half()
    return (groups / scales[:, None].float()).round().add_(8).clamp_(0, 15).long().flatten(
        0, 1
    ), scales


def _packed(levels: torch.Tensor) -> torch.Tensor:
    """[rows, columns, 8] to [rows, columns] int32, the first in the lowest bits."""
    packed = levels[..., 0].clone()
    for place in range(1, 8):
        packed |= levels[..., place] << 4 * place
    return packed.to(torch.int32)


def _compressed_tensors(weights: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": _FLOATS | weights,
        "input_activations": _FLOATS | inputs,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


FLOATS = Layout(_floats)
LAYOUTS: Mapping[str, Layout] = {
    "bf16": FLOATS,
    "fp8 dynamic": Layout(
        _fp8_rows,
        _compressed_tensors({"strategy": "channel"}, {"strategy": "token", "dynamic": True}),
    ),
    "fp8 static": Layout(
        _fp8_matrix,
        _compressed_tensors({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}),
    ),
    "fp8 blocks": Layout(
        _fp8_blocks,
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
    ),
    "nf4": Layout(
        _nf4,
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
    "awq": Layout(
        _awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "version": "gemm",
            "zero_point": True,
        },
    ),
    "gptq": Layout(_gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
}
"""By what people call them; fp8 dynamic and static are those of compressed-tensors."""
