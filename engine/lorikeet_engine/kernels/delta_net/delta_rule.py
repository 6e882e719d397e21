"""Gated delta rule in Triton: one launch for decodes, two for prefills.

kernels/delta_net/__init__.py defines shapes and dtypes.

A prefill's first launch solves each chunk's triangular system, for all chunks at once; the second
passes each state through the chunks of its sequence. With keys k as rows of length 1 and queries q
of length 1/√key_dim, γ the sum of g since the chunk's start, S the state before the chunk, and
D[i, j] = exp(γ[i] − γ[j]) for j ≤ i, else 0:
    T = (1 + tril(β kkᵀ D, −1))⁻¹ β      the system's inverse, with columns multiplied by β
    r = v − exp(γ) k Sᵀ                  part of the values that the state does not predict
    o = exp(γ) q Sᵀ + (qkᵀ D) T r
    S = exp(γ[last]) S + (exp(γ[last] − γ) T r)ᵀ k
The first launch returns T, (qkᵀ D) T, and each token's factors: lengths and decays, with which the
second launch multiplies the rows of its products.
"""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels import delta_net
from lorikeet_engine.kernels.delta_net import Decay, Decodes, Heads, Prefills, Ring
from lorikeet_engine.kernels.delta_net.checked_output import checked_output
from lorikeet_engine.kernels.delta_net.gates import gates
from lorikeet_engine.kernels.delta_net.ring import add_tokens, decode_with_ring, empty
from lorikeet_engine.kernels.lora.types import LoraDelta
from lorikeet_engine.kernels.pointwise.lora_operands import operands

_CHUNK = tl.constexpr(delta_net.CHUNK)
_EPS = tl.constexpr(delta_net.NORM_EPS)
_PREDICTED, _READ, _LEFT, _FACTORS = (tl.constexpr(n) for n in range(4))
"""Indices in `factors`, which holds several factors for each token of a chunk; _FACTORS: their
number.

_PREDICTED: factor of k Sᵀ. _READ: factor of q Sᵀ. _LEFT: factor of the token's correction in the
    state after the chunk.
"""
_VALUES = 32  # of one program, which has these rows of a state
_NO_RING = (None,) * 4


