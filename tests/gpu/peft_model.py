"""Float32 reference of a model and its adapters: transformers with PEFT."""

from pathlib import Path

import peft
import torch
import transformers


class Reference:
    """Base model and named adapters, loaded from PEFT folders."""

    def __init__(self, model: Path, adapters: dict[str, Path], device: str) -> None:
        self._device = device
        base = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager"
        ).to(device)
        (first, folder), *others = adapters.items()
        self._model = peft.PeftModel.from_pretrained(base, folder, adapter_name=first)
        for name, folder in others:
            self._model.load_adapter(folder, name)

    @torch.inference_mode()
    def logprobs(self, adapter: str | None, prompt: list[int], said: list[int]) -> torch.Tensor:
        """Return log probabilities [said, vocabulary] of each said token, given those before."""
        ids = torch.tensor([prompt + said[:-1]], device=self._device)
        if adapter is None:
            with self._model.disable_adapter():
                logits = self._model(input_ids=ids).logits
        else:
            self._model.set_adapter(adapter)
            logits = self._model(input_ids=ids).logits
        return logits[0, len(prompt) - 1 :].log_softmax(-1).cpu()
