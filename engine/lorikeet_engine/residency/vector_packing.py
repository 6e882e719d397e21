"""Packing of vectors: writes the gains and biases of an adapter's linears into its image.

With DoRA, a linear computes m / n · (W + scaling · B·A)·x + bias, where m are the trained
magnitudes of the rows and n the norms of the rows of W + scaling · B·A. So it is the plain output
times 1 + gain, plus a bias: gain = m / n − 1, which is rounded less than m / n would be, and a bias
that takes back what the gain changes of the base model's own bias. Trained biases are in the same
bias.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from lorikeet_engine.adapter_format import AdapterSpec, TensorSpan
from lorikeet_engine.adapter_format.tensor_names import BIAS, LORA_BIAS, MAGNITUDE
from lorikeet_engine.adapter_format.vectors import LinearVectors
from lorikeet_engine.errors import AdapterRejected
from lorikeet_engine.residency.base_rows import BaseRows, RowFacts
from lorikeet_engine.residency.packed_image import PackedLayout

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def write_vectors(
    blob: Path,
    spec: AdapterSpec,
    layout: PackedLayout,
    spans: Sequence[torch.Tensor],
    base: BaseRows | None,
) -> None:
    """Write an adapter's vectors (gains and biases of linears) to every span of its image.

    The A and B matrices must be in the spans already.

    blob: the adapter's file, which has the trained magnitudes and biases.
    spec: content of the blob.
    layout: places of tensors in a span.
    spans: parts of the image, one for each tensor parallel rank.
    base: reads rows of the base model; may be None if no vector depends on them: if the blob has
        neither magnitudes nor biases that replace the base model's.

    Raises AdapterRejected if a vector does not fit the image's dtype.
    """
    with blob.open("rb", buffering=0) as file:
        for part in spec.vectors:
            stored = {kind: _read(file.fileno(), span) for kind, span in part.spans.items()}
            _write(part, stored, layout, spans, base)


def _write(
    part: LinearVectors,
    stored: Mapping[str, torch.Tensor],
    layout: PackedLayout,
    spans: Sequence[torch.Tensor],
    base: BaseRows | None,
) -> None:
    ranges = [of_rank[part.linear] for of_rank in layout.ranges]
    facts = [RowFacts(None, None)] * len(spans)
    if stored.keys() & {MAGNITUDE, BIAS}:
        assert base is not None, "vectors that depend on the base model"
        facts = [_facts(part, stored, layout, rank, span, base) for rank, span in enumerate(spans)]
    divided = len({kept.inputs for kept in ranges}) > 1  # then a row's parts lie in all ranks
    if divided and MAGNITUDE in stored:
        whole = torch.stack([each.squares for each in facts if each.squares is not None]).sum(0)
        facts = [each._replace(squares=whole) for each in facts]
    assert layout.vectors is not None
    at = int(layout.vectors[part.layer, part.linear])
    for rank, (kept, span, own) in enumerate(zip(ranges, spans, facts, strict=True)):
        rows = torch.cat([torch.arange(some.start, some.stop) for some in kept.outputs])
        vectors = {kind: vector[rows] for kind, vector in stored.items()}
        if divided and rank:  # the first rank adds biases to the sum over ranks
            vectors = {kind: v for kind, v in vectors.items() if kind == MAGNITUDE}
        gain, bias = _gain_and_bias(vectors, own, part.scaling, len(rows))
        for into, vector in zip(span[at : at + 2 * len(rows)].chunk(2), (gain, bias), strict=True):
            into.copy_(vector)
            if not bool(into.isfinite().all()):
                name = part.vector(next(iter(stored)))
                raise AdapterRejected(f"{name} does not fit {into.dtype}", field=name)


def _facts(
    part: LinearVectors,
    stored: Mapping[str, torch.Tensor],
    layout: PackedLayout,
    rank: int,
    span: torch.Tensor,
    base: BaseRows,
) -> RowFacts:
    if MAGNITUDE not in stored:
        return base.facts(rank, part.layer, part.linear)
    kept = layout.ranges[rank][part.linear]
    a_at, b_at, lora_rank = layout.rows[part.layer, part.linear].tolist()
    of_a, of_b = kept.elements(lora_rank)
    a, b = span[a_at : a_at + of_a], span[b_at : b_at + of_b]
    return base.facts(rank, part.layer, part.linear, a.view(lora_rank, -1), b.view(lora_rank, -1))


def _gain_and_bias(
    vectors: Mapping[str, torch.Tensor], facts: RowFacts, scaling: float, d_out: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gain and the bias of a rank's outputs, [d_out] float32 each.

    vectors: trained vectors of these outputs, by kind (magnitude, bias, or bias of the LoRA).
    facts: sums of squares of the rows of W + B·A, and the base model's own bias.
    scaling: the LoRA's scaling, which multiplies its bias.
    d_out: number of these outputs.
    """
    gain = torch.zeros(d_out)
    if MAGNITUDE in vectors:
        assert facts.squares is not None
        gain = vectors[MAGNITUDE] / facts.squares.sqrt() - 1
    bias = torch.zeros(d_out)
    if facts.bias is not None:
        bias = vectors.get(BIAS, facts.bias) - (1 + gain) * facts.bias
    if LORA_BIAS in vectors:
        bias = bias + scaling * vectors[LORA_BIAS]
    return gain, bias


def _read(descriptor: int, span: TensorSpan) -> torch.Tensor:
    """Read a vector of a blob as float32.

    descriptor: descriptor of the blob's open file.
    span: the vector's place in the file.
    """
    data = bytearray(span.size_bytes)
    if os.preadv(descriptor, [data], span.begin) != len(data):
        raise AdapterRejected("the blob ended early: its file was changed", field="size")
    return torch.frombuffer(data, dtype=_DTYPES[span.dtype]).float()
