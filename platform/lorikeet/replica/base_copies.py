"""Whether copies of a base model's matrices are its own.

The files are read by a process of its own: a replica has no torch, whose import would hold up its
streams.
"""

import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from lorikeet_engine.adapter_format import BaseCopy

_PATIENCE_S = 300.0


def changed_copies(folder: Path, copies: Sequence[BaseCopy]) -> list[str]:
    """The modules whose copies are not what the checkpoint in the folder holds, in their dtype.

    Reads each matrix once in a process's life, a gigabyte in about two seconds. Raises
    SubprocessError where it cannot be read.
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
