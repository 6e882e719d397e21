"""Quantised checkpoints in libraries' layouts, and the floats that their numbers stand for."""

import json
import re
import shutil

import torch
from safetensors.torch import load_file, save_file

from lorikeet_engine.kernels.fp8 import DTYPE
from lorikeet_engine.models.stored_tensors import SINGLE
from tests.engine.models.fp8_models import block_scales

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
W4A16 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": False,
                "strategy": "group",
                "group_size": 32,
                "dynamic": False,
                "actorder": None,
            },
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT4 = {
    "awq": AWQ,
    "gptq": GPTQ,
    "gptq_shared": GPTQ,
    "w4a16": W4A16,
    "w4a16_ordered": W4A16,
}
BLOCK = (16, 32)
FLOATS = {"num_bits": 8, "type": "float", "symmetric": True}


def compressed_tensors(weights, activations):
    """Return a quantization_config of compressed-tensors.

    QuantizationScheme and the presets FP8, FP8_DYNAMIC and FP8_BLOCK are in
    src/compressed_tensors/quantization/quant_scheme.py.
    """
    group = {
        "targets": ["Linear"],
        "weights": FLOATS | {"dynamic": False} | weights,
        "input_activations": FLOATS | activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


# AutoFP8 writes its config in auto_fp8/quantize.py, save_quantized_model; DeepSeek's and Qwen's
# blocks, and one scale of a matrix without them, are FineGrainedFP8Config of transformers
# (utils/quantization_config.py); ModelOpt's is made in modelopt/torch/export/convert_hf_config.py.
CONFIGS = {
    "dynamic": compressed_tensors(
        {"strategy": "channel"}, {"dynamic": True, "strategy": "token", "observer": None}
    ),
    "static": compressed_tensors({"strategy": "tensor"}, {"dynamic": False, "strategy": "tensor"}),
    "autofp8": {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "ignored_layers": ["lm_head"],
        "kv_cache_scheme": "static",
    },
    "matrices": {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "modules_to_not_convert": ["lm_head"],
        "weight_block_size": None,
    },
    "modelopt": {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "config_groups": {
            "group_0": {
                "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
                "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
                "targets": ["Linear"],
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.29.0"},
    },
    "blocks": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": BLOCK,
    },
    "compressed_blocks": compressed_tensors(
        {"strategy": "block", "block_structure": BLOCK},
        {"dynamic": True, "strategy": "group", "group_size": 32},
    ),
}
SCALES = {"blocks": "weight_scale_inv", "matrices": "weight_scale_inv"}
INPUT_SCALES = {
    **dict.fromkeys(("static", "autofp8", "modelopt"), "input_scale"),
    "matrices": "activation_scale",
}


# Names of the layers' linears, and of tensors that hold a linear of all experts.
_ROUNDED = re.compile(
    r"(_proj|_mqa|_qkv|_z|_qkvz|\.w[123]|per_layer_(?:input_gate|(?:model_)?projection))\.weight$"
    r"|\.experts\.\w+_proj$"
)


def linears(folder):
    """Return the names of the linears that FP8 checkpoints round, and all tensors of a checkpoint.

    Of a delta net these are all but b and a, as in Qwen's own.
    """
    tensors = load_file(folder / SINGLE)
    return [n for n in tensors if _ROUNDED.search(n)], tensors


def saved(folder, target, tensors, **config):
    """Save a copy of a checkpoint with other tensors and further keys in config.json."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / SINGLE)
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return target


def write_fp8(folder, target, kind):
    """Write an FP8 copy of a checkpoint; return it and the floats that its numbers stand for.

    kind: key of CONFIGS.
    """
    names, tensors = linears(folder)
    floats = {}
    for name in names:
        weight, path = tensors[name], name.removesuffix("weight")
        scales = scales_of(kind, weight)
        wide = expanded(scales, weight.shape, kind)
        tensors[name] = (weight / wide).to(DTYPE)
        scale = SCALES.get(kind, "weight_scale")
        tensors[f"{name}_scale_inv" if weight.dim() > 2 else f"{path}{scale}"] = scales
        floats[name] = tensors[name].float() * wide
        if kind in INPUT_SCALES:
            tensors[path + INPUT_SCALES[kind]] = torch.tensor(0.02).expand(scales.shape)
    if kind == "autofp8":  # with kv_cache_quant_layers
        tensors["model.layers.0.self_attn.k_proj.output_scale"] = torch.tensor(0.1)
    config = CONFIGS[kind]
    return saved(folder, target / kind, tensors, quantization_config=config), floats


def scales_of(kind, weight):
    if kind == "dynamic":  # [d_out, 1], in the dtype that the model had
        return (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    if kind == "static":
        return (weight.abs().amax() / 448)[None]
    if kind in ("autofp8", "matrices", "modelopt"):
        return weight.abs().amax() / 448
    return block_scales(weight, BLOCK)


def expanded(scales, shape, kind):
    if "blocks" not in kind:
        return scales.float().expand(shape)
    tall = scales.repeat_interleave(BLOCK[0], -2)[..., : shape[-2], :]
    return tall.repeat_interleave(BLOCK[1], -1)[..., : shape[-1]]


def packed(nibbles):
    """Pack nibbles [rows, columns, 8] to int32 [rows, columns], the first in the lowest bits."""
    return (nibbles.long() << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)


def awq(path, q, zeros, scales):
    """Pack as AutoAWQ does: nibble i of an integer is column order[i] of eight."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {
        f"{path}.qweight": packed(q.view(len(q), -1, 8)[..., order]),
        f"{path}.qzeros": packed(zeros.view(len(zeros), -1, 8)[..., order]),
        f"{path}.scales": scales,
    }


def gptq(path, q, zeros, scales, group_of, less=1):
    """Pack as GPTQModel does: eight rows in one; in its first format each zero point less 1.

    The 1 is subtracted from the packed integer (convert_gptq_v2_to_v1_format in GPTQModel's
    utils/model.py), so a zero point of 0 borrows from the next one.
    """
    rows = q.view(-1, 8, q.shape[1]).transpose(1, 2)
    return {
        f"{path}.qweight": packed(rows),
        f"{path}.qzeros": packed(zeros.view(len(zeros), -1, 8)) - less * 0x11111111,
        f"{path}.scales": scales,
        f"{path}.g_idx": group_of.to(torch.int32),
    }


def pack_quantized(path, q, zeros, scales):
    """Pack as compressed-tensors does: eight inputs, or zero points of eight outputs, in one."""
    d_in, d_out = q.shape
    groups = len(scales)
    return {
        f"{path}.weight_packed": packed(q.t().reshape(d_out, -1, 8)),
        f"{path}.weight_scale": scales.t(),
        f"{path}.weight_zero_point": packed(zeros.view(groups, -1, 8)).t(),
        f"{path}.weight_shape": torch.tensor([d_out, d_in]),
    }


def write_int4(folder, target, kind, group=32, dtype=torch.float16, exact=False, **config):
    """Write a checkpoint of random 4-bit integers, and one of the floats that they stand for.

    kind: awq, gptq, gptq_v2 or w4a16; gptq_shared, in which linears share an order of inputs; or
        w4a16_ordered, with groups of inputs as compressed-tensors 0.18 stored them.
    exact: whether the floats are not rounded to the scales' dtype.
    """
    generator = torch.Generator().manual_seed(4)
    names, tensors = linears(folder)
    floats = dict(tensors)
    for name in names:
        d_out, d_in = tensors.pop(name).shape
        groups = d_in // group
        q = torch.randint(16, (d_in, d_out), generator=generator)
        zeros = torch.randint(16, (groups, d_out), generator=generator)
        scales = (torch.rand(groups, d_out, generator=generator) / 20).to(dtype)
        group_of = torch.arange(d_in) // group
        if "gptq" in kind or kind == "w4a16_ordered":  # desc_act
            drawing = torch.Generator().manual_seed(d_in) if kind == "gptq_shared" else generator
            group_of = group_of[torch.randperm(d_in, generator=drawing)]
        kept = torch.float32 if exact else dtype
        floats[name] = ((q - zeros[group_of]).to(kept) * scales[group_of].to(kept)).t()
        path = name.removesuffix(".weight")
        if kind == "awq":
            tensors |= awq(path, q, zeros, scales)
        elif kind == "w4a16":
            tensors |= pack_quantized(path, q, zeros, scales)
        elif kind == "w4a16_ordered":
            tensors |= pack_quantized(path, q, zeros, scales)
            tensors[f"{path}.weight_g_idx"] = group_of.to(torch.int32)
        else:
            tensors |= gptq(path, q, zeros, scales, group_of, less=int(kind != "gptq_v2"))
    config = {"group_size": group} | config
    checkpoint = saved(folder, target / kind, tensors, quantization_config=config)
    return checkpoint, saved(folder, target / "floats", floats)


def write_int4_values(folder, target, kind):
    """Write a checkpoint of random 4-bit integers; return it and the exact floats, by name.

    kind: key of INT4.
    """
    checkpoint, floats = write_int4(folder, target, kind, exact=True, **INT4[kind])
    names, values = linears(floats)
    return checkpoint, {name: values[name] for name in names}


def write_rounded(folder, target, order=None):
    """Round a checkpoint's linears to 4-bit integers in groups of 32; return it and its values.

    order: function from a number of inputs to the group of each input, for GPTQ; None: AWQ.
    """
    names, tensors = linears(folder)
    values = {}
    for name in names:
        weight = tensors.pop(name).t()  # [d_in, d_out]
        d_in, d_out = weight.shape
        group_of = torch.arange(d_in) // 32 if order is None else order(d_in)
        by_group = weight[group_of.argsort(stable=True)].view(-1, 32, d_out)
        least, most = by_group.amin(1).clamp(max=0), by_group.amax(1).clamp(min=0)
        scales = ((most - least) / 15).half()
        zeros = (-least / scales).round().clamp(0, 15).int()
        wide = scales.float()[group_of]
        q = (weight / wide + zeros[group_of]).round().clamp(0, 15).int()
        values[name] = ((q - zeros[group_of]) * wide).t()
        path = name.removesuffix(".weight")
        stored = (path, q, zeros, scales)
        tensors |= awq(*stored) if order is None else gptq(*stored, group_of)
    config = AWQ if order is None else GPTQ
    return saved(folder, target, tensors, quantization_config=config), values
