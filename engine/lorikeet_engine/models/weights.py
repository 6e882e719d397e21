"""The tensors of a Hugging Face checkpoint, read from safetensors straight into place."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from lorikeet_engine.errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16")


class Checkpoint:
    """A folder's tensors by name, cast to one dtype on one device.

    Files are mapped, never loaded whole: beside the result, host memory holds at most one tensor.
    Use it as a context manager; leaving it unmaps the files.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.folder = folder
        self.device = device
        self.dtype = dtype
        self._stack = ExitStack()
        self._opened: dict[str, Any] = {}
        self._file_of = self._find_tensors()
        self._unread = set(self._file_of)

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

    def close(self) -> None:
        """Unmap the files. Tensors that were read stay."""
        self._opened.clear()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_into(self, name: str, out: torch.Tensor) -> None:
        file = self._file_of.get(name)
        if file is None:
            raise ModelError(f"{self.folder}: tensor {name} is missing", field=name)
        try:
            stored = self._open(file).get_slice(name)
            shape, dtype = stored.get_shape(), stored.get_dtype()
            if list(shape) != list(out.shape) or dtype not in DTYPES:
                raise ModelError(
                    f"{self.folder}: tensor {name} is {dtype} {list(shape)}: "
                    f"want {list(out.shape)} in one of {', '.join(DTYPES)}",
                    field=name,
                )
            out.copy_(self._open(file).get_tensor(name))
        except SafetensorError as error:
            raise ModelError(f"{self.folder / file}: {name}: {error}", field=name) from error
        self._unread.discard(name)

    def _find_tensors(self) -> dict[str, str]:
        index = self.folder / INDEX
        if index.exists():
            try:
                return dict(json.loads(index.read_bytes())["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise ModelError(f"{index}: no weight_map: {error!r}", field=INDEX) from error
        return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            path = self.folder / file
            if not path.exists():
                raise ModelError(
                    f"{path} does not exist: want {SINGLE}, or {INDEX} with the files it names",
                    field=file,
                )
            try:
                self._opened[file] = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{path} is no whole safetensors file: {error}", field=file
                ) from error
        return self._opened[file]
