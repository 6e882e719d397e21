"""Packing: writes the matrices of a blob as an image, in the layout of `packed_image`.

A blob is an adapter's safetensors file; its image is what the GPU reads. Layers that differ only in
the values of their matrices are read and written together, some megabytes at a time: few calls into
torch interrupt the engine's step loop, which shares Python's interpreter lock.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from lorikeet_engine.adapter_format import ALIGNMENT, AdapterSpec, LinearLora, TensorSpan
from lorikeet_engine.adapter_format.families import SCORE
from lorikeet_engine.adapter_format.header import DTYPE_BYTES
from lorikeet_engine.errors import AdapterRejected
from lorikeet_engine.residency.base_rows import BaseRows
from lorikeet_engine.residency.checksums import LayerSums, layer_sums
from lorikeet_engine.residency.packed_image import PackedLayout
from lorikeet_engine.residency.vector_packing import write_vectors

_MAX_THREADS = 4
_CORES_PER_THREAD = 4
"""Number of the machine's cores per packing thread: most cores stay free for other threads."""
_BYTES_PER_THREAD = _BYTES_TOGETHER = 2**24
_WIDEST_BYTES = 4  # of an element
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class _StagedLayer(NamedTuple):
    """Adapted linears of one layer, and where their matrices lie in a staging buffer.

    parts: the linears.
    places: for each matrix, its offset in the layer's part of the staging buffer, in bytes.
    size: size of that part, in bytes.
    begin: offset, in elements, of the layer in each span (a rank's part of the packed adapter).
    likeness: key to compare layers by. Layers with equal keys have matrices of the same sizes, at
        the same places in the buffer, and at the same offsets from `begin`.
    """

    parts: tuple[LinearLora, ...]
    places: dict[TensorSpan, int]
    size: int
    begin: int
    likeness: object

    @property
    def end(self) -> int:
        """Offset in the adapter's file at which the layer's last matrix ends."""
        return max(matrix.end for matrix in self.places)


