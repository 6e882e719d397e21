"""Copies of the base model's own matrices, which trainers save beside an adapter.

PEFT saves the head along where it is targeted, and head and embeddings where the vocabulary seems
to have grown. A blob has no room for them: it says what they held, so that whoever has the base
model's weights can tell whether they are those. A copy that is not was trained or resized.
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
    """What a copy held: a matrix [vocabulary, hidden] by the SHA-256 of its bytes in this dtype.

    module: embed_tokens or lm_head. dtype: F32, F16 or BF16.
    """

    module: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


def describe_copy(module: str, tensor: SavedTensor) -> BaseCopy:
    """Read a copy that lies in a trainer's folder. Raises AdapterRejected."""
    hashed = hashlib.sha256()
    for piece in tensor.pieces():
        hashed.update(piece)
    return BaseCopy(module, tensor.blob_dtype, tensor.shape, hashed.hexdigest())


def copies_metadata(copies: Iterable[BaseCopy]) -> dict[str, str]:
    """What a blob's metadata says of copies; nothing where there are none."""
    entries = [asdict(copy) for copy in sorted(copies, key=lambda copy: copy.module)]
    if not entries:
        return {}
    return {COPIES_KEY: json.dumps({"copies": entries}, sort_keys=True, separators=(",", ":"))}


def base_copies(blob: Path) -> tuple[BaseCopy, ...]:
    """The copies that lay beside a blob's adapter. Raises AdapterRejected."""
    return parse_copies(read_header(blob).metadata)


def parse_copies(metadata: Mapping[str, str]) -> tuple[BaseCopy, ...]:
    """The copies that a blob's metadata speaks of. Raises AdapterRejected."""
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
