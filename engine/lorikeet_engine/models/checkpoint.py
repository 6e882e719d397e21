"""The tensors of a Hugging Face checkpoint, read from safetensors straight into place.

Linears of 4 bits are brought to their exact values on the way, those of FP8 stay FP8. If that is
asked for, linears are rounded to another format, one after the other.
"""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from safetensors import safe_open

from lorikeet_engine.adapter_format import Quantization, QuantizedLinears
from lorikeet_engine.device.memory import free_bytes, gib
from lorikeet_engine.errors import ModelError, SettingsError
from lorikeet_engine.kernels import fp8
from lorikeet_engine.kernels.fp8 import Fp8Rows
from lorikeet_engine.kernels.fp8.reference import quantize_weight
from lorikeet_engine.kernels.lora.linear import Weight
from lorikeet_engine.models.fp8 import UNUSED, Fp8
from lorikeet_engine.models.int4 import Int4
from lorikeet_engine.models.nf4 import Nf4, round_to_nf4
from lorikeet_engine.models.staging import Span, Staging
from lorikeet_engine.models.stored_tensors import StoredTensor, find_tensors
from lorikeet_engine.models.weight_format import WeightFormat

_HASHED_BYTES = 16 << 20
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PART_DTYPES = {**DTYPES, "F8_E4M3": fp8.DTYPE, "U8": torch.uint8, "I32": torch.int32}


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
        the file at fault, or weight_dtype where it rounds to NF4 what is quantised.
        """
        if quantized is not None and rounding is Quantization.NF4:
            raise ModelError(
                f"weight_dtype=nf4: the checkpoint is quantised already, as {quantized.format}: "
                "want auto, or a checkpoint of floats",
                field="weight_dtype",
            )
        self.folder = folder
        self.device = device
        self.dtype = dtype
        self.nbytes = 0
        self._rounding = rounding
        self._weight_format = _weight_format(quantized) if quantized else None
        self._stored = find_tensors(folder)
        self._unread = set(self._stored)
        self._staging = None if device.type == "meta" else Staging(device)
        self._to_raise: list[torch.Tensor] = []

    def read(self, names: Sequence[str], rows: Sequence[int], *tail: int) -> torch.Tensor:
        """One tensor [sum(rows), *tail], the named ones on top of one another.

        Tensor i must have the shape [rows[i], *tail]. Raises ModelError, whose `field` is the
        tensor's name, where one is missing or has another shape or an unsupported dtype.
        """
        out = self._read(names, rows, *tail)
        self.nbytes += out.nbytes
        return out

    def read_plus_one(self, name: str, width: int) -> torch.Tensor:
        """A tensor [width], to which 1 is added once all is read; float32, which holds that sum.

        Raises ModelError as `read` does.
        """
        out = torch.empty(width, dtype=torch.float32, device=self.device)
        self._read_into(name, out)
        self.nbytes += out.nbytes
        self._to_raise.append(out)
        return out

    def read_linear(self, names: Sequence[str], rows: Sequence[int], d_in: int) -> Weight:
        """The weight of linears that are fused, [sum(rows), d_in], rounded if that is asked for.

        Linears that are stored as FP8 stay so. Scales of blocks become scales of rows, for which
        weights are rounded a second time; linears that are not all FP8 get their exact values.
        Names and rows as in read, which raises what this does.
        """
        stored, rounding = self._weight_format, self._rounding
        weight: Weight
        if not isinstance(stored, Fp8) or not all(stored.holds(n, self._stored) for n in names):
            weight = self._rounded(self._read(names, rows, d_in), rows, rounding)
        elif stored.stored.block is not None:
            weight = self._rounded(self._read(names, rows, d_in), rows, Quantization.FP8)
        else:
            weight = self._read_fp8(names, rows, d_in, stored)
        if isinstance(weight, Fp8Rows):
            self._check_sides(names[0], sum(rows), d_in)
        self.nbytes += weight.nbytes
        return weight

    def _check_sides(self, name: str, d_out: int, d_in: int) -> None:
        """Raise ModelError where CUDA has no product of an FP8 weight of these sides."""
        if self.device.type == "cuda" and (d_out % 16 or d_in % 16):
            raise ModelError(
                f"{name} [{d_out}, {d_in}]: FP8 on a GPU wants both sides to be multiples of 16: "
                "want a checkpoint of floats, with weight_dtype=auto",
                field=name,
            )

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

    def scales(self, name: str, *shapes: tuple[int, ...]) -> torch.Tensor:
        """A stored tensor of floats that has one of these shapes, in float32. Raises ModelError."""
        stored = self._stored.get(name)
        found = stored is not None and stored.shape in shapes
        stored = self._find(name, stored.shape if stored and found else shapes[0], tuple(DTYPES))
        return self.part(name, stored.dtype, *stored.shape).float()

    def scalar(self, name: str) -> float | None:
        """The value of a tensor of one number, also on the meta device; None if it is not there.

        Raises ModelError, whose `field` is the name, for a tensor of more numbers or no floats.
        """
        stored = self._stored.get(name)
        if stored is None:
            return None
        self._find(name, stored.shape if math.prod(stored.shape) == 1 else (1,), tuple(DTYPES))
        with safe_open(stored.file, framework="pt") as file:
            return float(file.get_tensor(name))

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
            and not (isinstance(self._weight_format, Fp8) and name.endswith(UNUSED))
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
                for weight in self._to_raise:
                    weight += 1.0
        finally:
            self._staging.close()

    def _read(self, names: Sequence[str], rows: Sequence[int], *tail: int) -> torch.Tensor:
        out = torch.empty(sum(rows), *tail, device=self.device, dtype=self.dtype)
        for name, part in zip(names, torch.split(out, list(rows)), strict=True):
            self._read_into(name, part)
        return out

    def _read_fp8(
        self, names: Sequence[str], rows: Sequence[int], d_in: int, stored: Fp8
    ) -> Fp8Rows:
        out = torch.empty(sum(rows), d_in, device=self.device, dtype=fp8.DTYPE)
        for name, part in zip(names, torch.split(out, list(rows)), strict=True):
            self._copy(name, part, ("F8_E4M3",))
        scales = [
            stored.row_scales(name, d_out, self) for name, d_out in zip(names, rows, strict=True)
        ]
        return Fp8Rows(out, torch.cat(scales))

    def _rounded(
        self, weight: torch.Tensor, rows: Sequence[int], rounding: Quantization | None
    ) -> Weight:
        if rounding is None:
            return weight
        if self._staging is not None:
            self._staging.finish()  # its values are looked at
        if rounding is Quantization.FP8:
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
        self._copy(name, out, tuple(DTYPES))

    def _copy(self, name: str, out: torch.Tensor, dtypes: Sequence[str]) -> None:
        stored = self._find(name, out.shape, dtypes)
        if self._staging is not None:
            self._staging.copy(Span(stored.file, stored.begin, _PART_DTYPES[stored.dtype]), out)

    def _find(self, name: str, shape: Sequence[int], dtypes: Sequence[str]) -> StoredTensor:
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


def check_room(folder: Path, needed: int, device: torch.device, *, is_fp8: bool) -> None:
    """Raise SettingsError if a folder's weights, in bytes, are larger than what is free there."""
    free = free_bytes(device)
    if needed > free:
        raise SettingsError(
            f"{folder}: its weights take {gib(needed)} as they are served, and {gib(free)} are "
            f"free on {device}: want a smaller model, {'' if is_fp8 else 'weight_dtype=fp8, '}or a "
            "larger device"
        )


def _weight_format(stored: QuantizedLinears) -> WeightFormat:
    match stored.format:
        case Quantization.FP8:
            return Fp8(stored)
        case Quantization.NF4:
            return Nf4()
        case _:
            return Int4(stored)
