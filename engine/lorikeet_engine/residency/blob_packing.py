"""Packs a blob: writes the image of its matrices, which `packing` lays out."""

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import FileIO
from pathlib import Path

import torch

from lorikeet_engine.adapter_format import AdapterSpec, LinearLora, TensorSpan
from lorikeet_engine.adapter_format.token_rows import digits
from lorikeet_engine.errors import AdapterRejected
from lorikeet_engine.parallel.shard import ShardRange
from lorikeet_engine.residency.checksums import LayerSums, layer_sums
from lorikeet_engine.residency.packing import PackedLayout

_MOST_THREADS = 4
_CORES_A_THREAD = 4
"""An engine takes one of a machine's cores for each GPU, beside gateways and other replicas."""
_BYTES_A_THREAD = 2**24
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def pack(
    blob: Path,
    spec: AdapterSpec,
    layout: PackedLayout,
    out: torch.Tensor,
    threads: int | None = None,
) -> LayerSums:
    """Write the image into out [layout.image_elements]: its dtype, and the scaling folded into B.

    Returns the image's sums. B is scaled in float32 before it is rounded. threads: how many share
    the layers, if not as many as there are cores for. Three matrices for each are in memory
    besides. Raises AdapterRejected when a value does not fit out's dtype.
    """
    shares = _shares(spec.size_bytes, len(layout.layers), threads)
    spans = zip(torch.split(out, layout.elements), layout.ranges, strict=True)
    sums: list[int] = []
    with ThreadPoolExecutor(len(shares), "lorikeet-pack") as pool:  # waits for all, without any too
        run = pool.map if len(shares) > 1 else map
        for span, ranges in spans:
            _pack_token_rows(blob, spec, layout, span)
            write = partial(_pack_layers, blob, spec, layout, ranges, span)
            sums += (each for layers in run(write, shares) for each in layers)
    return tuple(sums)


