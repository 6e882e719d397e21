"""Mamba 2's scan in Triton: one launch for decodes, one for prefills.

kernels/mamba/__init__.py defines shapes and dtypes.

A prefill passes each state through the chunks of its sequence. With γ the sum of g since the
chunk's start, S the state before the chunk, and D[i, j] = exp(γ[i] − γ[j]) · δ[j] for j ≤ i, else
0:
    y = exp(γ) C Sᵀ + (C Bᵀ D) x + d x
    S = exp(γ[last]) S + (exp(γ[last] − γ) δ x)ᵀ B
"""

from math import gcd

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels import delta_net
from lorikeet_engine.kernels.delta_net import Decodes, Heads, Prefills, Ring
from lorikeet_engine.kernels.delta_net.checked_output import checked_output
from lorikeet_engine.kernels.delta_net.gates import softplus
from lorikeet_engine.kernels.delta_net.ring import add_tokens, empty
from lorikeet_engine.kernels.lora.types import LoraDelta
from lorikeet_engine.kernels.mamba import Scan, fits_gpu
from lorikeet_engine.kernels.pointwise.lora_operands import lora_at, operands

_CHUNK = tl.constexpr(delta_net.CHUNK)
_VALUES = 32  # of one program of a prefill, which has these rows of a state
_DECODED = 64  # of one program of a decode
_NO_RING = (None,) * 4