def decode_delta_rule(
    qkv: torch.Tensor,
    ba: torch.Tensor,
    decay: Decay,
    states: torch.Tensor,
    decodes: Decodes,
    heads: Heads,
    lora: LoraDelta | None = None,
    out: torch.Tensor | None = None,
    ring: Ring | None = None,
) -> torch.Tensor:
    """Compute the gated delta rule of one token of each sequence: see kernels.delta_net."""
    o = _checked_output(qkv, ba, states, heads, lora, out)
    if ring is not None:
        decode_with_ring(qkv, ba, decay, states, decodes, heads, lora, ring, o)
        return o
    values = min(_VALUES, heads.value_dim)
    _decode_delta_rule[(heads.value_dim // values, heads.value_heads, len(decodes.slots))](
        qkv, ba, *operands(lora), decay.a_log, decay.dt_bias, states, decodes.slots,
        decodes.tokens, o, qkv.stride(0), ba.stride(0), states.stride(0), *heads.sizes, values,
    )  # fmt: skip
    return o


def prefill_delta_rule(
    qkv: torch.Tensor,
    ba: torch.Tensor,
    decay: Decay,
    states: torch.Tensor,
    prefills: Prefills,
    heads: Heads,
    lora: LoraDelta | None = None,
    out: torch.Tensor | None = None,
    ring: Ring | None = None,
) -> torch.Tensor:
    """Compute the gated delta rule of several tokens of each sequence: see kernels.delta_net."""
    o = _checked_output(qkv, ba, states, heads, lora, out)
    tiles = (len(prefills.chunks), heads.value_heads)
    solved, mixed = (qkv.new_empty((*tiles, *2 * (delta_net.CHUNK,))) for _ in range(2))
    factors = qkv.new_empty((*tiles, _FACTORS.value, delta_net.CHUNK), dtype=torch.float32)
    faded = qkv.new_empty(tiles, dtype=torch.float32)
    wide = qkv.dtype == torch.float32
    precision = "tf32x3" if wide else "tf32"  # of float32 factors
    _solve_chunks[tiles](
        qkv, ba, *operands(lora), decay.a_log, decay.dt_bias, prefills.ends, prefills.chunks,
        solved, mixed, factors, faded, qkv.stride(0), ba.stride(0), *heads.sizes[:3], precision,
    )  # fmt: skip
    values, entries = min(_VALUES, heads.value_dim), 0 if ring is None else ring.decays.shape[2]
    _scan_chunks[(heads.value_dim // values, heads.value_heads, len(prefills.slots))](
        qkv, solved, mixed, factors, faded, states, prefills.slots, prefills.starts,
        prefills.ends, prefills.first_chunks, prefills.saves, *(ring or _NO_RING), o,
        qkv.stride(0), states.stride(0), *heads.sizes, entries, values, 1 if wide else 2,
        precision,
    )  # fmt: skip
    return o


def _checked_output(
    qkv: torch.Tensor,
    ba: torch.Tensor,
    states: torch.Tensor,
    heads: Heads,
    lora: LoraDelta | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    for dim in (heads.key_dim, heads.value_dim):
        assert dim == max(16, triton.next_power_of_2(dim)), dim
    return checked_output(qkv, ba, states, heads, lora, out)


@triton.jit  # type: ignore[untyped-decorator]
def _decode_delta_rule(
    qkv: tl.tensor,
    ba: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    states: tl.tensor,
    slots: tl.tensor,
    tokens: tl.tensor,
    o: tl.tensor,
    stride: tl.tensor,
    ba_stride: tl.tensor,
    slot_stride: tl.tensor,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    values: tl.constexpr,
) -> None:
    """Compute some values of one value head for one sequence's token, and update their state.

    qkv: queries, keys and values. ba: b and a of each value head, which give β and the decay.
    states: S of each slot (kernels.delta_net.decode_delta_rule). o: result.
    slots, tokens: state slot and token of each sequence (Decodes).
    a_log, dt_bias: weights of the decay (Decay).
    lora, adapted: LoRA delta of ba, and its number of rows; None: no delta.
    stride, ba_stride: elements of qkv and of ba from token to token. slot_stride: elements of
        states from slot to slot.
    values: number of values that the program computes. All other operands: see Heads.
    """
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        if tokens is not None:
            row = tl.load(tokens + row).to(tl.int64)
        column = tl.arange(0, key_dim)
        value = tl.program_id(0) * values + tl.arange(0, values)
        places = slot * slot_stride + (head * value_dim + value)[:, None] * key_dim
        state = states + places + column[None, :]
        s = tl.load(state).to(tl.float32)
        query = qkv + row * stride + head // (value_heads // key_heads) * key_dim + column
        q = tl.load(query).to(tl.float32)
        k = tl.load(query + key_heads * key_dim).to(tl.float32)
        values_at = qkv + row * stride + 2 * key_heads * key_dim
        v = tl.load(values_at + head * value_dim + value).to(tl.float32)
        q = q / (tl.sqrt(tl.sum(q * q, 0) + _EPS) * (key_dim**0.5))
        k = k / tl.sqrt(tl.sum(k * k, 0) + _EPS)
        g, beta = gates(
            ba, lora, adapted, a_log, dt_bias, row, head, ba_stride, row >= 0, value_heads
        )
        s *= tl.exp(g)
        correction = beta * (v - tl.sum(s * k[None, :], 1))
        s += correction[:, None] * k[None, :]
        tl.store(state, s.to(states.dtype.element_ty))
        out = tl.sum(s * q[None, :], 1).to(o.dtype.element_ty)
        tl.store(o + (row * value_heads + head) * value_dim + value, out)


@triton.jit  # type: ignore[untyped-decorator]
def _inverse(system: tl.tensor, precision: tl.constexpr) -> tl.tensor:
    """Return (1 + system)⁻¹ for a strictly lower triangular matrix `system` [_CHUNK, _CHUNK].

    Inverts the blocks on the diagonal, of sizes 1, 2, 4 and so on, each from two inverted blocks of
    half the size: [[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]]. This is as exact as
    substitution, even if powers of the system are large, as for repeated keys without decay.

    precision: precision of tl.dot for float32 factors.
    """
    row, column = tl.arange(0, _CHUNK)[:, None], tl.arange(0, _CHUNK)[None, :]
    x = tl.where(row == column, 1.0, 0.0)
    for level in tl.static_range(6):  # 2⁶ is _CHUNK
        below = (row >> level) == (column >> level) + 1
        c = tl.where(below & ((row >> level + 1) == (column >> level + 1)), system, 0.0)
        if level == 0:
            x -= c
        else:
            cx = tl.dot(c, x, input_precision=precision)
            x -= tl.dot(x, cx, input_precision=precision)
    return x


@triton.jit  # type: ignore[untyped-decorator]
def _solve_chunks(
    qkv: tl.tensor,
    ba: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    ends: tl.tensor,
    chunks: tl.tensor,
    solved: tl.tensor,
    mixed: tl.tensor,
    factors: tl.tensor,
    faded: tl.tensor,
    stride: tl.tensor,
    ba_stride: tl.tensor,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    precision: tl.constexpr,
) -> None:
    """Compute T and other operands of _scan_chunks for one value head of one chunk.

    The module's docstring defines T, D and γ, the sum of g since the chunk's start.

    solved: T, the inverse of the chunk's triangular system, with columns multiplied by β.
    mixed: (qkᵀ D) T.
    factors [chunks, value_heads, _FACTORS, _CHUNK]: factors of each token's k Sᵀ, of its q Sᵀ, and
        of its correction in the state after the chunk.
    faded: exp(γ[last]), the factor of the state from the chunk's start to its end.
    ends: token after each sequence's last.
    chunks: sequence and first token of each chunk.
    precision: precision of tl.dot for float32 factors.
    All other operands: see _decode_delta_rule.
    """
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence = tl.load(chunks + 2 * chunk)
    if sequence < 0:
        return
    first = tl.load(chunks + 2 * chunk + 1).to(tl.int64)
    place = tl.arange(0, _CHUNK)
    token = first + place
    inside = token < tl.load(ends + sequence)
    column = tl.arange(0, key_dim)
    key_head = head // (value_heads // key_heads)
    query = qkv + token[:, None] * stride + key_head * key_dim + column[None, :]
    q = tl.load(query, mask=inside[:, None], other=0.0)
    k = tl.load(query + key_heads * key_dim, mask=inside[:, None], other=0.0)
    of_q, of_k = _inverse_length(q) * (1.0 / key_dim**0.5), _inverse_length(k)
    g, beta = gates(ba, lora, adapted, a_log, dt_bias, token, head, ba_stride, inside, value_heads)
    total = tl.cumsum(g, 0)
    row, other = place[:, None], place[None, :]
    since = tl.where(row >= other, total[:, None] - total[None, :], float("-inf"))
    decays = tl.exp(since) * of_k[None, :]
    similar = tl.dot(k, tl.trans(k), input_precision=precision) * decays
    system = tl.where(row > other, similar * (beta * of_k)[:, None], 0.0)
    inverse = _inverse(system, precision) * beta[None, :]
    scores = tl.dot(q, tl.trans(k), input_precision=precision) * decays * of_q[:, None]
    product = tl.dot(scores, inverse, input_precision=precision)

    index = chunk * value_heads + head
    tile = index * (_CHUNK * _CHUNK) + row * _CHUNK + other
    tl.store(solved + tile, inverse.to(solved.dtype.element_ty))
    tl.store(mixed + tile, product.to(mixed.dtype.element_ty))
    at = factors + index * (_FACTORS * _CHUNK) + place
    last = tl.min(total, 0)  # the last of total: g is never above 0, and tl.sum rounds otherwise
    tl.store(at + _PREDICTED * _CHUNK, tl.exp(total) * of_k)
    tl.store(at + _READ * _CHUNK, tl.exp(total) * of_q)
    tl.store(at + _LEFT * _CHUNK, tl.exp(last - total) * of_k)
    tl.store(faded + index, tl.exp(last))


@triton.jit  # type: ignore[untyped-decorator]
def _inverse_length(x: tl.tensor) -> tl.tensor:
    wide = x.to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(wide * wide, 1) + _EPS)


@triton.jit  # type: ignore[untyped-decorator]
def _scan_chunks(
    qkv: tl.tensor,
    solved: tl.tensor,
    mixed: tl.tensor,
    factors: tl.tensor,
    faded: tl.tensor,
    states: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    ends: tl.tensor,
    first_chunks: tl.tensor,
    saves: tl.tensor,
    keys: tl.tensor,
    corrections: tl.tensor,
    decays: tl.tensor,
    counts: tl.tensor,
    o: tl.tensor,
    stride: tl.tensor,
    slot_stride: tl.tensor,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    entries: tl.constexpr,
    values: tl.constexpr,
    stages: tl.constexpr,
    precision: tl.constexpr,
) -> None:
    """Compute some values of one value head for one sequence, chunk after chunk; update the state.

    solved, mixed, factors, faded: results of _solve_chunks: T, (qkᵀ D) T, factors of each token,
        and the state's decay over each chunk.
    slots, starts, ends, first_chunks: state slot, first token, end and first chunk of each
        sequence.
    saves: slot to which the state after each chunk is copied; −1: none.
    keys, corrections, decays, counts: tensors of the rings (Ring).
    entries: maximum number of tokens of a ring.
    stages: number of chunks that are loaded at the same time.
    precision: precision of tl.dot for float32 factors.
    All other operands: see _decode_delta_rule.
    """
    head, sequence = tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + sequence).to(tl.int64)
    if slot < 0:
        return
    start = tl.load(starts + sequence).to(tl.int64)
    end = tl.load(ends + sequence)
    first_chunk = tl.load(first_chunks + sequence)
    chunks = tl.load(first_chunks + sequence + 1) - first_chunk
    first_tile = first_chunk.to(tl.int64) * value_heads + head
    place, column = tl.arange(0, _CHUNK), tl.arange(0, key_dim)
    value = tl.program_id(0) * values + tl.arange(0, values)
    places = slot * slot_stride + (head * value_dim + value)[:, None] * key_dim
    state = states + places + column[None, :]
    s = tl.load(state).to(tl.float32)
    if entries > 0:
        s = add_tokens(
            s, keys, corrections, decays, counts, slot, head, value, key_heads, value_heads,
            key_dim, value_dim, entries,
        )  # fmt: skip
        count_at = head * value_dim + value
        tl.debug_barrier()  # as in _decode_with_ring
        empty(counts + slot * value_heads * value_dim + count_at, values)
    queries = qkv + head // (value_heads // key_heads) * key_dim + column[None, :]
    values_at = qkv + 2 * key_heads * key_dim + head * value_dim + value[None, :]
    square = place[:, None] * _CHUNK + place[None, :]
    dtype = qkv.dtype.element_ty
    for chunk in tl.range(0, chunks, num_stages=stages):
        token = start + chunk * _CHUNK + place
        inside = (token < end)[:, None]
        at = token[:, None] * stride
        q = tl.load(queries + at, mask=inside, other=0.0)
        k = tl.load(queries + key_heads * key_dim + at, mask=inside, other=0.0)
        v = tl.load(values_at + at, mask=inside, other=0.0)
        index = first_tile + chunk * value_heads
        tile = index * (_CHUNK * _CHUNK) + square
        factor = factors + index * (_FACTORS * _CHUNK) + place
        predicted = tl.load(factor + _PREDICTED * _CHUNK)[:, None]
        read = tl.load(factor + _READ * _CHUNK)[:, None]
        left = tl.load(factor + _LEFT * _CHUNK)[:, None]
        before = tl.trans(s.to(dtype))  # [key_dim, values]
        known = tl.dot(k, before, input_precision=precision)
        missing = (v.to(tl.float32) - predicted * known).to(dtype)
        out = read * tl.dot(q, before, input_precision=precision)
        out += tl.dot(tl.load(mixed + tile), missing, input_precision=precision)
        correction = tl.dot(tl.load(solved + tile), missing, input_precision=precision)
        added = tl.dot(tl.trans((left * correction).to(dtype)), k, input_precision=precision)
        s = s * tl.load(faded + index) + added
        save = tl.load(saves + first_chunk + chunk).to(tl.int64)
        if save >= 0:
            copy = states + save * slot_stride + (places - slot * slot_stride) + column[None, :]
            tl.store(copy, s.to(states.dtype.element_ty))
            if entries > 0:
                empty(counts + save * value_heads * value_dim + count_at, values)
        row = o + (token[:, None] * value_heads + head) * value_dim
        tl.store(row + value[None, :], out.to(dtype), mask=inside)
    tl.store(state, s.to(states.dtype.element_ty))