def _shares(size_bytes: int, layers: int, threads: int | None) -> list[range]:
    """The layers, the outer one among them, for each thread."""
    if threads is None:
        # torch's own threads, where it has more than one, share each matrix among them
        cores = os.cpu_count() or 1
        most = cores // _CORES_A_THREAD if torch.get_num_threads() == 1 else 1
        threads = max(1, min(most, _MOST_THREADS, size_bytes // _BYTES_A_THREAD))
    each = -(-layers // threads)
    return [range(at, min(at + each, layers)) for at in range(0, layers, each)]


def _pack_layers(
    blob: Path,
    spec: AdapterSpec,
    layout: PackedLayout,
    ranges: Sequence[ShardRange],
    out: torch.Tensor,
    layers: range,
) -> LayerSums:
    """Write these layers of a span, and return their sums."""
    parts = [part for part in spec.linears if part.layer in layers]
    if parts:
        _pack_linears(blob, parts, layout, ranges, out)
    begins = layout.layers[layers.start : layers.stop]
    end = (*layout.layers, len(out))[layers.stop]
    return layer_sums(out[begins[0] : end], [begin - begins[0] for begin in begins])


def _pack_linears(
    blob: Path,
    parts: Sequence[LinearLora],
    layout: PackedLayout,
    ranges: Sequence[ShardRange],
    out: torch.Tensor,
) -> None:
    # One buffer each for all matrices: memory that is new for each costs more than the copies.
    stored = torch.empty(max(max(_size(p.a), _size(p.b)) for p in parts), dtype=torch.uint8)
    largest = max(math.prod(m.shape[-2:]) for p in parts for m in (p.a, p.b))
    wide, rounded = torch.empty(largest), torch.empty(largest, dtype=out.dtype)
    with blob.open("rb", buffering=0) as file:
        for part in parts:
            kept = ranges[part.linear]
            a_at, b_at, rank = layout.rows[part.layer, part.linear].tolist()
            a_elements, b_elements = kept.elements(rank)
            for expert in range(part.experts):
                a_span, b_span = part.of_expert(expert)
                a_begin, b_begin = a_at + expert * a_elements, b_at + expert * b_elements
                # one that two linears share is written twice, alike
                a = _matrix(out, a_begin, rank, len(kept.inputs))
                saved = _matrix(wide, 0, rank, len(kept.inputs)) if part.gathers else a
                _read(file, a_span, range(rank), kept.inputs, saved, stored)
                if part.gathers:
                    a.view(len(kept.inputs), rank).copy_(saved.T)
                b = _matrix(wide, 0, kept.d_out, rank)
                runs = torch.split(b, [len(rows) for rows in kept.outputs])
                for rows, run in zip(kept.outputs, runs, strict=True):
                    _read(file, b_span, rows, range(rank), run, stored)
                b_transposed = _matrix(out, b_begin, rank, kept.d_out)
                # Rounded first: matrices of one dtype are transposed in half the time.
                b_rounded = _matrix(rounded, 0, kept.d_out, rank).copy_(b.mul_(part.scaling))
                b_transposed.copy_(b_rounded.T)
                for side, matrix in (("A", a), ("B", b_transposed)):
                    if not _finite(matrix):
                        raise _overflow(part, side, out.dtype)


def _pack_token_rows(
    blob: Path, spec: AdapterSpec, layout: PackedLayout, out: torch.Tensor
) -> None:
    with blob.open("rb", buffering=0) as file:
        for part in spec.token_rows:
            at, ids_at, count = layout.rows[-1, part.linear].tolist()
            rows = _matrix(out, at, *part.rows.shape)
            stored = torch.empty(_size(part.rows), dtype=torch.uint8)
            _read(file, part.rows, range(count), range(part.rows.shape[1]), rows, stored)
            _matrix(out, ids_at, count, 3).copy_(torch.tensor(list(digits(part.ids))))
            if not _finite(rows):
                name = part.matrix()
                raise AdapterRejected(f"{name} does not fit {out.dtype}", field=name)


def _size(span: TensorSpan) -> int:
    return span.end - span.begin


def _matrix(memory: torch.Tensor, at: int, rows: int, columns: int) -> torch.Tensor:
    return memory[at : at + rows * columns].view(rows, columns)


def _read(
    file: FileIO,
    span: TensorSpan,
    rows: range,
    columns: range,
    out: torch.Tensor,
    stored: torch.Tensor,
) -> None:
    """Read into out these rows and columns of a matrix of the file, and no other byte of it.

    stored: bytes to read to where out has another dtype.
    """
    dtype, width = _DTYPES[span.dtype], span.shape[1]
    elements = len(rows) * len(columns)
    matrix = out
    if dtype != out.dtype:
        matrix = stored[: elements * dtype.itemsize].view(dtype).view(len(rows), len(columns))
    together = rows.step == 1 and len(columns) == width
    into = matrix.view(torch.uint8).numpy()
    for strip, row in [(into, rows.start)] if together else zip(into, rows, strict=True):
        file.seek(span.begin + (row * width + columns.start) * dtype.itemsize)
        if file.readinto(strip) != strip.nbytes:  # type: ignore[arg-type]
            raise AdapterRejected("the blob ended early: its file was changed", field="size")
    if matrix is not out:
        out.copy_(matrix)


def _finite(matrix: torch.Tensor) -> bool:
    """Whether all values are finite, by their sum, which costs a thirtieth of looking at each.

    Finite values can have a sum that is not: then each is looked at.
    """
    return math.isfinite(matrix.sum().item()) or bool(matrix.isfinite().all())


def _overflow(part: LinearLora, side: str, dtype: torch.dtype) -> AdapterRejected:
    name = part.matrix(side)
    return AdapterRejected(
        f"{name} with scaling {part.scaling:g} does not fit {dtype}: serve it in float32 or "
        "bfloat16",
        field=name,
    )
