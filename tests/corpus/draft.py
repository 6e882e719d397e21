"""Adapter between a trainer and `lorikeet register`: its files, and edits of them."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from lorikeet_engine.adapter_format import CONFIG_FILE, WEIGHTS_FILE
from tests.corpus.bases import HUB_NAME, Base

Tensors = dict[str, torch.Tensor]


@dataclass
class Draft:
    """Adapter that the builders of a case's features write and edit in turn.

    base: base model that the adapter is trained on.
    scratch: folder for all files of the draft.
    rank: rank that trainers use.
    seed: seed of all random numbers.
    base_model: value of register's --base-model.
    convert: writes a PEFT folder as `lorikeet convert` does; register is given that folder.
    folder: the trainer's files, edited by later builders.
    truth: the same adapter as PEFT reads it, once a trainer has saved it.
    source: path that register is given.
    """

    base: Base
    scratch: Path
    rank: int
    seed: int
    base_model: str | None = None
    convert: Callable[[Path], object] | None = None

    def __post_init__(self) -> None:
        self.folder = self.scratch / "adapter"
        self.truth = self.scratch / "truth"
        self.source = self.folder

    def keep_truth(self) -> None:
        """Copy the trainer's files to `truth`, and name the base model in the config."""
        shutil.copytree(self.folder, self.truth)
        self.name_base(HUB_NAME)

    def config(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.folder / CONFIG_FILE).read_text())
        return loaded

    def write_config(self, config: Mapping[str, Any]) -> None:
        (self.folder / CONFIG_FILE).write_text(json.dumps(config, indent=2))

    def edit_config(self, **changes: Any) -> None:
        self.write_config(self.config() | changes)

    def name_base(self, name: str | None) -> None:
        """Write the base model's name to the config; MLX's has another key for it."""
        key = "model" if "lora_parameters" in self.config() else "base_model_name_or_path"
        self.edit_config(**{key: name})

    def tensors(self) -> Tensors:
        loaded: Tensors = load_file(self.folder / WEIGHTS_FILE)
        return loaded

    def edit_weights(self, change: Callable[[Tensors], Tensors]) -> None:
        """Change the tensors of `folder`, but not those of `truth`."""
        _save(change(self.tensors()), self.folder)

    def edit_both(self, change: Callable[[Tensors], Tensors]) -> None:
        """Change the tensors of `folder` and of `truth`."""
        _save(change(load_file(self.truth / WEIGHTS_FILE)), self.truth)
        self.edit_weights(change)

    def rename(self, change: Callable[[str], str]) -> None:
        self.edit_weights(lambda tensors: {change(name): t for name, t in tensors.items()})


def _save(tensors: Tensors, folder: Path) -> None:
    dense = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(dense, folder / WEIGHTS_FILE, {"format": "pt"})
