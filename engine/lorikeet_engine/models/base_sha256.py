"""Hash of a base model's embedding or head matrix, to compare with the copies that trainers save.

Reads files, and loads no model.

    python -m lorikeet_engine.models.base_sha256 FOLDER embed_tokens|lm_head F32|F16|BF16

prints the SHA-256 of the base model's matrix in that dtype, or an empty line if it is quantised.
"""

import hashlib
import math
import sys
from pathlib import Path

import torch

from lorikeet_engine.adapter_format import BaseShape, read_config
from lorikeet_engine.models.stored_tensors import DTYPES, find_tensors

_HASHED_BYTES = 16 << 20


def base_sha256(folder: Path, module: str, dtype: str) -> str | None:
    """Return the SHA-256 of a checkpoint's embeddings or lm_head, cast to `dtype`.

    Returns None if the matrix is quantised or missing. A tied lm_head is the embeddings.

    Raises ModelError if config.json or a tensor header cannot be read or served.

    folder: folder of the checkpoint.
    module: embed_tokens or lm_head.
    """
    tied = BaseShape.from_config(read_config(folder)).tied
    name = "model.embed_tokens" if tied or module == "embed_tokens" else module
    stored, hashed = find_tensors(folder).get(f"{name}.weight"), hashlib.sha256()
    if stored is None or stored.dtype not in DTYPES:
        return None
    held = DTYPES[stored.dtype]
    left = math.prod(stored.shape) * held.itemsize
    with stored.file.open("rb") as file:
        file.seek(stored.begin)
        while left:
            piece = bytearray(file.read(min(_HASHED_BYTES, left)))
            left -= len(piece)
            values = torch.frombuffer(piece, dtype=held).to(DTYPES[dtype])
            hashed.update(values.view(torch.uint8).numpy().data)
    return hashed.hexdigest()


if __name__ == "__main__":
    print(base_sha256(Path(sys.argv[1]), *sys.argv[2:]) or "")
