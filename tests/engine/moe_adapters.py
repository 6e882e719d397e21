"""Adapters on experts in each form that trainers save, and PEFT's deltas of them."""

import json
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

from lorikeet_engine.adapter_format import BaseShape

BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# LoraConfig's arguments.
PARAMETERS: dict[str, dict[str, Any]] = {
    "both": {"target_modules": ["q_proj"], "target_parameters": BOTH, "r": 4, "lora_alpha": 9},
    "gate_up": {"target_modules": [], "target_parameters": BOTH[:1], "r": 3, "lora_alpha": 8},
    "down": {
        "target_modules": ["o_proj"],
        "target_parameters": BOTH[1:],
        "r": 5,
        "use_rslora": True,
    },
    "patterns": {
        "target_modules": [],
        "target_parameters": BOTH,
        "r": 4,
        "rank_pattern": {"experts.gate_up_proj": 2},
        "alpha_pattern": {"experts.gate_up_proj": 5, "layers.1.mlp.experts.down_proj": 3},
    },
    "all": {"target_modules": "all-linear", "r": 4},
    "router": {"target_modules": ["gate"], "r": 2, "lora_alpha": 50},
}
_ALPHA, _ROUTER_RANK = 8, 4


def save_numbered(
    checkpoint: Path,
    folder: Path,
    rank: int,
    *,
    old_names: bool = False,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Save a folder with matrices for each expert's linears, as PEFT did before transformers 5.

    old_names: use Mixtral's names w1, w2 and w3.
    config: further keys of adapter_config.json.
    """
    shape = BaseShape.from_config(json.loads((checkpoint / "config.json").read_text()))
    block, names = ("block_sparse_moe", ("w1", "w3", "w2")) if old_names else ("mlp", None)
    names = names or ("gate_proj", "up_proj", "down_proj")
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(shape.layers):
        for expert in range(shape.experts):
            for name, linear in zip(names, ("gate_proj", "up_proj", "down_proj"), strict=True):
                d_in, d_out = shape.dims(shape.index(linear))
                path = f"base_model.model.model.layers.{layer}.{block}.experts.{expert}.{name}"
                tensors[f"{path}.lora_A.weight"] = torch.randn(rank, d_in, generator=generator)
                tensors[f"{path}.lora_B.weight"] = (
                    torch.randn(d_out, rank, generator=generator) * 0.1
                )
    return _save(folder, tensors, r=rank, target_modules=list(names), **config)


def save_shared(checkpoint: Path, folder: Path, rank: int) -> Path:
    """Save a folder whose experts share A of gate and up, and B of down; the rest is stacked."""
    shape = BaseShape.from_config(json.loads((checkpoint / "config.json").read_text()))
    generator, tensors = torch.Generator().manual_seed(5), {}
    for layer in range(shape.layers):
        for name in ("w1", "w2", "w3"):
            linear = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}[name]
            d_in, d_out = shape.dims(shape.index(linear))
            of_a, of_b = (shape.experts, 1) if name == "w2" else (1, shape.experts)
            experts = shape.linears[shape.index(linear)].path(layer).rpartition(".")[0]
            path = f"base_model.model.{experts}.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(of_a, rank, d_in, generator=generator)
            b = torch.randn(of_b, d_out, rank, generator=generator) * 0.1
            tensors[f"{path}.lora_B.weight"] = b
    return _save(folder, tensors, r=rank, target_modules=["w1", "w2", "w3"])


def save_linear_router(checkpoint: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Save an adapter of routers and q_proj as PEFT saved it while routers were linears.

    Today's PEFT finds no linear there. Returns the adapter's change of each parameter of the model.
    """
    random, tensors, deltas = torch.Generator().manual_seed(5), {}, {}
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    for name, weight in model.named_parameters():
        if name.endswith(("mlp.gate.weight", "q_proj.weight")):
            d_out, d_in = weight.shape
            a = torch.randn(_ROUTER_RANK, d_in, generator=random) * 0.3
            b = torch.randn(d_out, _ROUTER_RANK, generator=random) * 0.3
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
            deltas[name] = _ALPHA / _ROUTER_RANK * b @ a
    _save(folder, tensors, r=_ROUTER_RANK, target_modules=["gate", "q_proj"])
    return deltas


def _save(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "lora_alpha": _ALPHA, **config}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def save_again(checkpoint: Path, folder: Path, out: Path) -> Path:
    """Load an adapter with PEFT, which converts old forms, and save it to `out`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    peft.PeftModel.from_pretrained(model, folder).save_pretrained(out)
    return out


def peft_deltas(checkpoint: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Merge an adapter with PEFT; return the change of each parameter of the model, by name."""
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    before = {name: weight.clone() for name, weight in base.named_parameters()}
    merged = peft.PeftModel.from_pretrained(base, folder).merge_and_unload()
    return {name: weight - before[name] for name, weight in merged.named_parameters()}


def shared_deltas(folder: Path, scaling: float) -> dict[str, torch.Tensor]:
    """Return the deltas [experts, d_out, d_in] of save_shared's adapter, by linear."""
    tensors = load_file(folder / "adapter_model.safetensors")
    return {
        name.removesuffix(".lora_A.weight"): tensors[name.replace("lora_A", "lora_B")] @ a * scaling
        for name, a in tensors.items()
        if "lora_A" in name
    }
