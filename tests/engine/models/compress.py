"""Quantises a checkpoint as llm-compressor does: `compress.py FOLDER OUT SCHEME`.

OUT/values.safetensors has the weights as compressed-tensors decompresses them.
"""

import sys

import torch
import transformers
from compressed_tensors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    apply_quantization_config,
)
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

BLOCK, GROUP = (32, 32), 32
IGNORED = ["lm_head", "re:.*layers\\.1\\..*down_proj"]
KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def compress(folder: str, out: str, name: str) -> None:
    """Quantise as the scheme of this name does, with scales of each part's own numbers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    scheme = preset_name_to_scheme(name, ["Linear"])
    if scheme.weights.strategy == "block":
        scheme.weights.block_structure = list(BLOCK)
    if scheme.weights.strategy == "group":
        scheme.weights.group_size = GROUP
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=IGNORED,
        kv_cache_scheme=QuantizationArgs(**KV),
        quantization_status="initialized",
    )
    apply_quantization_config(model, config)
    for module in model.modules():
        observe(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(out)
    compressor.decompress_model(model)
    state = model.state_dict().items()
    values = {name: tensor.contiguous() for name, tensor in state if name.endswith("_proj.weight")}
    save_file(values, f"{out}/values.safetensors")


def observe(module: torch.nn.Module) -> None:
    """Set a module's scales, as a calibration would."""
    for name, parameter in module.named_parameters(recurse=False):
        if name in ("k_scale", "v_scale", "input_scale"):
            parameter.data.fill_(0.03)
        if name == "weight_scale":
            weights = module.quantization_scheme.weights
            parts = parts_of(module.weight.data, weights.strategy)
            least, most = parts.amin((1, 3)), parts.amax((1, 3))
            scale, zero = calculate_qparams(least, most, weights)
            parameter.data.copy_(scale.view_as(parameter))
            if not weights.symmetric:
                points = module.weight_zero_point
                points.data.copy_(zero.view_as(points))


def parts_of(weight: torch.Tensor, strategy: str) -> torch.Tensor:
    """[parts, rows of a part, parts of a row, columns of a part], each part with a scale."""
    d_out, d_in = weight.shape
    sizes = {"tensor": (d_out, d_in), "channel": (1, d_in), "group": (1, GROUP), "block": BLOCK}
    high, wide = sizes[strategy]
    return weight.view(d_out // high, high, d_in // wide, wide)


if __name__ == "__main__":
    compress(*sys.argv[1:])
