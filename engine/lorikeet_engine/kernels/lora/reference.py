"""LoRA in pure torch: the equations that the Triton kernels are compared with.

These functions also serve requests on CPUs, so they loop over segments, never over tokens.
"""

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

    Then, for linears with vectors (a gain and a bias of an adapter), y[t] becomes (1 + gain(t)) ·
    y[t] + bias(t).

    x [tokens, d_in]
    y [tokens, sum(d_outs)]: outputs of the group's linears side by side

    Sums are float32; y is rounded once; with vectors twice, for a composition (a weighted sum of
    adapters) once per adapter. Tokens outside every segment, and linears of rank 0 without vectors,
    keep their y. Raises ShapeError if an operand's shape or layout does not fit.
    """
    expand(shrink(x, weights, segments, layer, group), y, weights, segments, layer, group)
    if segments.has_vectors:
        apply_vectors(y, weights, segments, layer, group)


def apply_vectors(
    y: torch.Tensor, weights: LoraWeights, segments: Segments, layer: int, group: LoraGroup
) -> None:
    """Compute y[t] = (1 + gain(t)) · y[t] + bias(t) in place, with the vectors of t's adapter.

    y [tokens, sum(d_outs)]: outputs of the group's linears side by side

    Linears for which the adapter has no vectors keep their y. Computed in float32, rounded once.
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

    Sums are float32; y is rounded once, for a composition once per adapter.
    """
    for rows, _, a_start, b_start, rank, _, weight in pieces(weights, segments, layer, group):
        a = weights.arena[a_start : a_start + rank * group.d_in].view(group.d_in, rank)
        b = weights.arena[b_start : b_start + rank * group.d_outs[0]].view(rank, -1)
        y[rows] += weight * a[token_ids[rows]].float() @ b.float()


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
    for rows, _, a_start, b_start, count, *_ in pieces(weights, segments, layer, group):
        ids, wanted = _ids(weights, b_start, count), token_ids[rows]
        found = torch.searchsorted(ids, wanted).clamp_(max=count - 1)
        values = weights.arena[a_start : a_start + count * group.d_in].view(count, -1)
        replaced = ids[found] == wanted
        y[rows][replaced] = values[found[replaced]].to(y.dtype)


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
    for rows, _, a_start, b_start, count, *_ in pieces(weights, segments, layer, group):
        values = weights.arena[a_start : a_start + count * group.d_in].view(count, -1)
        made = x[rows].float() @ values.float().T
        y[rows][:, _ids(weights, b_start, count)] = made.to(y.dtype)


def list_owners(segments: Segments, routed: RoutedRows) -> torch.Tensor:
    """List each routed row's adapter slot, −1 for none, and expert → [rows, 2] int32.

    A routed row is a token with one of the experts chosen for it.
    """
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
    """Compute y[r] += B(r)·A(r)·x[r] in place: see kernels.lora.experts.add_expert_lora.

    gathered: whether x has a row for each token, instead of one for each row r.
    """
    weights, routed = experts.step.weights, experts.routed
    runs, lengths = torch.unique_consecutive(experts.owners, dim=0, return_counts=True)
    end = 0
    for (slot, expert), length in zip(runs.tolist(), lengths.tolist(), strict=True):
        rows, end = slice(end, end + length), end + length
        if slot < 0:
            continue
        inputs = x[routed.pairs[rows] // routed.per_token if gathered else rows].float()
        for s, linear in enumerate(group.linears):
            a_place, b_place, rank = weights.table[slot, layer, linear].tolist()
            a = _expert_matrix(weights, a_place, expert, rank, group.d_in)
            b = _expert_matrix(weights, b_place, expert, rank, group.d_outs[s])
            column = sum(group.d_outs[:s])
            y[rows, column : column + group.d_outs[s]] += inputs @ a.float().T @ b.float()


def _expert_matrix(
    weights: LoraWeights, place: int, expert: int, rank: int, width: int
) -> torch.Tensor:
    """Return an expert's matrix [rank, width].

    place: element of the arena at which the experts' matrices begin (LoraWeights.table); odd if all
        experts share one matrix, which then begins one element earlier.
    """
    start = place - 1 if place % 2 else place + expert * rank * width
    return weights.arena[start : start + rank * width].view(rank, width)


def shrink(
    x: torch.Tensor, weights: LoraWeights, segments: Segments, layer: int, group: LoraGroup
) -> torch.Tensor:
    """Compute v[t, s, :rank] = A(t, s)·x[t] for each linear s of the group, in float32.

    x [tokens, d_in]
    A(t, s) [rank, d_in], of the adapter whose segment holds token t
    → v [tokens, slices, segments.max_rank] float32

    v is zero for tokens without an adapter, and in columns from the adapter's rank on. The columns
    of a composition's adapters follow one another, multiplied by their weights. Raises ShapeError
    if an operand's shape or layout does not fit.
    """
    if x.dim() != 2 or x.shape[1] != group.d_in:
        raise ShapeError(f"x has shape {tuple(x.shape)}: want [tokens, {group.d_in}]")
    v = x.new_zeros((x.shape[0], len(group.linears), segments.max_rank), dtype=torch.float32)
    for rows, s, a_start, _, rank, first, weight in pieces(weights, segments, layer, group):
        end = first + rank
        if end > segments.max_rank:
            raise ShapeError(f"an adapter of rank {end} with max_rank={segments.max_rank}")
        a = weights.arena[a_start : a_start + rank * group.d_in].view(rank, group.d_in)
        made = x[rows].float() @ a.float().T
        v[rows, s, first:end] = made if weight == 1 else weight * made
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

    Sums are float32, rounded once, for a composition once per adapter. Tokens without an adapter
    keep their y. Raises ShapeError if an operand's shape or layout does not fit.
    """
    if y.dim() != 2 or y.shape[1] != sum(group.d_outs):
        raise ShapeError(f"y has shape {tuple(y.shape)}: want [tokens, {sum(group.d_outs)}]")
    if v.shape != (y.shape[0], len(group.linears), segments.max_rank):
        raise ShapeError(f"v has shape {tuple(v.shape)}, which does not fit y and the segments")
    for rows, s, _, b_start, rank, first, _ in pieces(weights, segments, layer, group):
        d_out, column = group.d_outs[s], sum(group.d_outs[:s])
        b = weights.arena[b_start : b_start + rank * d_out].view(rank, d_out)
        y[rows, column : column + d_out] += v[rows, s, first : first + rank] @ b.float()


