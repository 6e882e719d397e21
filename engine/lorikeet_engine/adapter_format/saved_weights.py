"""Reads the weights in a trainer's folder: one safetensors file, or shards with an index.

Pickles are recognised by their file names, to be refused with a remedy, and never opened.
"""

import re
from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from lorikeet_engine.adapter_format.header import (
    DTYPE_BYTES,
    HeaderLimits,
    TensorSpan,
    parse_json_object,
    read_header,
)
from lorikeet_engine.errors import AdapterRejected

WEIGHTS_FILE = "adapter_model.safetensors"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
_NEW_TOKENS = ("new_embeddings.safetensors", "new_embeddings.bin")
_PICKLE = re.compile(r"[^/]*\.(?:bin|pt|pth|pkl)")
_PICKLED_WEIGHTS = [
    re.compile(rf"{stem}{shard}\.(?:bin|pt|pth|pkl)")
    for stem in ("adapter_model", "pytorch_model")
    for shard in ("", r"-\d{5}-of-\d{5}")
]
_TRAINING_STATE = re.compile(r"(?:training_args|optimizer|scheduler|scaler|r(?:ng|andom)_state)")
_MAX_SHARDS = 100
# Larger than for blobs, since a folder is read by its owner. Qwen3-30B-A3B has 36,864 matrices of
# single experts, whose names take 7 MB; in a blob they are 288.
MAX_INDEX_BYTES = 32_000_000
_LIMITS = HeaderLimits(MAX_INDEX_BYTES, max_tensors=150_000)
_CHUNK_BYTES = 4 << 20
_FLOAT8 = {"F8_E4M3": (4, 3), "F8_E5M2": (5, 2)}  # bits of exponent and fraction
_IN_BLOBS = {"F64": "F32"} | dict.fromkeys(_FLOAT8, "BF16")
_SAVED_BYTES = DTYPE_BYTES | {"F64": 8} | dict.fromkeys(_FLOAT8, 1)


@dataclass(frozen=True, slots=True)
class SavedTensor(TensorSpan):
    """A tensor's place in one of the safetensors files of a trainer's folder.

    dtype: F32, F16, BF16, F64, F8_E4M3 or F8_E5M2.
    transposed: whether the file holds the matrix in column-major order, as its transpose.
    by_experts: for a matrix of all experts, whether its LoRA ranks are ordered by experts, and not
        by ranks.
    """

    file: Path
    transposed: bool = False
    by_experts: bool = False

    @property
    def blob_dtype(self) -> str:
        """Dtype of the stored adapter's tensor: F32 for F64, and BF16, which is exact, for FP8."""
        return _IN_BLOBS.get(self.dtype, self.dtype)

    def transpose(self) -> "SavedTensor":
        """Return the transpose of the matrix, without reading the file."""
        return replace(self, shape=self.shape[::-1], transposed=not self.transposed)

    def pieces(self) -> Iterator[bytes]:
        """Yield the tensor's bytes, converted to blob_dtype, a few MiB at once.

        Raises AdapterRejected if the file ends early, or if float32 cannot hold a float64 value.
        """
        if self.transposed and self.begin < self.end:
            yield self._transposed(b"".join(self._pieces()))
        else:
            yield from self._pieces()

    def _transposed(self, columns: bytes) -> bytes:
        words = np.frombuffer(columns, f"u{DTYPE_BYTES[self.blob_dtype]}")
        return words.reshape(self.shape[::-1]).T.tobytes()

    def _pieces(self) -> Iterator[bytes]:
        with self.file.open("rb") as file:
            file.seek(self.begin)
            for begin in range(self.begin, self.end, _CHUNK_BYTES):
                want = min(_CHUNK_BYTES, self.end - begin)
                piece = file.read(want)
                if len(piece) != want:
                    raise _bad(f"{self.file.name} changed while it was read", self.file.name)
                yield self._converted(piece)

    def _converted(self, piece: bytes) -> bytes:
        if self.dtype in _FLOAT8:
            return _bfloat16_of(self.dtype)[np.frombuffer(piece, np.uint8)].tobytes()
        if self.dtype != "F64":
            return piece
        values = np.frombuffer(piece, "<f8")
        with np.errstate(over="ignore"):
            narrow = values.astype("<f4")
        if np.isinf(narrow[np.isfinite(values)]).any():
            raise _bad(f"{self.file.name} has values in float64 that float32 cannot hold")
        return narrow.tobytes()


def saved_tensors(folder: Path) -> dict[str, SavedTensor]:
    """Return the tensors in a folder in PEFT's format, by name.

    Raises AdapterRejected if the folder has no safetensors weights, or weights that cannot be
    served.
    """
    refuse_added_tokens([path.name for path in folder.iterdir()])
    return tensors_of(_files(folder))


