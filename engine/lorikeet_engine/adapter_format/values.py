"""Checks that a blob's values can be packed, either while its bytes arrive or in its file."""

import io
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby, takewhile
from pathlib import Path

import numpy as np

from lorikeet_engine.adapter_format.families import SCORE
from lorikeet_engine.adapter_format.header import DTYPE_BYTES, TensorSpan, parse_header
from lorikeet_engine.adapter_format.spec import AdapterSpec
from lorikeet_engine.adapter_format.tensor_names import LORA_BIAS
from lorikeet_engine.errors import AdapterRejected

SCAN_ALIGNMENT = 8
_SCAN_BYTES = 4 << 20
# For each dtype of a file: an unsigned integer of its width, and a mask without the sign bit. These
# integers are ordered like magnitudes, with infinity above them and NaN above infinity.
_MAGNITUDES = {
    "F32": ("<u4", 0x7FFF_FFFF),
    "F16": ("<u2", 0x7FFF),
    "BF16": ("<u2", 0x7FFF),
}
# For each dtype of an image: the smallest value that is rounded to infinity.
_OVERFLOWS = {
    "float32": float("inf"),
    "float16": 65520.0,
    "bfloat16": (2 - 2**-8) * 2.0**127,
}


class ValueScan:
    """Finds the largest magnitude of each tensor of a blob, an adapter's file, while it arrives.

    Rejects nothing: if the header is malformed, or tensors are not aligned to their elements, it
    finds no magnitudes.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size, self._taken = size_bytes, 0
        self._waiting = deque[TensorSpan]()  # tensors whose ends have not come
        self._bounds: dict[TensorSpan, int] = {}

    def take(self, data: memoryview) -> None:
        """Scan the next bytes of the adapter's file for the largest magnitudes.

        data: length is a multiple of SCAN_ALIGNMENT, except at the end of the file. The first piece
            must hold the whole header.
        """
        begin, self._taken = self._taken, self._taken + len(data)
        if not begin:
            self._waiting = deque(_spans(data, self._size))
        here = takewhile(lambda span: span.begin < self._taken, self._waiting)
        for dtype, group in groupby(here, key=lambda span: span.dtype):
            spans, (kind, mask) = list(group), _MAGNITUDES[dtype]
            together = data[max(spans[0].begin - begin, 0) : spans[-1].end - begin]
            largest = int((np.frombuffer(together, dtype=kind) & mask).max())
            for span in spans:
                self._bounds[span] = max(self._bounds.get(span, 0), largest)
        while self._waiting and self._waiting[0].end <= self._taken:
            self._waiting.popleft()

    def bound(self, span: TensorSpan) -> int | None:
        """Return the largest magnitude in a tensor, as its bits in the tensor's dtype.

        None until all tensors have arrived, and for a tensor that was not scanned.
        """
        return None if self._waiting else self._bounds.get(span)


def check_values(blob: Path, spec: AdapterSpec, dtype: str, scan: ValueScan | None = None) -> None:
    """Check that all values of an adapter are finite, in its file, the blob, and in its image, the
    weights packed for the GPU.

    In the image, B is multiplied by its scaling, and values are rounded.

    dtype: dtype of the image.
    scan: largest magnitudes found while the blob arrived. Tensors for which they prove that all
        values are finite are not read; other tensors are read, a few megabytes at a time.

    Raises AdapterRejected, whose `field` is the tensor at fault.
    """
    for name, span, factor in _matrices(spec):
        bits = scan.bound(span) if scan is not None else None
        if bits is not None and _packed(_value(bits, span.dtype), factor) < _OVERFLOWS[dtype]:
            continue
        largest = _value(_largest(blob, span), span.dtype)
        if not np.isfinite(largest):
            raise AdapterRejected(f"{name} holds NaN or Inf: the training diverged", field=name)
        packed = _packed(largest, factor)
        if not packed < _OVERFLOWS[dtype]:
            raise AdapterRejected(f"{name} holds {packed:g}, which {dtype} cannot hold", field=name)


def _matrices(spec: AdapterSpec) -> Iterator[tuple[str, TensorSpan, float]]:
    """Yield each matrix, tensor of trained rows, vector and part of a head: (name, place in the
    adapter's file, factor).

    Packing multiplies the values by the factor. The name is for errors.
    """
    for part in spec.linears:
        yield part.matrix("A"), part.a, 1.0
        yield part.matrix("B"), part.b, part.scaling
    for rows in spec.token_rows:
        yield rows.matrix(), rows.rows, 1.0
    for vectors in spec.vectors:
        for kind, span in vectors.spans.items():
            yield vectors.vector(kind), span, vectors.scaling if kind == LORA_BIAS else 1.0
    if spec.head is not None:
        spans = (spec.head.weights, spec.head.biases)
        yield from ((SCORE.module, span, 1.0) for span in spans if span is not None)


def _spans(data: memoryview, size_bytes: int) -> Iterable[TensorSpan]:
    """Return the tensors of a blob (stored adapter) in file order, except empty ones.

    Returns () if the header is malformed, or tensors are not aligned to their elements.

    data: beginning of the blob, including the whole header.
    """
    try:
        tensors = parse_header(io.BytesIO(data), size_bytes, "").tensors.values()
    except AdapterRejected:
        return ()
    spans = sorted((span for span in tensors if span.end > span.begin), key=lambda s: s.begin)
    are_aligned = all(span.begin % DTYPE_BYTES[span.dtype] == 0 for span in spans)
    return spans if are_aligned else ()


def _value(bits: int, kind: str) -> np.float32:
    if kind == "F16":
        return np.float32(np.uint16(bits).view(np.float16))
    return np.uint32(bits << 16 if kind == "BF16" else bits).view(np.float32)


def _packed(largest: np.float32, factor: float) -> np.float32:
    """Return the magnitude that a value of an adapter's file gets when packed, before rounding.

    largest: the value, or its magnitude.
    factor: scaling by which packing multiplies the value.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return abs(largest * np.float32(factor))


def _largest(blob: Path, span: TensorSpan) -> int:
    """Return the largest magnitude in a tensor of a file, as its bits in the tensor's dtype."""
    kind, mask = _MAGNITUDES[span.dtype]
    return max(int((piece & mask).max()) for piece in _pieces(blob, span, kind))


def _pieces(blob: Path, span: TensorSpan, kind: str) -> Iterator[np.ndarray]:
    with blob.open("rb") as file:
        file.seek(span.begin)
        for begin in range(span.begin, span.end, _SCAN_BYTES):
            yield np.frombuffer(file.read(min(_SCAN_BYTES, span.end - begin)), dtype=kind)
