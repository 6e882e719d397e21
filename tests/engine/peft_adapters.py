"""Adapters made with PEFT."""

import re
from collections.abc import Sequence
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import peft
import torch
import transformers
from peft.tuners.lora.variants import calculate_alora_offsets

_STORED_AS_ONE = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
# Where MLPs are experts, whose linears are no modules, those of attention take their place.
_BESIDE_EXPERTS = {"gate_proj": "q_proj", "up_proj": "v_proj", "down_proj": "o_proj"}


def loaded(checkpoint: Path) -> Any:
    """Load a checkpoint's model in transformers, in float32; a copy if it was loaded before."""
    return deepcopy(_loaded(checkpoint))


@lru_cache(maxsize=2)
def _loaded(checkpoint: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )


def save_adapter(
    checkpoint: Path, folder: Path, seed: int = 0, *, rows: int | None = None, **lora: Any
) -> Path:
    """Save a PEFT folder of a random adapter that changes the answers of a checkpoint's model.

    rows: tokens to which the vocabulary is resized before the training; None: it is not.
    lora: LoraConfig's arguments; names of linears that the model stores as one become its name.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        base = loaded(checkpoint)
        if rows is not None:
            base.resize_token_embeddings(rows)
        lora = _named_as_in(base, lora)
        model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **lora))
        for name, weight in model.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                weight.data.normal_(0.0, 0.1)
            if "lora_magnitude_vector" in name:
                weight.data *= 1 + torch.randn_like(weight) / 5
            if weight.requires_grad and name.endswith("bias") and "lora_B" not in name:
                weight.data += torch.randn_like(weight) / 10
            if "trainable_tokens_delta" in name or "modules_to_save" in name:
                weight.data += torch.randn_like(weight) * weight.std()
    return saved(model, folder)


def saved(model: Any, folder: Path) -> Path:
    """Save a PEFT model without its model card, which would take longer than the weights."""
    with patch.object(model, "create_or_update_model_card"):
        model.save_pretrained(folder)
    return folder


def embedder(checkpoint: Path) -> Any:
    """Load a checkpoint's decoder alone in transformers, in float32."""
    return transformers.AutoModel.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )


def save_embedder(checkpoint: Path, folder: Path, seed: int = 0, **lora: Any) -> Path:
    """Save a PEFT folder of a random adapter for embeddings over a checkpoint's decoder.

    lora: LoraConfig's arguments.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        base, config = embedder(checkpoint), peft.LoraConfig(task_type="FEATURE_EXTRACTION", **lora)
        model = peft.get_peft_model(base, config)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.data.normal_(0.0, 0.1)
    return saved(model, folder)


def classifier(checkpoint: Path, labels: int) -> Any:
    """Load a checkpoint's model for sequence classification in transformers, in float32."""
    return transformers.AutoModelForSequenceClassification.from_pretrained(
        checkpoint, num_labels=labels, dtype=torch.float32, attn_implementation="eager"
    )


def save_head(checkpoint: Path, folder: Path, labels: int, seed: int = 0, **lora: Any) -> Path:
    """Save a PEFT folder of a random classifier over a checkpoint's model.

    lora: LoraConfig's arguments.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        base = classifier(checkpoint, labels)
        model = peft.get_peft_model(base, peft.LoraConfig(task_type="SEQ_CLS", **lora))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.data.normal_(0.0, 0.1)
            if "modules_to_save" in name:
                weight.data.normal_(0.0, 0.5)
    return saved(model, folder)


def invoking(ids: list[int], invocation: Sequence[int]) -> list[int]:
    """Return a prompt with an activated LoRA's invocation tokens in its last tenth."""
    at = len(ids) * 9 // 10
    return [*ids[:at], *invocation, *ids[at + len(invocation) :]]


def activation(model: Any, prompt: list[int], tokens: int) -> dict[str, Any]:
    """Return the argument with which a PEFT model of an activated LoRA computes a prompt and the
    answer behind it as it does while it generates the answer; nothing for other models.

    tokens: number of tokens of prompt and answer.
    """
    if not getattr(getattr(model, "active_peft_config", None), "alora_invocation_tokens", None):
        return {}
    (offset,) = calculate_alora_offsets(
        model.peft_config, model.active_adapter, torch.tensor([prompt])
    )
    return {"alora_offsets": [offset and offset + tokens - len(prompt)]}


def _named_as_in(model: Any, lora: dict[str, Any]) -> dict[str, Any]:
    known = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    renames = _BESIDE_EXPERTS if "experts" in known else _STORED_AS_ONE
    renamed = {part: one for part, one in renames.items() if part not in known}
    renamed |= {"embed_tokens": "embeddings"} if "embeddings" in known else {}

    def name(key: str) -> str:
        return renamed.get(key, key)

    named = dict(lora)
    if isinstance(lora.get("target_modules"), list):
        named["target_modules"] = sorted({name(target) for target in lora["target_modules"]})
    for pattern in {"rank_pattern", "alpha_pattern"} & set(lora):
        named[pattern] = {
            key if "experts." in key else re.sub(r"\w+$", lambda last: name(last[0]), key): value
            for key, value in lora[pattern].items()
        }
    return named
