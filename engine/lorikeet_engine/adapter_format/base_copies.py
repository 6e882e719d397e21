"""Copies of the base model's own matrices, which trainers save along with an adapter.

Beside LoRA's matrices, PEFT saves lm_head if it is targeted, and lm_head and embeddings if the
vocabulary seems to have grown. A blob contains hashes of these copies, so that whoever has the base
model's weights can check them: a copy that differs was trained or resized.

Modules that were trained whole (modules_to_save), and copies of a vocabulary that may have been
resized, are in the blob. Often few of their rows differ from the base model's, as of embeddings
only those of tokens that the training saw: `keep_rows` leaves out the others.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lorikeet_engine.adapter_format.header import (
    DTYPE_BYTES,
    header_bytes,
    parse_json_object,
    read_header,
)
from lorikeet_engine.adapter_format.saved_weights import SavedTensor
from lorikeet_engine.adapter_format.tensor_names import whole_name
from lorikeet_engine.adapter_format.token_rows import (
    MODULES_KEY,
    TOKENS_KEY,
    parse_rows,
    rows_metadata,
)
from lorikeet_engine.errors import AdapterRejected

COPIES_KEY = "lorikeet_base_copies"
MODULES = ("embed_tokens", "lm_head")
DIGEST_BYTES = 8
_COPIED_BYTES = 16 << 20
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


@dataclass(frozen=True, slots=True)
class WholeModule:
    """Module that was trained whole, and a digest of each of its rows, for a comparison with the
    base model's.

    module: embed_tokens or lm_head.
    dtype: F32, F16 or BF16.
    digests: `row_digests` of the module's rows in this dtype.
    """

    module: str
    dtype: str
    digests: bytes


def row_digests(rows: Iterable[bytes]) -> bytes:
    """Return the digests of a matrix's rows, 8 bytes each, one after another."""
    return b"".join(hashlib.blake2b(row, digest_size=DIGEST_BYTES).digest() for row in rows)


def whole_modules(blob: Path) -> tuple[WholeModule, ...]:
    """Return the modules of which an adapter's file has all rows, with a digest of each row.

    Raises AdapterRejected if the blob's header is malformed.
    """
    header, found = read_header(blob), []
    for module, ids in parse_rows(header.metadata, MODULES_KEY).items():
        span = header.tensors.get(whole_name(module))
        if span is not None and isinstance(ids, range):
            row_bytes = span.size_bytes // len(ids)
            with blob.open("rb") as file:
                file.seek(span.begin)
                digests = row_digests(file.read(row_bytes) for _ in ids)
            found.append(WholeModule(module.rpartition(".")[2], span.dtype, digests))
    return tuple(found)


def keep_rows(blob: Path, out: Path, kept: Mapping[str, Sequence[int]]) -> None:
    """Write an adapter's file that has only some rows of modules that were trained whole.

    kept: ids of the rows to keep, ascending, by module: embed_tokens or lm_head. Other modules stay
        whole. The hashes of these modules as copies are left out: their rows were compared.
    """
    header, places, pieces = read_header(blob), {}, dict[str, list[tuple[int, int]]]()
    listed = dict(parse_rows(header.metadata, MODULES_KEY))
    for name, span in header.tensors.items():
        module = next((each for each in listed if whole_name(each) == name), None)
        ids = None if module is None else kept.get(module.rpartition(".")[2])
        if module is None or ids is None:
            places[name], pieces[name] = (span.dtype, span.shape), [(span.begin, span.size_bytes)]
            continue
        listed[module] = tuple(ids)
        if ids:
            row = span.size_bytes // span.shape[0]
            places[name] = span.dtype, (len(ids), *span.shape[1:])
            pieces[name] = [(span.begin + each * row, row) for each in ids]
    listed = {module: ids for module, ids in listed.items() if len(ids)}
    metadata = dict(header.metadata)
    copies = [each for each in parse_copies(metadata) if each.module not in kept]
    for key in (MODULES_KEY, COPIES_KEY):
        metadata.pop(key, None)
    metadata |= copies_metadata(copies)
    metadata |= rows_metadata(parse_rows(header.metadata, TOKENS_KEY), listed)
    with blob.open("rb") as source, out.open("wb") as file:
        file.write(header_bytes(places, metadata))
        for begin, size in (piece for name in places for piece in pieces[name]):
            source.seek(begin)
            while size:
                copied = source.read(min(size, _COPIED_BYTES))
                file.write(copied)
                size -= len(copied)


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
