"""Reference results of PEFT: each module's delta, and the logits."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer

from tests.corpus.bases import Base
from tests.engine.peft_adapters import activation

_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class Reference:
    """A transformers model in float32, with or without an adapter."""

    model: Any

    def deltas(self) -> dict[str, torch.Tensor]:
        """Return the adapter's change of each module's weight, by the module's name.

        Experts are stacked by linear, [experts, d_out, d_in], as experts.gate_proj and so
        on.
        """
        deltas: dict[str, torch.Tensor] = {}
        for name, module in self.model.named_modules():
            if isinstance(module, LoraLayer):
                delta = module.get_delta_weight("default").detach()
                parameter = getattr(module, "parameter_name", "weight")
                module_name = name.removeprefix(_PREFIX)
                if self.model.config.model_type == "gpt_oss" and delta.dim() == 3:
                    deltas |= _of_gpt_oss(module_name, parameter, delta)
                else:
                    deltas |= _by_linear(module_name, parameter, delta)
        return deltas

    def logprobs(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """Return log probabilities [tokens, vocab] of the next token after each token of a prompt
        and its answer.
        """
        return _logprobs(self.model, tuple(prompt), tuple(answer))


@lru_cache(maxsize=16)  # many cases ask the same of the base model
@torch.inference_mode()
def _logprobs(model: Any, prompt: tuple[int, ...], answer: tuple[int, ...]) -> torch.Tensor:
    tokens = [*prompt, *answer]
    activated = activation(model, list(prompt), len(tokens))
    logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), **activated).logits[0]
    return logits.log_softmax(-1)


def _by_linear(module: str, parameter: str, delta: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a wrapped parameter's delta, split by the engine's linears."""
    if parameter == "weight":
        return {module: delta}
    experts = module.removesuffix(".base_layer")
    if parameter != "gate_up_proj":
        return {f"{experts}.{parameter}": delta}
    gate, up = delta.chunk(2, dim=1)
    return {f"{experts}.gate_proj": gate, f"{experts}.up_proj": up}


def _of_gpt_oss(module: str, parameter: str, delta: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a delta [experts, d_in, d_out] of gpt-oss, split by the engine's linears."""
    experts, delta = module.removesuffix(".base_layer"), delta.mT
    if parameter != "gate_up_proj":
        return {f"{experts}.{parameter}": delta}
    return {f"{experts}.gate_proj": delta[:, 0::2], f"{experts}.up_proj": delta[:, 1::2]}


def reference(base: Base, folder: Path | None = None) -> Reference:
    """Return the base model under the adapter that PEFT reads from a folder."""
    model = base.model()
    if folder is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            model = peft.PeftModel.from_pretrained(model, folder).eval()
    return Reference(model)
