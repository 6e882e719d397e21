"""Whether copies of a base model's matrices are its own: the files are read, no model is loaded."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch

from lorikeet_engine.adapter_format import BaseCopy
from lorikeet_engine.models.checkpoint import DTYPES, Checkpoint
from lorikeet_engine.models.config import ModelConfig


def changed_copies(folder: Path, copies: Sequence[BaseCopy]) -> list[str]:
    """The modules whose copies are not what the checkpoint in the folder holds, in their dtype.

    Reads each matrix once in a process's life, a gigabyte in about two seconds. Raises ModelError.
    """
    return [copy.module for copy in copies if copy.sha256 != _sha256(folder, copy)]


def _sha256(folder: Path, copy: BaseCopy) -> str:
    tied = ModelConfig.from_folder(folder).tied_embeddings
    name = "model.embed_tokens" if tied or copy.module == "embed_tokens" else copy.module
    return _matrix_sha256(folder, f"{name}.weight", copy.dtype)


@lru_cache(8)
def _matrix_sha256(folder: Path, name: str, dtype: str) -> str:
    with Checkpoint(folder, torch.device("meta"), DTYPES[dtype]) as checkpoint:
        return checkpoint.sha256(name, DTYPES[dtype])
