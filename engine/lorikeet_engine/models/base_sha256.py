"""Hashes of a base model's embedding or head matrix, to compare with those that trainers save.

Reads files, and loads no model.

    python -m lorikeet_engine.models.base_sha256 FOLDER embed_tokens|lm_head F32|F16|BF16 [rows]

prints the SHA-256 of the base model's matrix in that dtype, or with `rows` the digest of each row
in hexadecimal; an empty line if the matrix is quantised.
"""

import hashlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from lorikeet_engine.adapter_format import BaseShape, read_config, row_digests
from lorikeet_engine.models.stored_tensors import DTYPES, find_tensors

_HASHED_BYTES = 16 << 20


def base_sha256(folder: Path, module: str, dtype: str) -> str | None:
    """Return the SHA-256 of a checkpoint's embeddings or lm_head, cast to `dtype`.

    Returns None if the matrix is quantised or missing. A tied lm_head is the embeddings.

    Raises ModelError if config.json or a tensor header cannot be read or served.

    folder: folder of the checkpoint.
    module: embed_tokens or lm_head.
    """
    hashed, found = hashlib.sha256(), False
    for rows in _rows(folder, module, dtype):
        hashed.update(rows.numpy().data)
        found = True
    return hashed.hexdigest() if found else None


def base_row_digests(folder: Path, module: str, dtype: str) -> bytes:
    """Return a digest of each row of a checkpoint's embeddings or lm_head, cast to `dtype`.

    A digest has 8 bytes (`row_digests`). The result joins the digests of all rows, in order. It is
    empty if the matrix is quantised or missing. A tied lm_head is the embeddings.

    Raises ModelError if config.json or a tensor header cannot be read or served.

    folder: folder of the checkpoint.
    module: embed_tokens or lm_head.
    dtype: F32, F16 or BF16.
    """
    return row_digests(
        row.numpy().tobytes() for rows in _rows(folder, module, dtype) for row in rows
    )


def _rows(folder: Path, module: str, dtype: str) -> Iterator[torch.Tensor]:
    """Yield a matrix's rows, cast to `dtype`, as bytes [rows, bytes of a row], some at a time."""
    tied = BaseShape.from_config(read_config(folder)).tied
    name = "model.embed_tokens" if tied or module == "embed_tokens" else module
    stored = find_tensors(folder).get(f"{name}.weight")
    if stored is None or stored.dtype not in DTYPES:
        return
    held, (count, *sizes) = DTYPES[stored.dtype], stored.shape
    width = math.prod(sizes)
    each = max(1, _HASHED_BYTES // (width * held.itemsize))
    with stored.file.open("rb") as file:
        file.seek(stored.begin)
        for begin in range(0, count, each):
            piece = bytearray(file.read(min(each, count - begin) * width * held.itemsize))
            values = torch.frombuffer(piece, dtype=held).view(-1, width).to(DTYPES[dtype])
            yield values.view(torch.uint8)


if __name__ == "__main__":
    at, matrix, kind, *rows = sys.argv[1:]
    if rows:
        print(base_row_digests(Path(at), matrix, kind).hex())
    else:
        print(base_sha256(Path(at), matrix, kind) or "")
