"""What an adapter takes on an engine, and whether its values survive the packing."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lorikeet_engine.adapter_format.header import TensorSpan
from lorikeet_engine.adapter_format.spec import AdapterSpec
from lorikeet_engine.errors import AdapterRejected, AdapterTooLarge

_SCAN_BYTES = 4 << 20
# For each dtype of a file: an unsigned integer as wide, and all bits but the sign's. As integers,
# what is left is ordered as the values' sizes are, with infinity above them and NaN above that.
_MAGNITUDES = {
    "F32": ("<u4", 0x7FFF_FFFF),
    "F16": ("<u2", 0x7FFF),
    "BF16": ("<u2", 0x7FFF),
}
# For each dtype of an image: bytes, and the least value that is rounded to infinity.
_IMAGE_DTYPES = {
    "float32": (4, float("inf")),
    "float16": (2, 65520.0),
    "bfloat16": (2, (2 - 2**-8) * 2.0**127),
}


@dataclass(frozen=True, slots=True)
class AdapterMemory:
    """Where engines keep packed adapters.

    dtype: float32, float16 or bfloat16. gpu_bytes, host_bytes: of a replica's each GPU and of its
    host; None: not known. gpus: how many of a replica have a part of each adapter, by base model; 1
    of one that is not named.
    """

    dtype: str
    gpu_bytes: int | None = None
    host_bytes: int | None = None
    gpus: Mapping[str, int] = field(default_factory=dict)

    def image_bytes(self, elements: int, gpus: int = 1) -> int:
        """What an adapter takes on each of its replica's GPUs.

        elements: of the largest part. On the host there is one as large for each GPU. Raises
        AdapterTooLarge.
        """
        taken = elements * _IMAGE_DTYPES[self.dtype][0]
        self._check(taken, self.gpu_bytes, "on a GPU")
        self._check(gpus * taken, self.host_bytes, "on the host")
        return taken

    def _check(self, taken: int, room: int | None, where: str) -> None:
        if room is not None and taken > room:
            raise AdapterTooLarge(
                f"the adapter takes {taken} bytes as {self.dtype} {where} and the engines' memory "
                f"for adapters there holds {room}: train fewer modules or a smaller rank, or have "
                "the memory enlarged",
                field="gpu_bytes",
                gpu_bytes=taken,
                max_bytes=room,
            )


FLOAT32_MEMORY = AdapterMemory("float32")
"""The memory of engines on a CPU, unless they are told otherwise, without a bound."""


def check_values(blob: Path, spec: AdapterSpec, dtype: str) -> None:
    """Scan every value: finite in the file, and in an image of this dtype with B scaled.

    Reads a few megabytes at a time. Raises AdapterRejected, whose field is the tensor.
    """
    for part in spec.linears:
        _check_matrix(blob, part.matrix("A"), part.a, 1.0, dtype)
        _check_matrix(blob, part.matrix("B"), part.b, part.scaling, dtype)
    for rows in spec.token_rows:
        _check_matrix(blob, rows.matrix(), rows.rows, 1.0, dtype)


def _check_matrix(blob: Path, name: str, span: TensorSpan, factor: float, dtype: str) -> None:
    largest = _largest(blob, span)
    if not np.isfinite(largest):
        raise AdapterRejected(f"{name} holds NaN or Inf: the training diverged", field=name)
    with np.errstate(over="ignore"):
        packed = abs(largest * np.float32(factor))
    if not packed < _IMAGE_DTYPES[dtype][1]:
        raise AdapterRejected(f"{name} holds {packed:g}, which {dtype} cannot hold", field=name)


def _largest(blob: Path, span: TensorSpan) -> np.float32:
    """The value furthest from zero, without its sign; NaN or Inf if there is any."""
    kind, mask = _MAGNITUDES[span.dtype]
    bits = max(int((piece & mask).max()) for piece in _pieces(blob, span, kind))
    if span.dtype == "F16":
        return np.float32(np.uint16(bits).view(np.float16))
    return np.uint32(bits << 16 if span.dtype == "BF16" else bits).view(np.float32)


def _pieces(blob: Path, span: TensorSpan, kind: str) -> Iterator[np.ndarray]:
    with blob.open("rb") as file:
        file.seek(span.begin)
        for begin in range(span.begin, span.end, _SCAN_BYTES):
            yield np.frombuffer(file.read(min(_SCAN_BYTES, span.end - begin)), dtype=kind)
