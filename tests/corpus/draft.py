"""An adapter on its way from a trainer to `lorikeet register`: its files, and edits of them."""

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
    """An adapter's files while builders work on them.

    folder: the trainer's folder, which later builders edit.
    truth: a copy of the same adapter that PEFT can read, made once a trainer has saved it.
    source: path that register is given.
    base_model: value of register's --base-model.
    convert: the `lorikeet convert` call that makes the folder for register, if there is one.
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
        """Copy the adapter that the trainer saved to `truth`, which PEFT reads."""
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
        """Set the base model's name in the config; MLX uses another key."""
        key = "model" if "lora_parameters" in self.config() else "base_model_name_or_path"
        self.edit_config(**{key: name})

    def tensors(self) -> Tensors:
        loaded: Tensors = load_file(self.folder / WEIGHTS_FILE)
        return loaded

    def edit_weights(self, change: Callable[[Tensors], Tensors]) -> None:
        """Change the weights file, not the truth."""
        _save(change(self.tensors()), self.folder)

    def edit_both(self, change: Callable[[Tensors], Tensors]) -> None:
        """Change the adapter itself: the weights file and the truth."""
        _save(change(load_file(self.truth / WEIGHTS_FILE)), self.truth)
        self.edit_weights(change)

    def rename(self, change: Callable[[str], str]) -> None:
        self.edit_weights(lambda tensors: {change(name): t for name, t in tensors.items()})


def _save(tensors: Tensors, folder: Path) -> None:
    dense = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(dense, folder / WEIGHTS_FILE, {"format": "pt"})
