"""Comparison of the base model's matrices with copies of them that adapters carry.

A child process reads the checkpoint: a replica does not import torch, which would block its event
loop and so its streams.
"""

import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from lorikeet_engine.adapter_format import BaseCopy

_PATIENCE_S = 300.0


def changed_copies(folder: Path, copies: Sequence[BaseCopy]) -> list[str]:
    """Return the modules whose copied matrices differ from the base model's checkpoint.

    Matrices are compared in the copies' dtype. The digests of the checkpoint's matrices that were
    read last, 8 at most, are cached; to read a gigabyte takes about two seconds. Raises
    SubprocessError if the checkpoint cannot be read.

    folder: folder of the base model.
    copies: the copies of the base model's matrices that an adapter contains.
    """
    return [
        copy.module
        for copy in copies
        if copy.sha256 != _base_sha256(folder, copy.module, copy.dtype)
    ]


@lru_cache(8)
def _base_sha256(folder: Path, module: str, dtype: str) -> str:
    program = [sys.executable, "-P", "-m", "lorikeet_engine.models.base_sha256"]
    done = subprocess.run(
        [*program, str(folder), module, dtype],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_PATIENCE_S,
    )
    return done.stdout.strip()
