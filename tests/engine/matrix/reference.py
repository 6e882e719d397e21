"""Logits of transformers and PEFT in float32 for one family, with an engine's storage imitated."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import torch

from lorikeet_engine.adapter import Adapter
from tests.engine.blob_shelf import BlobShelf
from tests.engine.matrix.storages import RoundedCache, Storage
from tests.engine.models.fp8_models import set_weights
from tests.engine.peft_adapters import activation, loaded, save_adapter
from tests.engine.peft_world import composed, peft_sum

COMPOSITION = "composition"
"""Name of the composition among the adapters of a family."""


class SavedFamily:
    """Checkpoint of a family and its adapters, in PEFT's folders and as blobs.

    adapters: LoraConfig's arguments by name.
    composition: weights of the adapters that COMPOSITION adds up.
    """

    def __init__(
        self,
        checkpoint: Path,
        folder: Path,
        adapters: Mapping[str, dict[str, Any]],
        composition: Mapping[str, float],
    ) -> None:
        self.checkpoint = checkpoint
        self.shelf = BlobShelf(folder / "blobs")
        self.folders = {
            name: save_adapter(checkpoint, folder / name, seed, **lora)
            for seed, (name, lora) in enumerate(adapters.items())
        }
        self.refs: dict[str | None, Adapter | None] = {None: None}
        self.refs |= {name: self.shelf.add(saved, name) for name, saved in self.folders.items()}
        self.refs[COMPOSITION] = composed(self.refs, composition)
        self.folder, self.composition = folder, composition


class StoredReference:
    """Models of a family's adapters that compute as an engine with a storage should."""

    def __init__(
        self, family: SavedFamily, storage: Storage, weights: Mapping[str, torch.Tensor]
    ) -> None:
        """Load the models. weights: floats that a served FP8 checkpoint stands for, by name."""
        self.storage = storage
        # Ranks round once more those parts of blocks that they share: `imitate` does that.
        self._weights = weights if "tensor_parallel" not in storage.settings else {}
        self._known: dict[tuple[str | None, tuple[int, ...]], torch.Tensor] = {}
        self._models = {name: self._load(family, name) for name in family.refs}

    def _load(self, family: SavedFamily, adapter: str | None) -> Any:
        base = loaded(family.checkpoint)
        self.storage.imitate(base)
        set_weights(base, self._weights)
        if adapter is None:
            return base
        if adapter == COMPOSITION:
            return peft_sum(base, family.folder, family.composition)
        return peft.PeftModel.from_pretrained(base, family.folders[adapter])

    def logits(
        self, adapter: str | None, prompt: Sequence[int], answer: Sequence[int]
    ) -> torch.Tensor:
        """Compute the logits [tokens, vocab] behind each token of a prompt and its answer."""
        asked = adapter, (*prompt, *answer)
        if asked not in self._known:  # several features show in one answer
            self._known[asked] = self._computed(adapter, [*prompt], [*prompt, *answer])
        return self._known[asked]

    @torch.inference_mode()
    def _computed(self, adapter: str | None, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        model = self._models[adapter]
        cache = RoundedCache(model.config) if self.storage.rounds_kv else None
        activated = activation(model, prompt, len(tokens))
        asked = torch.tensor([tokens])
        logits: torch.Tensor = model(asked, past_key_values=cache, **activated).logits[0]
        return logits
