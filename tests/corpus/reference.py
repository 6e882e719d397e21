"""Deltas and log probabilities that PEFT computes for an adapter."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer

from tests.corpus.bases import Base

_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class Reference:
    """Model of transformers in float32, with or without an adapter."""

    model: Any

    def deltas(self) -> dict[str, torch.Tensor]:
        """Return the adapter's delta of each module's weight, by the module's name.

        A delta of experts is [experts, d_out, d_in], under the linear's name: experts.gate_proj.
        """
        deltas: dict[str, torch.Tensor] = {}
        for name, module in self.model.named_modules():
            if isinstance(module, LoraLayer):
                delta = module.get_delta_weight("default").detach()
                parameter = getattr(module, "parameter_name", "weight")
                deltas |= _by_linear(name.removeprefix(_PREFIX), parameter, delta)
        return deltas

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """Compute the log probabilities [tokens, vocab] behind each token."""
        logits: torch.Tensor = self.model(input_ids=torch.tensor([tokens])).logits[0]
        return logits.log_softmax(-1)


def _by_linear(module: str, parameter: str, delta: torch.Tensor) -> dict[str, torch.Tensor]:
    """Split the delta of an adapted parameter into the engine's linears, by name."""
    if parameter == "weight":
        return {module: delta}
    experts = module.removesuffix(".base_layer")
    if parameter != "gate_up_proj":
        return {f"{experts}.{parameter}": delta}
    gate, up = delta.chunk(2, dim=1)
    return {f"{experts}.gate_proj": gate, f"{experts}.up_proj": up}


def reference(base: Base, folder: Path | None = None) -> Reference:
    """Load the base model with the adapter of a folder; None: without adapter."""
    model = base.model()
    if folder is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            model = peft.PeftModel.from_pretrained(model, folder).eval()
    return Reference(model)
