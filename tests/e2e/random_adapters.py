"""Random adapters of the demo model whose answers all differ, and the expected answers."""

import functools
import json
import threading
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from tests.e2e.conftest import ROOT

HIDDEN = 256  # of the demo model
LINEARS = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj")
RANK = 4
ALPHA = 4.0
SCALE = 0.5
"""Scale of the weights: log probabilities under two adapters differ by whole units."""


def tensors(seed: int) -> dict[str, NDArray[np.float32]]:
    """Return the matrices of one adapter, by PEFT's names."""
    dice = np.random.default_rng(seed)
    shapes = {"lora_A": (RANK, HIDDEN), "lora_B": (HIDDEN, RANK)}
    return {
        f"base_model.model.{linear}.{part}.weight": dice.normal(
            scale=SCALE * RANK**-0.5, size=shape
        ).astype(np.float32)
        for linear in LINEARS
        for part, shape in shapes.items()
    }


def write_adapter(folder: Path, seed: int, number: int) -> Path:
    """Write a PEFT folder of a seed.

    number: changes the digest, but log probabilities only in the fifth digit.
    """
    folder.mkdir(exist_ok=True)
    save_file(tensors(seed), folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "lorikeet-demo",
        "r": RANK,
        "lora_alpha": ALPHA * (1 + number * 1e-8),
        "target_modules": list(LINEARS),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Reference:
    """Demo model in transformers, with the matrices of each seed merged. Thread-safe."""

    def __init__(self, seeds: range) -> None:
        self._models = {seed: _merged(seed) for seed in seeds}
        self._lock = threading.Lock()
        self._logprobs = functools.cache(self._compute)

    def logprobs(
        self, seed: int, prompt: tuple[int, ...], tokens: tuple[int, ...]
    ) -> NDArray[np.float32]:
        """Return the log probability of each token that follows the prompt."""
        with self._lock:
            return self._logprobs(seed, prompt, tokens)

    @torch.inference_mode()
    def _compute(
        self, seed: int, prompt: tuple[int, ...], tokens: tuple[int, ...]
    ) -> NDArray[np.float32]:
        whole = torch.tensor([[*prompt, *tokens]])
        rows = self._models[seed](whole).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        found: NDArray[np.float32] = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()
        return found


@torch.inference_mode()
def _merged(seed: int) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(ROOT / "demo" / "model").float()
    matrices, weights = tensors(seed), model.state_dict()
    for linear in LINEARS:
        a, b = (
            torch.from_numpy(matrices[f"base_model.model.{linear}.{part}.weight"])
            for part in ("lora_A", "lora_B")
        )
        weights[f"{linear}.weight"] += (ALPHA / RANK) * (b @ a)
    module: torch.nn.Module = model
    return module
