"""What transformers and PEFT say of one family in float32, with an engine's storage imitated."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from lorikeet_engine.adapter import AdapterRef
from tests.engine.matrix.storages import RoundedCache, Storage, key_gain
from tests.engine.peft_adapters import BlobShelf, save_adapter


class SavedFamily:
    """A family's checkpoint and its adapters, in PEFT's folders and as blobs.

    adapters: LoraConfig's arguments by name.
    """

    def __init__(
        self, checkpoint: Path, folder: Path, adapters: Mapping[str, dict[str, Any]]
    ) -> None:
        self.checkpoint = checkpoint
        self.shelf = BlobShelf(folder / "blobs")
        self.folders = {
            name: save_adapter(checkpoint, folder / name, seed, **lora)
            for seed, (name, lora) in enumerate(adapters.items())
        }
        self.refs: dict[str | None, AdapterRef | None] = {None: None}
        self.refs |= {name: self.shelf.add(saved, name) for name, saved in self.folders.items()}


class StoredReference:
    """The models of a family with its adapters, that compute as an engine with a storage should."""

    def __init__(self, family: SavedFamily, storage: Storage) -> None:
        self.storage = storage
        self._known: dict[tuple[str | None, tuple[int, ...]], torch.Tensor] = {}
        self._models = {name: self._load(family, name) for name in family.refs}

    def _load(self, family: SavedFamily, adapter: str | None) -> Any:
        base = transformers.AutoModelForCausalLM.from_pretrained(
            family.checkpoint, dtype=torch.float32, attn_implementation="eager"
        )
        self.storage.imitate(base)
        if adapter is None:
            return base
        return peft.PeftModel.from_pretrained(base, family.folders[adapter])

    def logits(self, adapter: str | None, tokens: Sequence[int]) -> torch.Tensor:
        """[tokens, vocab], of what comes after each."""
        asked = adapter, tuple(tokens)
        if asked not in self._known:  # an answer shows several features
            self._known[asked] = self._computed(adapter, tokens)
        return self._known[asked]

    @torch.inference_mode()
    def _computed(self, adapter: str | None, tokens: Sequence[int]) -> torch.Tensor:
        model = self._models[adapter]
        cache = RoundedCache(key_gain(model.config)) if self.storage.rounds_kv else None
        logits: torch.Tensor = model(torch.tensor([tokens]), past_key_values=cache).logits[0]
        return logits