def pack(
    blob: Path,
    spec: AdapterSpec,
    layout: PackedLayout,
    out: torch.Tensor,
    base: BaseRows | None = None,
    threads: int | None = None,
    arrived: Callable[[int], None] | None = None,
) -> LayerSums:
    """Pack a blob (an adapter's safetensors file) for the GPU; return the checksum of each layer.

    B is multiplied by its scaling in float32, then rounded to the dtype of `out`. Each thread needs
    16 MiB of memory, or the size of the file's largest layer if that is more; and twice the size of
    its largest matrix if the blob's dtype differs from that of `out`.

    blob: the file.
    spec: the adapter that the file contains.
    layout: where each matrix lies in the image (the packed adapter).
    out: memory for the image, [layout.image_elements], of the image's dtype.
    base: rows of the base model, on which DoRA's gains and biases depend; may be None for a blob
        with neither.
    threads: number of threads that divide the layers among them; None: chosen by the number of
        cores and the size.
    arrived: for a blob that is still being written: function that waits until the file has this
        many bytes. In this case a single thread packs.

    Raises AdapterRejected if a value does not fit the dtype or the base model, and the errors of
    `arrived`.
    """
    spans = torch.split(out, layout.elements)
    layers = _staged_layers(spec, layout)
    each = -(-len(layers) // (1 if arrived else threads or _threads(spec.size_bytes)))
    shares = [layers[at : at + each] for at in range(0, len(layers), each)]
    write = partial(_write_layers, blob, layout, spans, arrived)
    with ThreadPoolExecutor(len(shares), "lorikeet-pack") as pool:  # waits for all threads
        run = pool.map if len(shares) > 1 else map
        found = {place: each for sums in run(write, shares) for place, each in sums.items()}
    if arrived is not None:
        arrived(spec.size_bytes)
    write_vectors(blob, spec, layout, spans, base)
    outer = len(layout.layers) - 1
    for number, span in enumerate(spans):
        _write_token_rows(blob, spec, layout, span)
        _write_head(blob, spec, layout, span)
        for layer in {outer, *(part.layer for part in spec.vectors)}:
            found[number, layer] = _sum(layout, span, layer)
    places = ((number, layer) for number in range(len(spans)) for layer in range(outer + 1))
    return tuple(found.get(place, 0) for place in places)  # 0 for a layer without matrices


def _threads(size_bytes: int) -> int:
    """Return the number of threads with which to pack an adapter's file of this size."""
    # if torch has several threads, they already share each matrix
    cores = os.cpu_count() or 1
    most = cores // _CORES_PER_THREAD if torch.get_num_threads() == 1 else 1
    return max(1, min(most, _MAX_THREADS, size_bytes // _BYTES_PER_THREAD))


def _staged_layers(spec: AdapterSpec, layout: PackedLayout) -> list[_StagedLayer]:
    """Return all layers with adapted linears, in the order of the adapter's file.

    The result includes the outer layer: lm_head and embeddings.
    """
    table = layout.rows.tolist()
    layers = [
        _staged(tuple(parts), layout.layers[layer], table[layer])
        for layer, parts in groupby(spec.linears, key=lambda part: part.layer)
    ]
    return sorted(layers, key=lambda layer: next(iter(layer.places)).begin)


def _layers_together(
    layers: Sequence[_StagedLayer], max_bytes: int
) -> Iterator[list[_StagedLayer]]:
    """Group an adapter's layers into runs, which are packed together.

    The layers of a run have matrices of the same sizes (equal `likeness`), and lie in the image at
    equal distances.

    max_bytes: limit on a run's bytes in the staging buffer; a single layer may exceed it.
    """
    run: list[_StagedLayer] = []
    for layer in layers:
        strides = {after.begin - one.begin for one, after in pairwise([*run, layer])}
        alike = not run or run[0].likeness == layer.likeness
        fits = (len(run) + 1) * layer.size <= max_bytes
        if run and not (alike and fits and len(strides) == 1 and min(strides) > 0):
            yield run
            run = []
        run.append(layer)
    if run:
        yield run


def _staged(
    parts: tuple[LinearLora, ...], begin: int, rows: Sequence[Sequence[int]]
) -> _StagedLayer:
    places, size = dict[TensorSpan, int](), 0
    for matrix in sorted({m for part in parts for m in (part.a, part.b)}, key=lambda m: m.begin):
        places[matrix] = size
        size += -(-matrix.size_bytes // _WIDEST_BYTES) * _WIDEST_BYTES
    likeness = [
        (
            (part.linear, part.scaling, *(at - begin for at in rows[part.linear][:2])),
            [(matrix.dtype, matrix.shape, places[matrix]) for matrix in (part.a, part.b)],
        )
        for part in parts
    ]
    return _StagedLayer(parts, places, size, begin, likeness)


def _write_layers(
    blob: Path,
    layout: PackedLayout,
    spans: Sequence[torch.Tensor],
    arrived: Callable[[int], None] | None,
    layers: Sequence[_StagedLayer],
) -> dict[tuple[int, int], int]:
    """Write layers of a blob (adapter's file) to each span of the image (packed adapter).

    Returns checksums, by (span, layer). The checksum of the outer layer (lm_head and embeddings)
    does not yet cover its rows of trained tokens.

    spans: parts of the image, one for each tensor parallel rank.
    arrived: waits until the blob's file has this many bytes; None for a complete blob.
    """
    runs = list(_layers_together(layers, _BYTES_TOGETHER))
    writer, sums = _Writer(layout, spans, runs), dict[tuple[int, int], int]()
    with blob.open("rb", buffering=0) as file:
        for run in runs:
            if arrived is not None:
                arrived(max(layer.end for layer in run))
            writer.write(file.fileno(), run)
            for number, layer in product(range(len(spans)), [each.parts[0].layer for each in run]):
                sums[number, layer] = _sum(layout, spans[number], layer)
    return sums


class _Writer:
    """Writer of runs of layers to every span of an image (packed adapter). A span is the part of
    the image for one tensor parallel rank.

    A run is a list of layers that are packed together (see _layers_together).
    """

    def __init__(
        self,
        layout: PackedLayout,
        spans: Sequence[torch.Tensor],
        runs: Sequence[Sequence[_StagedLayer]],
    ) -> None:
        self._layout, self._spans, self._dtype = layout, spans, spans[0].dtype
        self._table = layout.rows.tolist()
        self._stage = torch.empty(max(len(run) * run[0].size for run in runs), dtype=torch.uint8)
        self._bytes = _bytes_of(self._stage), _bytes_of(spans[0])
        self._typed = {name: self._stage.view(dtype) for name, dtype in _DTYPES.items()}
        largest = max(len(run) * math.prod(part.b.shape) for run in runs for part in run[0].parts)
        self._wide, self._rounded = torch.empty(largest), torch.empty(largest, dtype=self._dtype)

    def write(self, descriptor: int, run: Sequence[_StagedLayer]) -> None:
        """Read layers from an adapter's file, and write them to every span (a rank's part) of the
        image (the packed adapter).

        descriptor: descriptor of the adapter's file.
        run: layers with equal `likeness`, equally spaced in the image.

        Raises AdapterRejected if a value in the image is not finite.
        """
        for row, layer in enumerate(run):
            _read(descriptor, self._targets(layer, row * layer.size))
        for part in run[0].parts:
            b = self._scaled(self._matrix(run, part.b), part.scaling)
            for number in range(len(self._spans)):
                self._place(run, part, number, b)
        for number in range(len(self._spans)):
            self._check(run, number)

    def _targets(self, layer: _StagedLayer, row: int) -> dict[TensorSpan, memoryview]:
        """Return, for each of a layer's matrices, the memory that it is read into.

        An A that the packed image holds unchanged is read into the image itself, any other matrix
        into the staging buffer.

        row: offset of the layer's part of the staging buffer, in bytes.
        """
        stage, image = self._bytes
        targets = {
            matrix: stage[row + at : row + at + matrix.size_bytes]
            for matrix, at in layer.places.items()
        }
        for part in layer.parts:
            if self._is_kept_as_it_is(part):
                at = _begin(self._table[part.layer][part.linear][0]) * self._dtype.itemsize
                targets[part.a] = image[at : at + part.a.size_bytes]
        return targets

    def _is_kept_as_it_is(self, part: LinearLora) -> bool:
        fits = _DTYPES[part.a.dtype] == self._dtype and not part.gathers
        return fits and len(self._spans) == 1

    def _matrix(self, run: Sequence[_StagedLayer], matrix: TensorSpan) -> torch.Tensor:
        """Return one matrix of every layer of a run, as a view of the staging buffer, into
        which files are read: [layers, experts, rows, columns].

        matrix: the matrix in the run's first layer; the result has the corresponding matrices of
            all layers.
        """
        typed, bytes_each = self._typed[matrix.dtype], DTYPE_BYTES[matrix.dtype]
        at, stride = run[0].places[matrix] // bytes_each, run[0].size // bytes_each
        experts, rows, columns = (*(matrix.shape[:-2] or (1,)), *matrix.shape[-2:])
        return _strided(typed, at, (len(run), experts, rows, columns), stride)

    def _scaled(self, b: torch.Tensor, scaling: float) -> torch.Tensor:
        """Return B multiplied by the scaling, in the packed image's dtype."""
        if b.dtype not in (self._dtype, torch.float32):
            b = self._wide[: b.numel()].view(b.shape).copy_(b)
        b.mul_(scaling)
        # Rounded before the transposition, which takes half the time within one dtype.
        return b if b.dtype == self._dtype else self._rounded[: b.numel()].view(b.shape).copy_(b)

    def _place(
        self, run: Sequence[_StagedLayer], part: LinearLora, number: int, b: torch.Tensor
    ) -> None:
        """Write one linear's A and B to a span of the packed image, for all layers of a run.

        part: the linear of the run's first layer.
        number: index of the span, which is the tensor parallel rank.
        b: scaled B of all layers, [layers, experts, rows, columns].
        """
        kept = self._layout.ranges[number][part.linear]
        to_a, to_b = self._of_span(run, part, number)
        if not self._is_kept_as_it_is(part):
            a = self._matrix(run, part.a)[..., kept.inputs.start : kept.inputs.stop]
            to_a.copy_(a.transpose(-1, -2) if part.gathers else a)
        if part.half is not None:
            self._place_alternating(run, part, number, b)
            return
        at = 0
        for rows in kept.outputs:
            kept_rows = b[..., rows.start : rows.stop, :]
            to_b[..., at : at + len(rows)].copy_(kept_rows.transpose(-1, -2))
            at += len(rows)

    def _place_alternating(
        self, run: Sequence[_StagedLayer], part: LinearLora, number: int, b: torch.Tensor
    ) -> None:
        """Write half of a B in which rows of gate_proj and up_proj alternate, for a run's layers.

        part: gate_proj or up_proj of the run's first layer; its `half` tells the half.
        number: index of the span, which is the tensor parallel rank.
        b: the half's rows, scaled, of all layers: [layers, experts, rows, columns].
        """
        assert part.half is not None
        count = b.shape[-2]
        first = part.half * count  # of the half's rows, in the whole B
        for side in (0, 1):  # gate_proj, up_proj: row r is row 2 r + side of the whole B
            target = replace(part, linear=part.linear - part.half + side)
            (kept,) = self._layout.ranges[number][target.linear].outputs
            begin = max(kept.start, (first - side + 1) // 2)
            end = min(kept.stop, (first + count - side + 1) // 2)
            if begin < end:
                _, to_b = self._of_span(run, target, number)
                rows = b[..., 2 * begin + side - first : 2 * end + side - first - 1 : 2, :]
                place = to_b[..., begin - kept.start : end - kept.start]
                place.copy_(rows.transpose(-1, -2))

    def _of_span(
        self, run: Sequence[_StagedLayer], part: LinearLora, number: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places of one linear's A and transposed B in a span of the packed image, as
        views.

        Both views cover all layers of the run: [layers, experts, rows, columns], with one expert
        for a matrix that all share.

        part: the linear of the run's first layer.
        number: index of the span, which is the tensor parallel rank.
        """
        kept, span = self._layout.ranges[number][part.linear], self._spans[number]
        a_at, b_at, rank = self._table[run[0].parts[0].layer][part.linear]
        of_a = (len(kept.inputs), rank) if part.gathers else (rank, len(kept.inputs))
        stride = run[1].begin - run[0].begin if len(run) > 1 else 0
        a = _strided(span, _begin(a_at), (len(run), part.matrices(0), *of_a), stride)
        of_b = len(run), part.matrices(1), rank, kept.d_out
        return a, _strided(span, _begin(b_at), of_b, stride)

    def _check(self, run: Sequence[_StagedLayer], number: int) -> None:
        """Raise AdapterRejected if a matrix in a rank's part (span) of the packed image has a value
        that is not finite.

        run: layers to check.
        number: index of the span, which is the tensor parallel rank.
        """
        ends = (*self._layout.layers[1:], self._layout.elements)
        span = self._spans[number]
        if all(_finite(span[each.begin : ends[each.parts[0].layer]]) for each in run):
            return  # otherwise the values may lie in gaps between matrices
        for layer in run:
            for part in layer.parts:
                for side, matrix in zip("AB", self._of_span([layer], part, number), strict=True):
                    if not _finite(matrix):
                        raise _overflow(part, side, self._dtype)


def _begin(offset: int) -> int:
    """Return the offset of a matrix's first element in the packed image.

    offset: the matrix's entry in PackedLayout.rows: this offset, plus 1 if all experts share it.
    """
    return offset // ALIGNMENT * ALIGNMENT


def _strided(
    memory: torch.Tensor, at: int, shape: tuple[int, int, int, int], stride: int
) -> torch.Tensor:
    """Return a view of the same matrix in several equally spaced layers.

    memory: contiguous tensor that contains the matrices.
    at: index in `memory` at which the first layer's matrix begins.
    shape: layers, experts, rows, columns. Matrices of one layer are contiguous.
    stride: number of elements from one layer to the next.
    """
    _, _, rows, columns = shape
    strides = stride, rows * columns, columns, 1
    return memory.as_strided(shape, strides, memory.storage_offset() + at)


def _read(descriptor: int, targets: Mapping[TensorSpan, memoryview]) -> None:
    """Read matrices from a blob (adapter's file); matrices that are adjacent in the file share one
    system call.

    targets: memory for each matrix, in the file's order.
    """
    buffers, begin, end = list[memoryview](), 0, 0
    for matrix, target in targets.items():
        if matrix.begin != end:
            _read_into(descriptor, buffers, begin, end)
            buffers, begin = [], matrix.begin
        buffers.append(target)
        end = matrix.end
    _read_into(descriptor, buffers, begin, end)


def _read_into(descriptor: int, buffers: Sequence[memoryview], begin: int, end: int) -> None:
    if buffers and os.preadv(descriptor, buffers, begin) != end - begin:
        raise AdapterRejected("the blob ended early: its file was changed", field="size")


def _write_token_rows(
    blob: Path, spec: AdapterSpec, layout: PackedLayout, out: torch.Tensor
) -> None:
    with blob.open("rb", buffering=0) as file:
        for part in spec.token_rows:
            at, ids_at, count = layout.rows[-1, part.linear].tolist()
            rows = out[at : at + math.prod(part.rows.shape)].view(part.rows.shape)
            ids, order = torch.from_numpy(np.array(part.ids)).sort()
            places = order.argsort()  # the rows' ids ascend
            row_bytes, done = part.rows.size_bytes // count, 0
            for some in torch.split(places, max(1, _BYTES_TOGETHER // row_bytes)):
                stored = torch.empty(len(some) * row_bytes, dtype=torch.uint8)
                begin = part.rows.begin + row_bytes * done
                _read_into(file.fileno(), [_bytes_of(stored)], begin, begin + len(stored))
                values = stored.view(_DTYPES[part.rows.dtype]).view(len(some), -1)
                rows[some] = values.to(rows.dtype)
                done += len(some)
            digits = torch.stack([ids & 255, ids >> 8 & 255, ids >> 16], 1)
            out[ids_at : ids_at + 3 * count].view(count, 3).copy_(digits)
            if not _finite(rows):
                name = part.matrix()
                raise AdapterRejected(f"{name} does not fit {out.dtype}", field=name)


def _write_head(blob: Path, spec: AdapterSpec, layout: PackedLayout, out: torch.Tensor) -> None:
    if spec.head is None:
        return
    at, biases_at, labels = layout.rows[-1, spec.head.linear].tolist()
    out[biases_at : biases_at + labels] = 0
    with blob.open("rb", buffering=0) as file:
        for begin, part in ((at, spec.head.weights), (biases_at, spec.head.biases)):
            if part is None:
                continue
            stored = torch.empty(part.size_bytes, dtype=torch.uint8)
            _read(file.fileno(), {part: _bytes_of(stored)})
            values = out[begin : begin + math.prod(part.shape)]
            values.copy_(stored.view(_DTYPES[part.dtype]))
            if not _finite(values):
                name = SCORE.module
                raise AdapterRejected(f"{name} does not fit {out.dtype}", field=name)


def _bytes_of(elements: torch.Tensor) -> memoryview:
    return memoryview(elements.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _sum(layout: PackedLayout, span: torch.Tensor, layer: int) -> int:
    begin, end = (*layout.layers, layout.elements)[layer : layer + 2]
    return layer_sums(span[begin:end], (0,))[0]


def _finite(matrix: torch.Tensor) -> bool:
    """Whether all values of a matrix are finite.

    Tests the sum first, in a thirtieth of the time. Tests each value only if the sum is not finite,
    since the sum of finite values can overflow.
    """
    return math.isfinite(matrix.sum().item()) or bool(matrix.isfinite().all())


def _overflow(part: LinearLora, side: str, dtype: torch.dtype) -> AdapterRejected:
    name = part.matrix(side)
    return AdapterRejected(
        f"{name} with scaling {part.scaling:g} does not fit {dtype}: serve it in float32 or "
        "bfloat16",
        field=name,
    )
