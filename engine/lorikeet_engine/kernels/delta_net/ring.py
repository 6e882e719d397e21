"""Decode of the gated delta rule in Triton that keeps the last tokens in a ring.

kernels/delta_net/__init__.py defines the ring and the equations.
"""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels import delta_net
from lorikeet_engine.kernels.delta_net import Decay, Decodes, Heads, Ring
from lorikeet_engine.kernels.delta_net.gates import gates
from lorikeet_engine.kernels.lora.types import LoraDelta
from lorikeet_engine.kernels.pointwise.lora_operands import operands

_EPS = tl.constexpr(delta_net.NORM_EPS)
_VALUES = 32  # of a tile: rows of a state that a program holds at a time
_FEW = 8  # sequences: with fewer, a program has one tile, and more warps, as many SMs have nothing


def decode_with_ring(
    qkv: torch.Tensor,
    ba: torch.Tensor,
    decay: Decay,
    states: torch.Tensor,
    decodes: Decodes,
    heads: Heads,
    lora: LoraDelta | None,
    ring: Ring,
    o: torch.Tensor,
) -> None:
    """Compute kernels.delta_net.decode_delta_rule with a ring, and write the result to o.

    ring: last tokens of each slot, which are not yet added to the slot's state.
    """
    assert all(each.is_contiguous() for each in ring), [each.stride() for each in ring]
    values, entries = min(_VALUES, heads.value_dim), ring.decays.shape[2]
    tiles, sequences = heads.value_dim // values, len(decodes.slots)
    each = 1 if sequences < _FEW else tiles
    _decode_with_ring[(tiles // each, heads.value_heads, sequences)](
        qkv, ba, *operands(lora), decay.a_log, decay.dt_bias, states, decodes.slots,
        decodes.tokens, *ring, o, qkv.stride(0), ba.stride(0), states.stride(0),
        *heads.sizes, entries, values, each,
        num_warps=8 if sequences < _FEW else 4,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def add_tokens(
    s: tl.tensor,
    keys: tl.tensor,
    corrections: tl.tensor,
    decays: tl.tensor,
    counts: tl.tensor,
    slot: tl.tensor,
    head: tl.tensor,
    value: tl.tensor,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    entries: tl.constexpr,
) -> tl.tensor:
    """Return a state s after the tokens in its ring.

    s [values, key_dim] float32: rows `value` of the state of a slot and a value head.
    keys, corrections, decays, counts: tensors of the rings (Ring).
    entries: maximum number of tokens of a ring.
    All other operands: see Heads.
    """
    column, index = tl.arange(0, key_dim), slot * value_heads + head
    count = tl.load(counts + index * value_dim + tl.min(value, 0))
    keys += (slot * key_heads + head // (value_heads // key_heads)) * entries * key_dim + column
    corrections += index * entries * value_dim + value
    for entry in tl.range(0, count.to(tl.int32)):
        k = tl.load(keys + entry * key_dim)
        u = tl.load(corrections + entry * value_dim)
        g = tl.load(decays + index * entries + entry)
        s = s * tl.exp(g) + u[:, None] * k[None, :]
    return s


@triton.jit  # type: ignore[untyped-decorator]
def empty(counts: tl.tensor, values: tl.constexpr) -> None:
    """Set the counts of tokens in a ring to 0, for some values of a head.

    counts: pointers to the counts.
    values: number of the counts.
    """
    tl.store(counts, tl.zeros((values,), tl.int8))


@triton.jit  # type: ignore[untyped-decorator]
def _decode_with_ring(
    qkv: tl.tensor,
    ba: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    states: tl.tensor,
    slots: tl.tensor,
    tokens: tl.tensor,
    keys: tl.tensor,
    corrections: tl.tensor,
    decays: tl.tensor,
    counts: tl.tensor,
    o: tl.tensor,
    stride: tl.tensor,
    ba_stride: tl.tensor,
    slot_stride: tl.tensor,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    entries: tl.constexpr,
    values: tl.constexpr,
    tiles: tl.constexpr,
) -> None:
    """Compute some values of one value head for one sequence's token, and add it to the ring.

    If the ring is full, the token and those of the ring are added to the state instead.

    qkv: queries, keys and values. ba: b and a of each value head, which give β and the decay.
    states: S of each slot (kernels.delta_net.decode_delta_rule). o: result.
    slots, tokens: state slot and token of each sequence (Decodes).
    a_log, dt_bias: weights of the decay (Decay).
    lora, adapted: LoRA delta of ba, and its number of rows; None: no delta.
    keys, corrections, decays, counts: tensors of the rings (Ring).
    entries: maximum number of tokens of a ring.
    stride, ba_stride: elements of qkv and of ba from token to token. slot_stride: elements of
    states from slot to slot.
    values: number of values of a tile. tiles: number of tiles that the program computes, one after
    the other. All other operands: see Heads.
    """
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        if tokens is not None:
            row = tl.load(tokens + row).to(tl.int64)
        group: tl.constexpr = value_heads // key_heads
        first = tl.program_id(0) * (values * tiles)
        value, column = first + tl.arange(0, values), tl.arange(0, key_dim)
        state = states + slot * slot_stride + head * value_dim * key_dim
        state += value[:, None] * key_dim + column[None, :]
        following = tl.load(state).to(tl.float32)

        index = slot * value_heads + head
        count_at = counts + index * value_dim
        count = tl.load(count_at + first).to(tl.int32)
        past_keys = keys + (slot * key_heads + head // group) * entries * key_dim + column
        past_corrections = corrections + index * entries * value_dim
        past_decays = decays + index * entries
        entry, other = tl.arange(0, entries + 1)[:, None], tl.arange(0, entries + 1)[None, :]
        held = entry < count
        k_held = tl.load(past_keys[None, :] + entry * key_dim, mask=held, other=0.0)
        g_held = tl.load(past_decays + other, mask=other < count, other=0.0)

        query = qkv + row * stride + head // group * key_dim + column
        q = tl.load(query).to(tl.float32)
        k = tl.load(query + key_heads * key_dim).to(tl.float32)
        values_at = qkv + row * stride + 2 * key_heads * key_dim + head * value_dim
        q = q / (tl.sqrt(tl.sum(q * q, 0) + _EPS) * (key_dim**0.5))
        k = k / tl.sqrt(tl.sum(k * k, 0) + _EPS)
        g, beta = gates(
            ba, lora, adapted, a_log, dt_bias, row, head, ba_stride, row >= 0, value_heads
        )
        fades = tl.exp(g + tl.sum(tl.where(entry < other, g_held, 0.0), 1))  # of corrections
        faded = tl.exp(g + tl.sum(tl.sum(g_held, 1), 0))  # of the state
        of_k = fades * tl.sum(k_held * k[None, :], 1)
        of_q = fades * tl.sum(k_held * q[None, :], 1)
        similar = tl.sum(k * q, 0)
        after = tl.zeros((values,), tl.int32) + tl.where(count < entries, count + 1, 0)
        tl.debug_barrier()  # no thread of the program writes a count that another has not read
        for _ in tl.range(0, tiles, num_stages=1):
            s = following
            if tiles > 1:
                more = (value + values < first + values * tiles)[:, None]
                following = tl.load(state + values * key_dim, mask=more, other=0.0).to(tl.float32)
            v = tl.load(values_at + value).to(tl.float32)
            u_at = past_corrections + value
            u_held = tl.load(u_at[None, :] + entry * value_dim, mask=held, other=0.0)
            s_k, s_q = tl.sum(s * k[None, :], 1), tl.sum(s * q[None, :], 1)
            u = beta * (v - faded * s_k - tl.sum(u_held * of_k[:, None], 0))
            out = faded * s_q + tl.sum(u_held * of_q[:, None], 0) + u * similar
            out = out.to(o.dtype.element_ty)
            tl.store(o + (row * value_heads + head) * value_dim + value, out)
            if count < entries:
                tl.store(u_at + count * value_dim, u)
            else:
                s = faded * s + u[:, None] * k[None, :]
                since = g
                for i in tl.static_range(entries - 1, -1, -1):
                    k_i = tl.load(past_keys + i * key_dim)
                    u_i = tl.load(u_at + i * value_dim) * tl.exp(since)
                    s += u_i[:, None] * k_i[None, :]
                    since += tl.load(past_decays + i)
                tl.store(state, s.to(states.dtype.element_ty))
            tl.store(count_at + value, after.to(tl.int8))
            value += values
            state += values * key_dim
        if count < entries:
            # all value heads of a key head have the same key
            once = (first == 0) & (head % group == 0)
            tl.store(past_keys + count * key_dim, k, mask=once & (column >= 0))
            tl.store(past_decays + count, g, mask=first == 0)
