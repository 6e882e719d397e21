"""The tensors of a Hugging Face checkpoint, read from safetensors straight into place."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open

from lorikeet_engine.device.memory import free_bytes, gib
from lorikeet_engine.errors import ModelError, SettingsError
from lorikeet_engine.models.staging import Span, Staging

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor as its file describes it; its bytes begin at `begin` of the file."""

    file: Path
    begin: int
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """A folder's tensors by name, cast to one dtype on one device.

    Beside the tensors, host memory holds Staging's buffers alone. Use it as a context manager:
    the tensors are whole once it is left without an exception. On the meta device of the files
    only the headers are read: a rehearsal, which finds all that is wrong but the values.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Read the files' headers.

        Raises ModelError, whose `field` names the file at fault, and SettingsError if the tensors
        are larger than the device's free memory.
        """
        self.folder = folder
        self.device = device
        self.dtype = dtype
        self._stored = self._find_tensors()
        self._unread = set(self._stored)
        rehearsed = device.type == "meta"
        if not rehearsed:
            self._check_room()
        self._staging = None if rehearsed else Staging(device)

    @property
    def nbytes(self) -> int:
        """What all tensors take in the dtype."""
        elements = sum(math.prod(stored.shape) for stored in self._stored.values())
        return elements * self.dtype.itemsize

    def read(self, names: Sequence[str], rows: Sequence[int], *tail: int) -> torch.Tensor:
        """One tensor [sum(rows), *tail], the named ones on top of one another.

        Tensor i must have the shape [rows[i], *tail]. Raises ModelError, whose `field` is the
        tensor's name, where one is missing or has another shape or an unsupported dtype.
        """
        out = torch.empty(sum(rows), *tail, device=self.device, dtype=self.dtype)
        end = 0
        for name, count in zip(names, rows, strict=True):
            begin, end = end, end + count
            self._read_into(name, out[begin:end])
        return out

    def check_all_read(self, ignored: Sequence[str] = ()) -> None:
        """Raise ModelError when a tensor was left over that the model does not know."""
        left = sorted(
            name
            for name in self._unread
            if name not in ignored and not name.endswith("rotary_emb.inv_freq")
        )
        if left:
            raise ModelError(
                f"{self.folder}: {left[0]} and {len(left) - 1} more tensors have no place in the "
                "model that config.json describes: the two do not belong together",
                field=left[0],
            )

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

    def _read_into(self, name: str, out: torch.Tensor) -> None:
        stored = self._stored.get(name)
        if stored is None:
            raise ModelError(f"{self.folder}: tensor {name} is missing", field=name)
        if stored.shape != out.shape or stored.dtype not in DTYPES:
            raise ModelError(
                f"{self.folder}: tensor {name} is {stored.dtype} {list(stored.shape)}: "
                f"want {list(out.shape)} in one of {', '.join(DTYPES)}",
                field=name,
            )
        if self._staging is not None:
            self._staging.copy(Span(stored.file, stored.begin, DTYPES[stored.dtype]), out)
        self._unread.discard(name)

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

    def _check_room(self) -> None:
        needed, free = self.nbytes, free_bytes(self.device)
        if needed > free:
            raise SettingsError(
                f"{self.folder}: its weights take {gib(needed)} in {self.dtype}, and {gib(free)} "
                f"are free on {self.device}: want a smaller model or dtype, or a larger device"
            )


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
