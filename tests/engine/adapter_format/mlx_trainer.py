"""Saves an adapter as mlx_lm.lora does, and what it adds: `mlx_trainer.py FOLDER`, in MLX's venv.

A fourth of what the command does, without data and training: random B instead.
"""

import argparse
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import save_config

PARAMETERS = {"rank": 4, "scale": 20.0, "dropout": 0.0, "keys": ["self_attn.q_proj", "mlp.up_proj"]}


def main(folder: Path) -> None:
    """Write adapters.safetensors, adapter_config.json and deltas.npz, delta [d_out, d_in] each."""
    mx.random.seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = llama.Model(llama.ModelArgs("llama", rms_norm_eps=1e-5, **sizes, **heads))
    model.freeze()
    linear_to_lora_layers(model, 1, PARAMETERS)
    for _, module in model.named_modules():
        if isinstance(module, LoRALinear):
            module.lora_b = mx.random.normal(module.lora_b.shape)
    arguments = argparse.Namespace(
        model="mlx-community/tiny-4bit",
        train=True,
        fine_tune_type="lora",
        num_layers=1,
        lora_parameters=PARAMETERS,
    )
    save_config(vars(arguments), folder / "adapter_config.json")
    mx.save_safetensors(
        str(folder / "adapters.safetensors"), dict(tree_flatten(model.trainable_parameters()))
    )
    deltas = {}
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            eye = mx.eye(module.lora_a.shape[0])
            deltas[name] = np.array(module(eye) - module.linear(eye)).T
    np.savez(folder / "deltas.npz", **deltas)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
