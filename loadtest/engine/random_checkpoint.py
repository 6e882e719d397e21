"""Base model of given shapes with random weights, in Hugging Face's files."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from loadtest.engine.random_model import RandomCheckpoint, write_config
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.cut import Cut, stack
from lorikeet_engine.models.llama import LlamaModel
from lorikeet_engine.models.stored_tensors import INDEX

SHARD_BYTES = 5 * 10**9


def write_checkpoint(folder: Path, config: Mapping[str, Any], device: torch.device) -> Path:
    """Write config.json, bfloat16 shards and their index; the numbers are drawn on the device.

    The numbers are those of a RandomCheckpoint on that device. Files of a finished call are kept.
    """
    if not (folder / INDEX).exists():
        parsed = ModelConfig.from_folder(write_config(folder, config))
        shards = _Shards(folder, device, parsed.sigmoid_scale or 1.0)
        LlamaModel(parsed, shards)
        shards.close()
    return folder


class _Shards(RandomCheckpoint):
    """Checkpoint that writes each tensor that a model reads to files; returns meta tensors."""

    def __init__(self, folder: Path, device: torch.device, routed_scale: float) -> None:
        super().__init__(device, torch.bfloat16, routed_scale=routed_scale)
        self.folder = folder
        self._shard: dict[str, torch.Tensor] = {}
        self._written: list[list[str]] = []  # names in each shard

    def _read(self, names: Sequence[str], cuts: Sequence[Cut]) -> torch.Tensor:
        for name, cut in zip(names, cuts, strict=True):
            self._shard[name] = super()._read([name], [cut]).contiguous().cpu()
            if sum(tensor.nbytes for tensor in self._shard.values()) >= SHARD_BYTES:
                self._write()
        return stack(cuts, torch.device("meta"), self.dtype)[0]

    def close(self) -> None:
        """Write the last shard, and the index from tensor to file."""
        if self._shard:
            self._write()
        total, file_of = len(self._written), dict[str, str]()
        for number, names in enumerate(self._written, 1):
            file = f"model-{number:05}-of-{total:05}.safetensors"
            (self.folder / f"{number}.part").rename(self.folder / file)
            file_of |= dict.fromkeys(names, file)
        (self.folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": file_of}))

    def _write(self) -> None:
        self._written.append(list(self._shard))
        save_file(self._shard, self.folder / f"{len(self._written)}.part")
        self._shard = {}
