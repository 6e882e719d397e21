"""Saves an adapter as mlx_lm.lora does, and its deltas: `mlx_trainer.py FOLDER FAMILY`.

Runs in MLX's venv. Does a fourth of what the command does, without data and training: B is random.
"""

import argparse
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import gpt_oss, llama, qwen3_moe
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import save_config

PARAMETERS = {"rank": 4, "scale": 20.0, "dropout": 0.0}
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def of_llama():
    """Return a model of tests/engine/tiny_llama's shape, and its trained modules."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}
    model = llama.Model(llama.ModelArgs("llama", rms_norm_eps=1e-5, **sizes, **SIZES))
    return model, {"keys": ["self_attn.q_proj", "mlp.up_proj"]}


def of_qwen3_moe():
    """Return a model of the shape of MOE["qwen3_moe"]. By default MLX trains all of its linears."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 256, "head_dim": 32}
    experts = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
    layers = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    rope = {"rope_theta": 10_000.0, "max_position_embeddings": 512}
    more = {"model_type": "qwen3_moe", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    args = qwen3_moe.ModelArgs(**sizes, **experts, **layers, **rope, **more, **SIZES)
    return qwen3_moe.Model(args), {}


def of_gpt_oss():
    """Return a model of the shape of GPT_OSS["gpt_oss"]."""
    sizes = {"hidden_size": 64, "intermediate_size": 40, "vocab_size": 256, "head_dim": 16}
    experts = {"num_local_experts": 6, "num_experts_per_tok": 3}
    model = gpt_oss.Model(gpt_oss.ModelArgs("gpt_oss", **sizes, **experts, **SIZES))
    return model, {}


MODELS = {"llama": of_llama, "qwen3_moe": of_qwen3_moe, "gpt_oss": of_gpt_oss}


def main(folder: Path, family: str) -> None:
    """Write adapters.safetensors, adapter_config.json and deltas.npz.

    deltas.npz has the delta [d_out, d_in] of each adapted module, by name.
    """
    mx.random.seed(0)
    model, keys = MODELS[family]()
    model.freeze()
    parameters = PARAMETERS | keys
    linear_to_lora_layers(model, 1, parameters)
    deltas = {}
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear | LoRASwitchLinear):
            module.lora_b = mx.random.normal(module.lora_b.shape)
            deltas[name] = delta(module)
    arguments = argparse.Namespace(
        model="mlx-community/tiny-4bit",
        train=True,
        fine_tune_type="lora",
        num_layers=1,
        lora_parameters=parameters,
    )
    save_config(vars(arguments), folder / "adapter_config.json")
    mx.save_safetensors(
        str(folder / "adapters.safetensors"), dict(tree_flatten(model.trainable_parameters()))
    )
    np.savez(folder / "deltas.npz", **deltas)


def delta(module):
    """Return the delta of a module: its output for each unit vector, separately for each expert."""
    if isinstance(module, LoRALinear):
        eye = mx.eye(module.lora_a.shape[0])
        return np.array(module(eye) - module.linear(eye)).T
    experts, _, d_in = module.lora_a.shape
    eye = mx.eye(d_in)[:, None, None]  # tokens, of which each reads every expert
    chosen = mx.broadcast_to(mx.arange(experts), (d_in, experts))
    added = module(eye, chosen) - module.linear(eye, chosen)  # [d_in, experts, 1, d_out]
    return np.array(added[:, :, 0].transpose(1, 2, 0))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
