"""Copies of the base model's own matrices, which trainers save along with an adapter.

Beside LoRA's matrices, PEFT saves lm_head if it is targeted, and lm_head and embeddings if the
vocabulary seems to have grown. A blob contains hashes instead of these copies, so that whoever has
the base model's weights can check them: a copy that differs was trained or resized.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lorikeet_engine.adapter_format.header import DTYPE_BYTES, parse_json_object, read_header
from lorikeet_engine.adapter_format.saved_weights import SavedTensor
from lorikeet_engine.errors import AdapterRejected

COPIES_KEY = "lorikeet_base_copies"
MODULES = ("embed_tokens", "lm_head")
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class BaseCopy:
    """Name, type, shape and hash of a base model's matrix that was saved along with an adapter.

    module: the matrix that was copied: embed_tokens or lm_head.
    dtype: F32, F16 or BF16.
    sha256: SHA-256 of the matrix's bytes in this dtype.
    """

    module: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


def describe_copy(module: str, tensor: SavedTensor) -> BaseCopy:
    """Hash a copy of a base model's matrix in a trainer's folder; return its name, shape and hash.

    module: embed_tokens or lm_head.
    tensor: place of the copy in the folder.

    Raises AdapterRejected if the file ends early, or if float32 cannot hold a float64 value.
    """
    hashed = hashlib.sha256()
    for piece in tensor.pieces():
        hashed.update(piece)
    return BaseCopy(module, tensor.blob_dtype, tensor.shape, hashed.hexdigest())


def copies_metadata(copies: Iterable[BaseCopy]) -> dict[str, str]:
    """Return the metadata entries of a blob, an adapter's file, that describe copies of the base
    model's matrices; empty without copies.
    """
    entries = [asdict(copy) for copy in sorted(copies, key=lambda copy: copy.module)]
    if not entries:
        return {}
    return {COPIES_KEY: json.dumps({"copies": entries}, sort_keys=True, separators=(",", ":"))}


def base_copies(blob: Path) -> tuple[BaseCopy, ...]:
    """Return name, shape and hash of each matrix of the base model saved along with an adapter.

    blob: the adapter's file.

    Raises AdapterRejected if the blob's header is malformed.
    """
    return parse_copies(read_header(blob).metadata)


def parse_copies(metadata: Mapping[str, str]) -> tuple[BaseCopy, ...]:
    """Parse names, shapes and hashes of copied matrices from the metadata of an adapter's file.

    Raises AdapterRejected if they are malformed.
    """
    text = metadata.get(COPIES_KEY)
    if text is None:
        return ()
    entries = parse_json_object(text, f"__metadata__.{COPIES_KEY}").get("copies")
    if not isinstance(entries, list) or len(entries) > len(MODULES):
        raise _malformed()
    return tuple(map(_parse, entries))


def _parse(entry: Any) -> BaseCopy:
    if not isinstance(entry, dict) or set(entry) != {"module", "dtype", "shape", "sha256"}:
        raise _malformed()
    shape = entry["shape"]
    good = (
        entry["module"] in MODULES
        and entry["dtype"] in DTYPE_BYTES
        and isinstance(shape, list)
        and all(type(size) is int for size in shape)
        and isinstance(entry["sha256"], str)
        and _SHA256.fullmatch(entry["sha256"])
    )
    if not good:
        raise _malformed()
    return BaseCopy(entry["module"], entry["dtype"], tuple(shape), entry["sha256"])


def _malformed() -> AdapterRejected:
    field = f"__metadata__.{COPIES_KEY}"
    return AdapterRejected(f"{field} does not describe copies of the base's weights", field=field)
