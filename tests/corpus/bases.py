"""Tiny base models of the served families, shared by trainers and the service."""

import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

from lorikeet.gateway.services import ServedModel
from lorikeet_engine.adapter_format import BaseShape, read_config
from tests.engine.conftest import FAMILIES as DENSE
from tests.engine.conftest import (
    GEMMA4_E,
    GEMMA4_MOE,
    GPT_OSS,
    HYBRID,
    LATENT,
    MAMBA,
    MOE,
    YARN,
)

HUB_NAME = "acme/Tiny-1.5B-Instruct"
"""Name of the base model in trainers' configs, which the service knows as an alias."""
SERVED_NAME = "tiny"
LAYERS = 3
_SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "mistral": {"model_type": "mistral", "sliding_window": 512},
    "ministral3": {
        "model_type": "ministral3",
        "head_dim": 32,
        "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.2},
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "tied": {"model_type": "qwen2", "tie_word_embeddings": True},
}
MIXTURES: dict[str, dict[str, Any]] = {"qwen3_moe": MOE["qwen3_moe"], **GPT_OSS}
OTHERS: dict[str, dict[str, Any]] = {
    "gemma4_text": DENSE["gemma4_text"],
    **GEMMA4_MOE,
    **GEMMA4_E,
    **HYBRID,
    **MAMBA,
    **LATENT,
}


@dataclass(frozen=True)
class Base:
    """Checkpoint of a base model in float32."""

    folder: Path

    @classmethod
    def save(cls, family: str, folder: Path) -> "Base":
        """Save a random checkpoint whose norms and biases have an effect."""
        settings = {**_SIZES, **{**FAMILIES, **MIXTURES, **OTHERS}[family]}
        config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            for name, weight in model.named_parameters():
                if weight.dim() == 1:
                    weight.data.normal_(1.0 if "norm" in name else 0.0, 0.3)
        model.save_pretrained(folder)
        return cls(folder)

    @cached_property
    def shape(self) -> BaseShape:
        return BaseShape.from_config(read_config(self.folder))

    @property
    def served(self) -> dict[str, ServedModel]:
        """Return the base model as a gateway knows it."""
        return {SERVED_NAME: ServedModel(self.shape, aliases=(HUB_NAME,))}

    def model(self) -> Any:
        """Return a new transformers model in float32."""
        return copy.deepcopy(self._model)

    @cached_property
    def _model(self) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
