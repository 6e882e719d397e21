"""Comparison of the base model's matrices with those that adapters carry.

A child process reads the checkpoint: a replica does not import torch, which would block its event
loop and so its streams.
"""

import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from lorikeet_engine.adapter_format import DIGEST_BYTES, BaseCopy, WholeModule

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
        copy.module for copy in copies if copy.sha256 != _hashed(folder, copy.module, copy.dtype)
    ]


def changed_rows(folder: Path, modules: Sequence[WholeModule]) -> dict[str, list[int]]:
    """Return the ids of the rows of trained modules that differ from the base model's checkpoint,
    by module.

    Rows behind the base model's vocabulary differ. Modules that the base model has quantised are
    left out. Caches and raises as `changed_copies` does.
    """
    changed = {}
    for each in modules:
        of_base = bytes.fromhex(_hashed(folder, each.module, each.dtype, "rows"))
        if of_base:
            begins = range(0, len(each.digests), DIGEST_BYTES)
            changed[each.module] = [
                at // DIGEST_BYTES
                for at in begins
                if of_base[at : at + DIGEST_BYTES] != each.digests[at : at + DIGEST_BYTES]
            ]
    return changed


@lru_cache(8)
def _hashed(folder: Path, module: str, dtype: str, *options: str) -> str:
    program = [sys.executable, "-P", "-m", "lorikeet_engine.models.base_sha256"]
    done = subprocess.run(
        [*program, str(folder), module, dtype, *options],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_PATIENCE_S,
    )
    return done.stdout.strip()
