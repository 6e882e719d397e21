"""Tiny Llama, and adapters of it made by PEFT."""

from typing import Any

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lorikeet_engine.adapter_format import BaseShape

CONFIG = LlamaConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
)
SHAPE = BaseShape.from_config(CONFIG.to_dict())
LINEARS = [linear.name for linear in SHAPE.linears]


def trained(**options: Any) -> peft.PeftModel:
    """Return an adapter whose random B gives it an effect; options: LoraConfig's."""
    torch.manual_seed(0)
    model = peft.get_peft_model(LlamaForCausalLM(CONFIG), peft.LoraConfig(**options))
    for name, weight in model.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:
            weight.data.normal_()
    return model