def refuse_added_tokens(names: Container[str]) -> None:
    """Raise AdapterRejected if the folder has a separate file with embeddings of added tokens.

    names: names of the files in the adapter's folder.
    """
    for name in _NEW_TOKENS:
        if name in names:
            raise _bad(
                f"{name} has embeddings of tokens that were added: train and save them in "
                "adapter_model.safetensors, by modules_to_save or trainable_token_indices",
                name,
            )


def tensors_of(files: Sequence[Path]) -> dict[str, SavedTensor]:
    """Return the tensors of safetensors files, by name.

    Raises AdapterRejected if a header is malformed, two files have a tensor of the same name, or
    there are too many tensors.
    """
    tensors: dict[str, SavedTensor] = {}
    for file in files:
        for name, span in read_header(file, _SAVED_BYTES, _LIMITS).tensors.items():
            if name in tensors:
                raise _bad(f"{name} is in {tensors[name].file.name} and {file.name}", name)
            place = (span.dtype, span.shape, span.begin, span.end)
            tensors[name] = SavedTensor(*place, file=file)
    if len(tensors) > _LIMITS.max_tensors:
        raise _bad(f"{len(tensors)} tensors: the limit is {_LIMITS.max_tensors}", "header")
    return tensors


def pickled_weights(names: Collection[str]) -> list[str]:
    """Return the pickles in a folder that hold an adapter's weights: one file, or all shards.

    PEFT wrote adapter_model.bin; DeepSpeed's and accelerate's checkpoints have pytorch_model.bin or
    its shards. A pickle of another name counts if it is the only one, apart from pickles of a
    trainer's state. Returns [] if there are none.

    names: names of the files in the folder.
    """
    for pattern in _PICKLED_WEIGHTS:
        if found := sorted(filter(pattern.fullmatch, names)):
            return found
    others = [n for n in names if _PICKLE.fullmatch(n) and not _TRAINING_STATE.match(n)]
    return others if len(others) == 1 else []


def shard_names(index: bytes) -> list[str]:
    """Return the names of the files in an index of shards; they are in the index's folder.

    index: content of the index file.

    Raises AdapterRejected if the index is malformed, names too many files, or names a file that is
    not a safetensors file in the same folder.
    """
    places = parse_json_object(index, INDEX_FILE).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise _bad(f"{INDEX_FILE} has no weight_map of tensors to files")
    names = sorted(set(places.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise _bad(f"{INDEX_FILE} names {name!r}: want a safetensors file beside it")
    if len(names) > _MAX_SHARDS:
        raise _bad(f"{INDEX_FILE} names {len(names)} files: the limit is {_MAX_SHARDS}")
    return names


def _files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    index = folder / INDEX_FILE
    if index.is_file():
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise _bad(f"{INDEX_FILE} is over {MAX_INDEX_BYTES} bytes")
        shards = [folder / name for name in shard_names(index.read_bytes())]
        for shard in shards:
            if not shard.is_file():
                raise _bad(f"{folder} has no {shard.name}, which {INDEX_FILE} names", shard.name)
        return shards
    if pickles := pickled_weights([path.name for path in folder.iterdir()]):
        raise _bad(
            f"{pickles[0]} is a pickle, which can run code when it is opened: save the adapter as "
            "safetensors with save_pretrained(..., safe_serialization=True), or let `lorikeet "
            "convert` make safetensors of it",
            pickles[0],
        )
    raise _bad(
        f"{folder} has no {WEIGHTS_FILE}: give the folder that save_pretrained wrote, or that "
        "`lorikeet convert` made of TensorRT-LLM's tensors",
        WEIGHTS_FILE,
    )


@cache
def _bfloat16_of(float8: str) -> np.ndarray:
    """Return all 256 values of a float8 format, as the bits of bfloat16: [256] uint16.

    float8: F8_E4M3 or F8_E5M2.
    Source: OCP 8-bit Floating Point Specification (OFP8), tables 1 and 2.
    """
    exponent_bits, fraction_bits = _FLOAT8[float8]
    bias = 2 ** (exponent_bits - 1) - 1
    codes = np.arange(256)
    exponent = (codes >> fraction_bits) & (2**exponent_bits - 1)
    fraction = (codes & (2**fraction_bits - 1)) / 2**fraction_bits
    normal = np.ldexp(1 + fraction, exponent - bias)
    values = np.where(exponent == 0, np.ldexp(fraction, 1 - bias), normal)
    if float8 == "F8_E4M3":  # has no infinity
        values[codes & 127 == 127] = np.nan
    else:
        values[exponent == 31] = np.where(fraction[exponent == 31] == 0, np.inf, np.nan)
    signed = np.where(codes >= 128, -values, values).astype(np.float32)
    upper_halves: np.ndarray = (signed.view(np.uint32) >> 16).astype(np.uint16)
    return upper_halves


def _bad(message: str, field: str = INDEX_FILE) -> AdapterRejected:
    return AdapterRejected(message, field=field)
