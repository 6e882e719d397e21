"""Reads the header of an untrusted safetensors file.

Format: the header's length (8 bytes, little endian), the header (JSON), the tensors' bytes. Size
and tensor count are limited before anything is parsed or allocated.
"""

import json
import math
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lorikeet_engine.errors import AdapterRejected

MAX_HEADER_BYTES = 1_000_000
MAX_NAME_CHARACTERS = 512
DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class HeaderLimits:
    """Limits of a safetensors header: its size in bytes, and the number of its tensors."""

    max_bytes: int = MAX_HEADER_BYTES
    max_tensors: int = 10_000


BLOB_LIMITS = HeaderLimits()


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """A tensor's place in a safetensors file: bytes [begin, end), from the start of the file.

    dtype: F32, F16 or BF16.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class BlobHeader:
    """Content of a safetensors header: tensors by name, and the strings of `__metadata__`."""

    tensors: dict[str, TensorSpan]
    metadata: dict[str, str]


def read_header(
    path: Path,
    dtype_bytes: Mapping[str, int] = DTYPE_BYTES,
    limits: HeaderLimits = BLOB_LIMITS,
) -> BlobHeader:
    """Parse a safetensors header, and check that its tensors cover the file and fit their shapes.

    The tensors' bytes must follow one another without gaps.

    dtype_bytes: allowed dtypes, and the bytes of an element of each.
    limits: limits on the header.

    Raises AdapterRejected, whose `field` is the tensor at fault or "header".
    """
    with path.open("rb") as file:
        return parse_header(file, os.fstat(file.fileno()).st_size, path.name, dtype_bytes, limits)


def parse_header(
    file: BinaryIO,
    file_bytes: int,
    name: str,
    dtype_bytes: Mapping[str, int] = DTYPE_BYTES,
    limits: HeaderLimits = BLOB_LIMITS,
) -> BlobHeader:
    """Parse the header of a safetensors file of which only the beginning may be present.

    Raises AdapterRejected, whose `field` is the tensor at fault or "header", if the header is
    malformed or too large, or if its tensors do not cover the file or fit their shapes.

    file: the beginning of the file, up to the end of the header at least.
    file_bytes: size of the whole file.
    name: name of the file, for errors.
    dtype_bytes: allowed dtypes, and the bytes of an element of each.
    limits: limits on the header.
    """
    begin = file.read(8)
    length = int.from_bytes(begin, "little")
    if begin == b"version ":  # https://git-lfs.github.com/spec/v1
        raise _bad(
            f"{name} is a Git LFS pointer file, not the weights: fetch them with `git lfs pull`"
        )
    if file_bytes < 10 or length > file_bytes - 8:
        raise _bad(
            f"{name} has {file_bytes} bytes and its header claims {length}: not a safetensors "
            "file, or truncated; save or upload it again"
        )
    if length > limits.max_bytes:
        raise _bad(f"a header of {length} bytes: the limit is {limits.max_bytes}")
    entries = _parse_json(file.read(length), limits)
    metadata = entries.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata  # MLX writes null
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _bad("__metadata__ must map names to texts")
    if len(entries) > limits.max_tensors:
        raise _bad(f"{len(entries)} tensors: the limit is {limits.max_tensors}")
    tensors = {name: _span(name, entry, 8 + length, dtype_bytes) for name, entry in entries.items()}
    _check_cover(tensors, 8 + length, file_bytes)
    return BlobHeader(tensors, metadata)


def header_bytes(
    tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str]
) -> bytes:
    """Return the bytes of a safetensors header.

    tensors: dtype and shape of each tensor, by name, in the order of their bytes in the file.
    metadata: content of `__metadata__`.

    Raises AdapterRejected if the header is larger than MAX_HEADER_BYTES.
    """
    entries: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + DTYPE_BYTES[dtype] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise _bad(f"a header of {len(text)} bytes: the limit is {MAX_HEADER_BYTES}")
    return len(text).to_bytes(8, "little") + text


def parse_json_object(data: bytes | str, field: str) -> dict[str, Any]:
    """Parse a JSON object. Repeated or unprintable keys, NaN and Infinity are refused.

    field: `field` of the AdapterRejected that is raised for any other text.
    """
    try:
        text = data if isinstance(data, str) else data.decode()  # json.loads takes UTF-16, too
        parsed = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise AdapterRejected(f"{field} is not valid JSON: {error}", field=field) from error
    if not isinstance(parsed, dict):
        raise AdapterRejected(f"{field} is not a JSON object", field=field)
    return parsed


def _parse_json(data: bytes, limits: HeaderLimits) -> dict[str, Any]:
    if data.count(b'"dtype"') > limits.max_tensors:
        raise _bad(f"more than {limits.max_tensors} tensors")
    return parse_json_object(data, "header")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a key appears twice")
    for key in entries:
        if not key.isprintable():  # messages repeat the key, and a lone surrogate breaks them
            raise ValueError(f"the key {reprlib.repr(key)} holds characters that do not print")
    return entries


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _span(name: str, entry: Any, data_start: int, dtype_bytes: Mapping[str, int]) -> TensorSpan:
    if len(name) > MAX_NAME_CHARACTERS:
        raise _bad(f"a tensor's name of {len(name)} characters: the limit is {MAX_NAME_CHARACTERS}")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _bad(f"{name}: want exactly dtype, shape and data_offsets", name)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in dtype_bytes:
        want = ", ".join(dtype_bytes)
        raise _bad(f"{name} has dtype {reprlib.repr(dtype)}: convert it to one of {want}", name)
    if not _counts(shape) or not _counts(offsets) or len(shape) > 8 or len(offsets) != 2:
        raise _bad(f"{name}: shape and data_offsets must be lists of integers ≥ 0", name)
    begin, end = offsets
    want_bytes = dtype_bytes[dtype]
    for size in shape:
        want_bytes *= size
    if end - begin != want_bytes:
        raise _bad(f"{name}: {end - begin} bytes for {dtype} {shape}, want {want_bytes}", name)
    return TensorSpan(dtype, tuple(shape), data_start + begin, data_start + end)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < 2**48 for item in value
    )


def _check_cover(tensors: dict[str, TensorSpan], data_start: int, file_bytes: int) -> None:
    reached = data_start
    for name, span in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if span.begin != reached:
            fault = "overlaps another tensor" if span.begin < reached else "follows a hole"
            raise _bad(f"{name} {fault} in the file", name)
        reached = span.end
    if reached > file_bytes:
        raise _bad(f"truncated: {file_bytes} bytes of {reached}; save or upload the file again")
    if reached < file_bytes:
        raise _bad(f"{file_bytes - reached} bytes after the last tensor")


def _bad(message: str, field: str = "header") -> AdapterRejected:
    return AdapterRejected(message, field=field)
