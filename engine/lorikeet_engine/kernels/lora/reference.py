"""LoRA in pure torch: the equations that the Triton kernels are compared with.

These functions also serve requests on CPUs, so they loop over segments, never over tokens.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn import functional as F

from lorikeet_engine.errors import ShapeError
from lorikeet_engine.kernels.lora.types import ExpertStep, LoraGroup, LoraWeights, Segments
from lorikeet_engine.kernels.routed_rows import RoutedRows


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    weights: LoraWeights,
    segments: Segments,
    layer: int,
    group: LoraGroup,
) -> None:
    """Add LoRA to a product: y[t] += B(t)·A(t)·x[t] for every linear of the group, in place.

    Then, for linears with vectors, y[t] becomes (1 + gain(t)) · y[t] + bias(t).

    x [tokens, d_in]
    y [tokens, sum(d_outs)]: outputs of the group's linears side by side

    Sums are float32; y is rounded once, with vectors twice. Tokens outside every segment, and
    linears of rank 0 without vectors, keep their y. Raises ShapeError.
    """
    expand(shrink(x, weights, segments, layer, group), y, weights, segments, layer, group)
    if segments.has_vectors:
        apply_vectors(y, weights, segments, layer, group)


def apply_vectors(
    y: torch.Tensor, weights: LoraWeights, segments: Segments, layer: int, group: LoraGroup
) -> None:
    """Compute y[t] = (1 + gain(t)) · y[t] + bias(t) in place, for linears with vectors.

    y [tokens, sum(d_outs)]: outputs of the group's linears side by side

    Computed in float32, rounded once.
    """
    assert weights.vectors is not None, "segments with vectors without a table of them"
    table = weights.vectors[segments.slots.long(), layer][:, list(group.linears)].tolist()
    runs = zip(segments.starts.tolist(), segments.lengths.tolist(), table, strict=True)
    for start, length, places in runs:
        column = 0
        for at, d_out in zip(places, group.d_outs, strict=True):
            rows, column = y[start : start + length, column : column + d_out], column + d_out
            if at >= 0:
                gain, bias = weights.arena[at : at + 2 * d_out].view(2, d_out).float()
                rows.copy_(rows.float() * (1 + gain) + bias)


def add_embedding_lora(
    y: torch.Tensor,
    token_ids: torch.Tensor,
    weights: LoraWeights,
    segments: Segments,
    layer: int,
    group: LoraGroup,
) -> None:
    """Add LoRA to embeddings: y[t] += B(t)·A(t)[:, token_ids[t]], in place.

    token_ids [tokens] int64
    y [tokens, hidden]: the base model's embeddings
    group: the embeddings as a group of one linear

    Sums are float32; y is rounded once.
    """
    for rows, _, parts in pieces(weights, segments, layer, group):
        taken = [
            weights.arena[part.a : part.a + part.rank * group.d_in]
            .view(-1, part.rank)[token_ids[rows]]
            .float()
            * part.weight
            for part in parts
        ]
        y[rows] += torch.cat(taken, 1) @ joined_b(weights, parts, group.d_outs[0])


def replace_embeddings(
    y: torch.Tensor,
    token_ids: torch.Tensor,
    weights: LoraWeights,
    segments: Segments,
    layer: int,
    group: LoraGroup,
) -> None:
    """Set y[t] to the embedding row that t's adapter has trained for token_ids[t], if any.

    token_ids [tokens] int64
    y [tokens, hidden]: the base model's embeddings
    group: the adapters' trained embedding rows as a group of one linear

    y is changed in place.
    """
    for rows, _, (part,) in pieces(weights, segments, layer, group):
        found = token_ids[rows, None] == _ids(weights, part)  # [tokens, count]
        values = weights.arena[part.a : part.a + part.rank * group.d_in].view(part.rank, -1)
        replaced = found.any(1)
        y[rows][replaced] = values[found[replaced].int().argmax(1)].to(y.dtype)


def replace_logits(
    y: torch.Tensor,
    x: torch.Tensor,
    weights: LoraWeights,
    segments: Segments,
    layer: int,
    group: LoraGroup,
) -> None:
    """Overwrite logits of adapters' trained tokens, in place: y[r, id] = x[r] · row(id).

    row(id) is the row of lm_head that r's adapter has trained for token id.

    x [rows, hidden]: hidden states
    y [rows, vocabulary]: logits
    group: the adapters' trained head rows as a group of one linear

    Sums are float32, rounded once.
    """
    for rows, _, (part,) in pieces(weights, segments, layer, group):
        made = x[rows].float() @ joined_a(weights, [part], group.d_in).T
        y[rows][:, _ids(weights, part)] = made.to(y.dtype)


def list_owners(segments: Segments, routed: RoutedRows) -> torch.Tensor:
    """List each routed row's adapter slot, −1 for none, and expert → [rows, 2] int32."""
    per_expert, tokens = routed.starts.diff().long(), len(routed.weights)
    experts = torch.repeat_interleave(per_expert)
    slots = torch.repeat_interleave(segments.slots, segments.lengths.long())
    slots = F.pad(slots, (0, tokens - len(slots)), value=-1)
    return torch.stack([slots[routed.pairs // routed.per_token], experts.int()], 1)


def add_expert_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    experts: ExpertStep,
    layer: int,
    group: LoraGroup,
    *,
    gathered: bool,
) -> None:
    """Add LoRA to an expert product, y[r] += B(r)·A(r)·x[r]: see kernels.lora.experts."""
    weights, routed = experts.step.weights, experts.routed
    runs, lengths = torch.unique_consecutive(experts.owners, dim=0, return_counts=True)
    end = 0
    for (slot, expert), length in zip(runs.tolist(), lengths.tolist(), strict=True):
        rows, end = slice(end, end + length), end + length
        if slot < 0:
            continue
        inputs = x[routed.pairs[rows] // routed.per_token if gathered else rows].float()
        for s, linear in enumerate(group.linears):
            a_start, b_start, rank = weights.table[slot, layer, linear].tolist()
            in_a, in_b = rank * group.d_in, rank * group.d_outs[s]
            a_start, b_start = a_start + expert * in_a, b_start + expert * in_b
            a = weights.arena[a_start : a_start + in_a].view(rank, group.d_in)
            b = weights.arena[b_start : b_start + in_b].view(rank, group.d_outs[s])
            column = sum(group.d_outs[:s])
            y[rows, column : column + group.d_outs[s]] += inputs @ a.float().T @ b.float()


def shrink(
    x: torch.Tensor, weights: LoraWeights, segments: Segments, layer: int, group: LoraGroup
) -> torch.Tensor:
    """Compute v[t, s, :rank] = A(t, s)·x[t] for each linear s of the group, in float32.

    x [tokens, d_in]
    A(t, s) [rank, d_in], of the adapter whose segment holds token t
    → v [tokens, slices, segments.max_rank] float32

    v is zero for tokens without an adapter, and in columns from the adapter's rank on. Raises
    ShapeError.
    """
    if x.dim() != 2 or x.shape[1] != group.d_in:
        raise ShapeError(f"x has shape {tuple(x.shape)}: want [tokens, {group.d_in}]")
    v = x.new_zeros((x.shape[0], len(group.linears), segments.max_rank), dtype=torch.float32)
    for rows, s, parts in pieces(weights, segments, layer, group):
        a = joined_a(weights, parts, group.d_in)
        if len(a) > segments.max_rank:
            raise ShapeError(f"an adapter of rank {len(a)} with max_rank={segments.max_rank}")
        v[rows, s, : len(a)] = x[rows].float() @ a.T
    return v


def expand(
    v: torch.Tensor,
    y: torch.Tensor,
    weights: LoraWeights,
    segments: Segments,
    layer: int,
    group: LoraGroup,
) -> None:
    """Compute y[t, columns of s] += B(t, s)·v[t, s, :rank] in place, for each linear s.

    v [tokens, slices, segments.max_rank] float32: output of `shrink`
    B(t, s) [d_out, rank], with LoRA's scaling inside
    y [tokens, sum(d_outs)]

    Sums are float32, rounded once. Tokens without an adapter keep their y. Raises ShapeError.
    """
    if y.dim() != 2 or y.shape[1] != sum(group.d_outs):
        raise ShapeError(f"y has shape {tuple(y.shape)}: want [tokens, {sum(group.d_outs)}]")
    if v.shape != (y.shape[0], len(group.linears), segments.max_rank):
        raise ShapeError(f"v has shape {tuple(v.shape)}, which does not fit y and the segments")
    for rows, s, parts in pieces(weights, segments, layer, group):
        d_out, column = group.d_outs[s], sum(group.d_outs[:s])
        b = joined_b(weights, parts, d_out)
        y[rows, column : column + d_out] += v[rows, s, : len(b)] @ b


class Part(NamedTuple):
    """One adapter's matrices of a linear: the elements of the arena at which A and B begin, the
    rank, and the adapter's weight.
    """

    a: int
    b: int
    rank: int
    weight: float


def pieces(
    weights: LoraWeights, segments: Segments, layer: int, group: LoraGroup
) -> Iterator[tuple[slice, int, list[Part]]]:
    """Yield the LoRA work of a fused linear, one entry for each segment and linear of rank above 0.

    An entry is (the segment's tokens, index of the linear in the group, matrices of each adapter of
    the segment that changes the linear).
    """
    linears, of_segments = list(group.linears), _adapters(weights, segments)
    slots = [slot for adapters in of_segments for slot, _ in adapters]
    entries = iter(weights.table[slots, layer][:, linears].tolist())
    runs = zip(segments.starts.tolist(), segments.lengths.tolist(), of_segments, strict=True)
    for start, length, adapters in runs:
        places = [next(entries) for _ in adapters]
        for s in range(len(linears)):
            entries_of = [
                (*at[s], weight) for at, (_, weight) in zip(places, adapters, strict=True)
            ]
            parts = [Part(a, b, rank, weight) for a, b, rank, weight in entries_of if rank]
            if parts:
                yield slice(start, start + length), s, parts


def joined_a(weights: LoraWeights, parts: list[Part], d_in: int) -> torch.Tensor:
    """Return A of these parts, times their weights, one behind the other → [rank, d_in] float32."""
    each = [(weights.arena[p.a : p.a + p.rank * d_in].view(-1, d_in).float(), p) for p in parts]
    return _joined([a if part.weight == 1 else part.weight * a for a, part in each])


def joined_b(weights: LoraWeights, parts: list[Part], d_out: int) -> torch.Tensor:
    """Return the transposed B of these parts, one behind the other → [rank, d_out] float32."""
    each = [weights.arena[p.b : p.b + p.rank * d_out] for p in parts]
    return _joined([b.view(-1, d_out).float() for b in each])


def _joined(matrices: list[torch.Tensor]) -> torch.Tensor:
    return matrices[0] if len(matrices) == 1 else torch.cat(matrices)


def _ids(weights: LoraWeights, part: Part) -> torch.Tensor:
    """Read the ids of an adapter's trained tokens from the arena → [count] int64.

    part: the trained rows, whose B holds the ids, three base-256 digits each.
    """
    digits = weights.arena[part.b : part.b + 3 * part.rank].view(-1, 3).long()
    return digits[:, 0] + (digits[:, 1] << 8) + (digits[:, 2] << 16)


def _adapters(weights: LoraWeights, segments: Segments) -> list[list[tuple[int, float]]]:
    """List the slots and weights of each segment's adapters: several in a composition."""
    slots = segments.slots.tolist()
    if not segments.composed:
        return [[(slot, 1.0)] for slot in slots]
    assert weights.members is not None, "segments of compositions without their members"
    assert weights.member_weights is not None, "members without weights"
    pairs = zip(
        weights.members[slots].tolist(), weights.member_weights[slots].tolist(), strict=True
    )
    return [[(p, w) for p, w in zip(*pair, strict=True) if p >= 0] for pair in pairs]
