"""The tensors of a Hugging Face checkpoint, read from safetensors straight into place.

Linears that are stored quantised are brought to their exact values on the way; if that is asked
for, linears are rounded to another format, one after the other.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open

from lorikeet_engine.adapter_format import Quantization, QuantizedLinears
from lorikeet_engine.device.memory import free_bytes, gib
from lorikeet_engine.errors import ModelError, SettingsError
from lorikeet_engine.kernels.fp8.reference import quantize_weight
from lorikeet_engine.kernels.lora.linear import Weight
from lorikeet_engine.models.int4 import Int4
from lorikeet_engine.models.nf4 import Nf4, round_to_nf4
from lorikeet_engine.models.staging import Span, Staging
from lorikeet_engine.models.weight_format import WeightFormat

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_HASHED_BYTES = 16 << 20
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PART_DTYPES = {**DTYPES, "U8": torch.uint8, "I32": torch.int32}


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor as its file describes it; its bytes begin at `begin` of the file."""

    file: Path
    begin: int
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """A folder's tensors by name, cast to one dtype on one device.

    nbytes: what the tensors that were read take there. Beside them, host memory holds Staging's
    buffers alone. Use it as a context manager: the tensors are whole once it is left without an
    exception. On the meta device of the files only the headers are read: a rehearsal, which finds
    all that is wrong but the values.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
        quantized: QuantizedLinears | None = None,
        rounding: Quantization | None = None,
    ) -> None:
        """Read the files' headers. quantized: how linears are stored, if they are.

        rounding: what read_linear rounds to, NF4 or FP8. Raises ModelError, whose `field` names
        the file at fault.
        """
        self.folder = folder
        self.device = device
        self.dtype = dtype
        self.nbytes = 0
        self._rounding = rounding
        self._weight_format = _weight_format(quantized) if quantized else None
        self._stored = self._find_tensors()
        self._unread = set(self._stored)
        self._staging = None if device.type == "meta" else Staging(device)

    def read(self, names: Sequence[str], rows: Sequence[int], *tail: int) -> torch.Tensor:
        """One tensor [sum(rows), *tail], the named ones on top of one another.

        Tensor i must have the shape [rows[i], *tail]. Raises ModelError, whose `field` is the
        tensor's name, where one is missing or has another shape or an unsupported dtype.
        """
        out = self._read(names, rows, *tail)
        self.nbytes += out.nbytes
        return out

    def read_linear(self, names: Sequence[str], rows: Sequence[int], d_in: int) -> Weight:
        """The weight of linears that are fused, [sum(rows), d_in], rounded if that is asked for.

        Names and rows as in read, which raises what this does.
        """
        weight: Weight = self._rounded(self._read(names, rows, d_in), rows)
        self.nbytes += weight.nbytes
        return weight

    def part(self, name: str, dtype: str, *shape: int) -> torch.Tensor:
        """A tensor as it is stored; on the meta device without its values.

        dtype: its name in safetensors. Raises ModelError, whose `field` is the tensor's name.
        """
        stored = self._find(name, shape, (dtype,))
        if self._staging is None:
            return torch.empty(shape, dtype=_PART_DTYPES[dtype], device=self.device)
        with safe_open(stored.file, framework="pt") as file:
            part: torch.Tensor = file.get_tensor(name).to(self.device)
            return part

    def stored_bytes(self, name: str) -> bytes:
        """The bytes of a small tensor, also on the meta device. Raises ModelError."""
        stored = self._stored.get(name)
        self._find(name, stored.shape if stored else (), ("U8",))
        with safe_open(self._stored[name].file, framework="pt") as file:
            return bytes(file.get_tensor(name).numpy())

    def sha256(self, name: str, dtype: torch.dtype) -> str | None:
        """The hash of a tensor's bytes once cast to this dtype, read a piece at a time.

        None where the files have no tensor of floats by this name: a quantised one has no copies.
        """
        stored = self._stored.get(name)
        if stored is None or stored.dtype not in DTYPES:
            return None
        held, hashed = DTYPES[stored.dtype], hashlib.sha256()
        left = math.prod(stored.shape) * held.itemsize
        with stored.file.open("rb") as file:
            file.seek(stored.begin)
            while left:
                piece = bytearray(file.read(min(_HASHED_BYTES, left)))
                left -= len(piece)
                values = torch.frombuffer(piece, dtype=held).to(dtype)
                hashed.update(values.view(torch.uint8).numpy().data)
        return hashed.hexdigest()

    def check_all_read(self, ignored: Sequence[str] = ()) -> None:
        """Raise ModelError when a tensor was left over that the model does not know."""
        left = sorted(
            name
            for name in self._unread
            if name not in ignored
            and not name.endswith("rotary_emb.inv_freq")
            and not self._is_zero_bias(name)
        )
        if left:
            raise ModelError(
                f"{self.folder}: {left[0]} and {len(left) - 1} more tensors have no place in the "
                "model that config.json describes: the two do not belong together",
                field=left[0],
            )

    def _is_zero_bias(self, name: str) -> bool:
        """Whether it is the bias that AutoGPTQ saves of a linear that has none."""
        path = name.removesuffix(".bias")
        if path == name or f"{path}.qweight" not in self._stored:
            return False
        with safe_open(self._stored[name].file, framework="pt") as file:
            return not bool(file.get_tensor(name).any())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._staging is None:
            return
        try:
            if kind is None:
                self._staging.finish()
        finally:
            self._staging.close()

    def _read(self, names: Sequence[str], rows: Sequence[int], *tail: int) -> torch.Tensor:
        out = torch.empty(sum(rows), *tail, device=self.device, dtype=self.dtype)
        for name, part in zip(names, torch.split(out, list(rows)), strict=True):
            self._read_into(name, part)
        return out

    def _rounded(self, weight: torch.Tensor, rows: Sequence[int]) -> Weight:
        if self._rounding is None:
            return weight
        if self._staging is not None:
            self._staging.finish()  # its values are looked at
        if self._rounding is Quantization.FP8:
            return quantize_weight(weight)
        for part in torch.split(weight, list(rows)):
            part.copy_(round_to_nf4(part))
        return weight

    def _read_into(self, name: str, out: torch.Tensor) -> None:
        linears = self._weight_format
        if linears is not None and linears.holds(name, self._stored):
            d_out, d_in = out.shape
            out.copy_(linears.dequantize(name, d_out, d_in, self))
            return
        stored = self._find(name, out.shape, tuple(DTYPES))
        if self._staging is not None:
            self._staging.copy(Span(stored.file, stored.begin, DTYPES[stored.dtype]), out)

    def _find(self, name: str, shape: Sequence[int], dtypes: Sequence[str]) -> _Stored:
        stored = self._stored.get(name)
        if stored is None:
            raise ModelError(f"{self.folder}: tensor {name} is missing", field=name)
        if stored.shape != tuple(shape) or stored.dtype not in dtypes:
            raise ModelError(
                f"{self.folder}: tensor {name} is {stored.dtype} {list(stored.shape)}: "
                f"want {list(shape)} in one of {', '.join(dtypes)}",
                field=name,
            )
        self._unread.discard(name)
        return stored

    def _find_tensors(self) -> dict[str, _Stored]:
        index = self.folder / INDEX
        if not index.exists():
            return _tensors_of(self.folder / SINGLE)
        try:
            file_of = dict(json.loads(index.read_bytes())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{index}: no weight_map: {error!r}", field=INDEX) from error
        found: dict[str, _Stored] = {}
        for file in sorted(set(file_of.values())):
            found |= _tensors_of(self.folder / file)
        return {name: found[name] for name in file_of if name in found}


def check_room(folder: Path, needed: int, device: torch.device) -> None:
    """Raise SettingsError if a folder's weights, in bytes, are larger than what is free there."""
    free = free_bytes(device)
    if needed > free:
        raise SettingsError(
            f"{folder}: its weights take {gib(needed)} as they are served, and {gib(free)} are "
            f"free on {device}: want a smaller model, weight_dtype=fp8, or a larger device"
        )


def _weight_format(stored: QuantizedLinears) -> WeightFormat:
    return Nf4() if stored.format is Quantization.NF4 else Int4(stored)


def _tensors_of(path: Path) -> dict[str, _Stored]:
    if not path.exists():
        raise ModelError(
            f"{path} does not exist: want {SINGLE}, or {INDEX} with the files it names",
            field=path.name,
        )
    try:
        with safe_open(path, framework="pt"):  # checks that the header is right for the file
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is no whole safetensors file: {error}", field=path.name
        ) from error
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {
        name: _Stored(
            path, 8 + length + tensor["data_offsets"][0], tensor["dtype"], tuple(tensor["shape"])
        )
        for name, tensor in header.items()
    }