def decode_scan(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    scan: Scan,
    states: torch.Tensor,
    decodes: Decodes,
    heads: Heads,
    lora: LoraDelta | None = None,
    out: torch.Tensor | None = None,
    ring: Ring | None = None,
) -> torch.Tensor:
    """Compute the scan of one token of each sequence, and update its state: see kernels.mamba."""
    assert fits_gpu(heads), heads
    y = checked_output(xbc, dt, states, heads, lora, out)
    values, entries = gcd(_DECODED, heads.value_dim), 0 if ring is None else ring.decays.shape[2]
    _decode_scan[(heads.value_dim // values, heads.value_heads, len(decodes.slots))](
        xbc, dt, *operands(lora), scan.a_log, scan.dt_bias, scan.d, states, decodes.slots,
        decodes.tokens, *(ring or _NO_RING), y, *scan.time_limits, xbc.stride(0), dt.stride(0),
        states.stride(0), *heads.sizes, entries, values,
    )  # fmt: skip
    return y


def prefill_scan(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    scan: Scan,
    states: torch.Tensor,
    prefills: Prefills,
    heads: Heads,
    lora: LoraDelta | None = None,
    out: torch.Tensor | None = None,
    ring: Ring | None = None,
) -> torch.Tensor:
    """Compute the scan of several tokens of each sequence, and update states: see kernels.mamba."""
    assert fits_gpu(heads), heads
    y = checked_output(xbc, dt, states, heads, lora, out)
    values, entries = gcd(_VALUES, heads.value_dim), 0 if ring is None else ring.decays.shape[2]
    wide = xbc.dtype == torch.float32
    _prefill_scan[(heads.value_dim // values, heads.value_heads, len(prefills.slots))](
        xbc, dt, *operands(lora), scan.a_log, scan.dt_bias, scan.d, states, prefills.slots,
        prefills.starts, prefills.ends, prefills.first_chunks, prefills.saves,
        *(ring or _NO_RING), y, *scan.time_limits, xbc.stride(0), dt.stride(0), states.stride(0),
        *heads.sizes, entries, values, 1 if wide else 2, "tf32x3" if wide else "tf32",
    )  # fmt: skip
    return y


@triton.jit  # type: ignore[untyped-decorator]
def _steps(
    dt: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    token: tl.tensor,
    head: tl.tensor,
    stride: tl.tensor,
    inside: tl.tensor,
    least: tl.tensor,
    most: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Compute time steps δ, and logarithms of decays g, of one head for some tokens.

    dt [tokens, heads]: time steps before the LoRA delta, dt_bias and softplus.
    a_log, dt_bias: weights of each head (Scan).
    least, most: limits of δ.
    lora, adapted: LoRA delta of dt, and its number of rows; None: no delta.
    token, head: indices of the tokens and of the head. stride: elements of dt from token to token.
    inside: mask of the tokens that exist; the results are 0 elsewhere.
    """
    at = token * stride + head
    a = tl.load(dt + at, mask=inside, other=0.0).to(tl.float32)
    if lora is not None:
        a += lora_at(lora, adapted, token, at, inside)
    step = softplus(a + tl.load(dt_bias + head).to(tl.float32))
    step = tl.where(inside, tl.minimum(tl.maximum(step, least), most), 0.0)
    return step, -tl.exp(tl.load(a_log + head).to(tl.float32)) * step


@triton.jit  # type: ignore[untyped-decorator]
def _decode_scan(
    xbc: tl.tensor,
    dt: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    d: tl.tensor,
    states: tl.tensor,
    slots: tl.tensor,
    tokens: tl.tensor,
    keys: tl.tensor,
    corrections: tl.tensor,
    decays: tl.tensor,
    counts: tl.tensor,
    y: tl.tensor,
    least: tl.tensor,
    most: tl.tensor,
    stride: tl.tensor,
    dt_stride: tl.tensor,
    slot_stride: tl.tensor,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    entries: tl.constexpr,
    values: tl.constexpr,
) -> None:
    """Compute some values of one head for one sequence's token; update their state or the ring.

    xbc: x, B and C of each token. dt: time steps before dt_bias and softplus. y: result.
    states: S of each slot (kernels.mamba.decode_scan).
    a_log, dt_bias, d: weights of each head (Scan).
    least, most: limits of the time step δ.
    slots, tokens: state slot and token of each sequence (Decodes).
    lora, adapted: LoRA delta of dt, and its number of rows; None: no delta.
    keys, corrections, decays, counts: B, δ x and g of the tokens in the rings, and number of these
        tokens (Ring).
    stride, dt_stride: elements of xbc and of dt from token to token. slot_stride: elements of
        states from slot to slot.
    entries: maximum number of tokens of a ring; 0: there is no ring.
    values: number of values that the program computes. All other operands: see Heads.
    """
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        if tokens is not None:
            row = tl.load(tokens + row).to(tl.int64)
        group: tl.constexpr = value_heads // key_heads
        first = tl.program_id(0) * values
        column, value = tl.arange(0, key_dim), first + tl.arange(0, values)
        state = states + slot * slot_stride + (head * value_dim + value)[:, None] * key_dim
        state += column[None, :]
        s = tl.load(state).to(tl.float32)
        step, g = _steps(
            dt, lora, adapted, a_log, dt_bias, row, head, dt_stride, row >= 0, least, most
        )
        x = tl.load(xbc + row * stride + head * value_dim + value).to(tl.float32)
        of_group = xbc + row * stride + value_heads * value_dim + head // group * key_dim + column
        b = tl.load(of_group).to(tl.float32)
        c = tl.load(of_group + key_heads * key_dim).to(tl.float32)
        u = step * x
        skipped = tl.load(d + head) * x
        if entries == 0:
            s = tl.exp(g) * s + u[:, None] * b[None, :]
            tl.store(state, s.to(states.dtype.element_ty))
            out = tl.sum(s * c[None, :], 1)
        else:
            index = slot * value_heads + head
            count_at = counts + index * value_dim + value
            count = tl.load(counts + index * value_dim + first).to(tl.int32)
            past_keys = keys + (slot * key_heads + head // group) * entries * key_dim + column
            past_values = corrections + index * entries * value_dim + value
            past_decays = decays + index * entries
            entry, other = tl.arange(0, entries + 1)[:, None], tl.arange(0, entries + 1)[None, :]
            held = entry < count
            b_held = tl.load(past_keys[None, :] + entry * key_dim, mask=held, other=0.0)
            u_held = tl.load(past_values[None, :] + entry * value_dim, mask=held, other=0.0)
            g_held = tl.load(past_decays + other, mask=other < count, other=0.0)
            fades = tl.exp(g + tl.sum(tl.where(entry < other, g_held, 0.0), 1))  # of past values
            faded = tl.exp(g + tl.sum(tl.sum(g_held, 1), 0))  # of the state
            of_c = fades * tl.sum(b_held * c[None, :], 1)
            out = faded * tl.sum(s * c[None, :], 1) + tl.sum(u_held * of_c[:, None], 0)
            out += u * tl.sum(b * c, 0)
            tl.debug_barrier()  # no thread writes a count that another has not read
            if count < entries:
                tl.store(past_values + count * value_dim, u)
                # all heads of a group have the same B
                once = (first == 0) & (head % group == 0)
                tl.store(past_keys + count * key_dim, b, mask=once & (column >= 0))
                tl.store(past_decays + count, g, mask=first == 0)
            else:
                s = faded * s + u[:, None] * b[None, :]
                since = g
                for i in tl.static_range(entries - 1, -1, -1):
                    u_i = tl.load(past_values + i * value_dim) * tl.exp(since)
                    s += u_i[:, None] * tl.load(past_keys + i * key_dim)[None, :]
                    since += tl.load(past_decays + i)
                tl.store(state, s.to(states.dtype.element_ty))
            after = tl.zeros((values,), tl.int32) + tl.where(count < entries, count + 1, 0)
            tl.store(count_at, after.to(tl.int8))
        out = (out + skipped).to(y.dtype.element_ty)
        tl.store(y + (row * value_heads + head) * value_dim + value, out)


@triton.jit  # type: ignore[untyped-decorator]
def _prefill_scan(
    xbc: tl.tensor,
    dt: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    d: tl.tensor,
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
    y: tl.tensor,
    least: tl.tensor,
    most: tl.tensor,
    stride: tl.tensor,
    dt_stride: tl.tensor,
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
    """Compute some values of one head for one sequence, chunk after chunk; update the state.

    slots, starts, ends, first_chunks: state slot, first token, end and first chunk of each
        sequence.
    saves: slot to which the state after each chunk is copied; −1: none.
    stages: number of chunks that are loaded at the same time.
    precision: precision of tl.dot for float32 factors. All other operands: see _decode_scan.
    """
    head, sequence = tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + sequence).to(tl.int64)
    if slot < 0:
        return
    start = tl.load(starts + sequence).to(tl.int64)
    end = tl.load(ends + sequence)
    first_chunk = tl.load(first_chunks + sequence)
    chunks = tl.load(first_chunks + sequence + 1) - first_chunk
    place, column = tl.arange(0, _CHUNK), tl.arange(0, key_dim)
    value = tl.program_id(0) * values + tl.arange(0, values)
    of_head = (head * value_dim + value)[:, None] * key_dim + column[None, :]
    state = states + slot * slot_stride + of_head
    s = tl.load(state).to(tl.float32)
    if entries > 0:
        s = add_tokens(
            s, keys, corrections, decays, counts, slot, head, value, key_heads, value_heads,
            key_dim, value_dim, entries,
        )  # fmt: skip
        count_at = head * value_dim + value
        tl.debug_barrier()  # no thread writes a count that another has not read
        empty(counts + slot * value_heads * value_dim + count_at, values)
    group: tl.constexpr = value_heads // key_heads
    of_group = xbc + value_heads * value_dim + head // group * key_dim + column[None, :]
    values_at = xbc + head * value_dim + value[None, :]
    row, other = place[:, None], place[None, :]
    skip = tl.load(d + head)
    dtype = xbc.dtype.element_ty
    for chunk in tl.range(0, chunks, num_stages=stages):
        token = start + chunk * _CHUNK + place
        inside = token < end
        at = token[:, None] * stride
        b = tl.load(of_group + at, mask=inside[:, None], other=0.0)
        c = tl.load(of_group + key_heads * key_dim + at, mask=inside[:, None], other=0.0)
        x = tl.load(values_at + at, mask=inside[:, None], other=0.0)
        step, g = _steps(
            dt, lora, adapted, a_log, dt_bias, token, head, dt_stride, inside, least, most
        )
        total = tl.cumsum(g, 0)
        since = tl.where(row >= other, total[:, None] - total[None, :], float("-inf"))
        scores = tl.dot(c, tl.trans(b), input_precision=precision) * tl.exp(since) * step[None, :]
        out = tl.dot(scores.to(dtype), x, input_precision=precision)
        before = tl.trans(s.to(dtype))  # [key_dim, values]
        out += tl.exp(total)[:, None] * tl.dot(c, before, input_precision=precision)
        out += skip * x.to(tl.float32)
        last = tl.min(total, 0)  # the last of total: g is never above 0
        left = ((tl.exp(last - total) * step)[:, None] * x.to(tl.float32)).to(dtype)
        s = s * tl.exp(last) + tl.dot(tl.trans(left), b, input_precision=precision)
        save = tl.load(saves + first_chunk + chunk).to(tl.int64)
        if save >= 0:
            tl.store(states + save * slot_stride + of_head, s.to(states.dtype.element_ty))
            if entries > 0:
                empty(counts + save * value_heads * value_dim + count_at, values)
        rows = y + (token[:, None] * value_heads + head) * value_dim + value[None, :]
        tl.store(rows, out.to(dtype), mask=inside[:, None])
    tl.store(state, s.to(states.dtype.element_ty))
