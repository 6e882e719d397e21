"""Small adapters in the folders that PEFT writes."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from lorikeet_engine.adapter_format import BaseShape

SHAPE = BaseShape("llama", 2, 8, 16, 2, 1, 4, vocabulary=24)


def peft_folder(folder: Path, seed: int = 0, rank: int = 4, hidden: int = SHAPE.hidden) -> Path:
    """Write a PEFT folder of a LoRA of q_proj in both layers."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(seed)
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{side}.weight": draw.normal(
            size=size
        ).astype(np.float32)
        for layer in range(SHAPE.layers)
        for side, size in (("A", (rank, hidden)), ("B", (hidden, rank)))
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