def pieces(
    weights: LoraWeights, segments: Segments, layer: int, group: LoraGroup
) -> list[tuple[slice, int, int, int, int, int, float]]:
    """List the LoRA work of a fused linear, one entry for each segment, adapter of the segment and
    linear of rank above 0.

    A segment is a run of tokens of one adapter, or of one composition, a weighted sum of adapters.

    An entry is (tokens of the segment, index of the linear in the group, elements of the arena at
    which A and B start, rank, sum of the ranks before it in the composition, weight).
    """
    if segments.composed:
        return _composed_pieces(weights, segments, layer, group)
    linears = list(group.linears)
    table = weights.table[segments.slots.long(), layer][:, linears].tolist()
    runs = zip(segments.starts.tolist(), segments.lengths.tolist(), table, strict=True)
    return [
        (slice(start, start + length), s, a_start, b_start, rank, 0, 1.0)
        for start, length, linear_rows in runs
        for s, (a_start, b_start, rank) in enumerate(linear_rows)
        if rank > 0
    ]


def _ids(weights: LoraWeights, start: int, count: int) -> torch.Tensor:
    """Read the ids of an adapter's trained tokens from the arena → [count] int64.

    start: element of the arena at which the ids begin, three base-256 digits each.
    """
    digits = weights.arena[start : start + 3 * count].view(count, 3).long()
    return digits[:, 0] + (digits[:, 1] << 8) + (digits[:, 2] << 16)


def _composed_pieces(
    weights: LoraWeights, segments: Segments, layer: int, group: LoraGroup
) -> list[tuple[slice, int, int, int, int, int, float]]:
    """List the entries of `pieces` for segments of which some may have a weighted sum of adapters.

    Each adapter of such a sum has an entry of its own.
    """
    assert weights.members is not None, "segments of compositions without their members"
    assert weights.member_weights is not None, "members without weights"
    members = weights.members[segments.slots.long()].tolist()
    factors = weights.member_weights[segments.slots.long()].tolist()
    runs = zip(segments.starts.tolist(), segments.lengths.tolist(), members, factors, strict=True)
    listed = []
    for start, length, slots, each in runs:
        before = [0] * len(group.linears)
        for slot, weight in zip(slots, each, strict=True):
            if slot < 0:
                break
            table = weights.table[slot, layer, list(group.linears)].tolist()
            for s, (a_start, b_start, rank) in enumerate(table):
                if rank > 0:
                    place = a_start, b_start, rank, before[s], weight
                    listed.append((slice(start, start + length), s, *place))
                    before[s] += rank
    return listed
