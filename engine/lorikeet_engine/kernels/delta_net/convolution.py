"""Causal convolution with SiLU in Triton: one launch, which also updates the states.

kernels/delta_net/__init__.py defines shapes and dtypes.
"""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels import delta_net
from lorikeet_engine.kernels.delta_net import Decodes, Prefills
from lorikeet_engine.kernels.lora.expand_act import activated
from lorikeet_engine.kernels.lora.types import LoraDelta
from lorikeet_engine.kernels.pointwise.lora_operands import lora_at, operands

_CHUNK = tl.constexpr(delta_net.CHUNK)
_CHANNELS_OF_DECODE = 512  # of one program
_CHANNELS_OF_PREFILL = 64


def decode_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    decodes: Decodes,
    lora: LoraDelta | None = None,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve one token of each sequence, and update its state: see kernels.delta_net."""
    channels = x.shape[1]
    _check(x, states, lora)
    y = x.new_empty(x.shape) if out is None else out
    block = min(_CHANNELS_OF_DECODE, triton.next_power_of_2(channels))
    _decode_convolution[(len(decodes.slots), triton.cdiv(channels, block))](
        x, *operands(lora), weight, bias, states, decodes.slots, decodes.tokens, y, x.stride(0),
        states.stride(0), channels, weight.shape[1], block,
    )  # fmt: skip
    return y


def prefill_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    prefills: Prefills,
    lora: LoraDelta | None = None,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve several tokens of each sequence, and update states: see kernels.delta_net."""
    channels = x.shape[1]
    _check(x, states, lora)
    y = x.new_empty(x.shape) if out is None else out
    block = min(_CHANNELS_OF_PREFILL, triton.next_power_of_2(channels))
    _prefill_convolution[(len(prefills.chunks), triton.cdiv(channels, block))](
        x, *operands(lora), weight, bias, states, prefills.slots, prefills.starts, prefills.ends,
        prefills.chunks, prefills.saves, y, x.stride(0), states.stride(0), channels,
        weight.shape[1], block,
    )  # fmt: skip
    return y


def _check(x: torch.Tensor, states: torch.Tensor, lora: LoraDelta | None) -> None:
    assert x.stride(1) == 1, x.stride()
    assert states.dtype == x.dtype, states.dtype
    assert states[0].is_contiguous(), states.stride()
    assert lora is None or lora.rows.stride() == x.stride(), lora.rows.stride()


@triton.jit  # type: ignore[untyped-decorator]
def _input(
    x: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    token: tl.tensor,
    channel: tl.tensor,
    stride: tl.tensor,
    inside: tl.tensor,
) -> tl.tensor:
    """Load inputs of the convolution, add their LoRA delta, and round the sums to x's dtype.

    x [tokens, channels]: inputs without the delta.
    lora, adapted: LoRA delta of x, and its number of rows; None: no delta.
    token, channel: indices of the inputs. stride: elements of x from token to token.
    inside: mask of the inputs to load; the result is 0 elsewhere. token, channel and inside must
        broadcast to one shape.
    """
    at = token * stride + channel
    value = tl.load(x + at, mask=inside, other=0.0)
    if lora is not None:
        value = value.to(tl.float32) + lora_at(lora, adapted, token, at, inside)
    return value.to(x.dtype.element_ty)


@triton.jit  # type: ignore[untyped-decorator]
def _decode_convolution(
    x: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    states: tl.tensor,
    slots: tl.tensor,
    tokens: tl.tensor,
    y: tl.tensor,
    stride: tl.tensor,
    slot_stride: tl.tensor,
    channels: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Compute the convolution of one sequence's token for a block of channels, and shift the state.

    x, weight, bias: inputs, and the factors and bias of each channel; bias None: no bias.
    states: last inputs of each slot's sequence. y: result.
    slots, tokens: state slot and token of each sequence (Decodes).
    lora, adapted: LoRA delta of x, and its number of rows; None: no delta.
    stride: elements of x from token to token. slot_stride: elements of states from slot to slot.
    width: number of inputs of a sum.
    block: number of channels of a block.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        if tokens is not None:
            row = tl.load(tokens + row).to(tl.int64)
        channel = tl.program_id(1) * block + tl.arange(0, block)
        inside = channel < channels
        state = states + slot * slot_stride + channel
        total = tl.zeros((block,), tl.float32)
        if bias is not None:
            total += tl.load(bias + channel, mask=inside, other=0.0)
        for tap in tl.static_range(width):
            if tap < width - 1:
                value = tl.load(state + tap * channels, mask=inside, other=0.0)
            else:
                value = _input(x, lora, adapted, row, channel, stride, inside)
            if tap > 0:
                tl.store(state + (tap - 1) * channels, value, mask=inside)
            taps = tl.load(weight + channel * width + tap, mask=inside, other=0.0)
            total += taps.to(tl.float32) * value.to(tl.float32)
        out = activated(total, False)
        tl.store(y + row * channels + channel, out.to(y.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _prefill_convolution(
    x: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    states: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    ends: tl.tensor,
    chunks: tl.tensor,
    saves: tl.tensor,
    y: tl.tensor,
    stride: tl.tensor,
    slot_stride: tl.tensor,
    channels: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Compute the convolution of one chunk of a sequence's tokens for a block of channels.

    The program of a sequence's first chunk also replaces the sequence's state by the new one.

    slots, starts, ends: state slot, first token and end of each sequence (Prefills).
    chunks, saves: sequence and first token of each chunk, and slot for a copy of the state after
        it.
    All other operands: see _decode_convolution.
    """
    sequence = tl.load(chunks + 2 * tl.program_id(0))
    if sequence < 0:
        return
    first = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64)
    start = tl.load(starts + sequence).to(tl.int64)
    end = tl.load(ends + sequence).to(tl.int64)
    state = states + tl.load(slots + sequence).to(tl.int64) * slot_stride
    channel = tl.program_id(1) * block + tl.arange(0, block)
    inside = channel < channels
    token = first + tl.arange(0, _CHUNK)
    total = tl.zeros((_CHUNK, block), tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=inside, other=0.0)[None, :]
    for tap in tl.static_range(width):
        value = _input_or_state(
            x, lora, adapted, state, token + (tap - width + 1), start, end, channel, stride,
            channels, width,
        )  # fmt: skip
        taps = tl.load(weight + channel * width + tap, mask=inside, other=0.0)
        total += taps.to(tl.float32)[None, :] * value.to(tl.float32)
    out = activated(total, False).to(y.dtype.element_ty)
    stored = (token < end)[:, None] & inside[None, :]
    tl.store(y + token[:, None] * channels + channel[None, :], out, mask=stored)
    rows: tl.constexpr = triton.next_power_of_2(width - 1)
    row = tl.arange(0, rows)
    kept = (row < width - 1)[:, None] & inside[None, :]
    save = tl.load(saves + tl.program_id(0)).to(tl.int64)
    if save >= 0:
        last = _input_or_state(
            x, lora, adapted, state, first + _CHUNK + (row - width + 1), start, end, channel,
            stride, channels, width,
        )  # fmt: skip
        copy = states + save * slot_stride + row[:, None] * channels + channel[None, :]
        tl.store(copy, last, mask=kept)
    if first == start:
        last = _input_or_state(
            x, lora, adapted, state, end + (row - width + 1), start, end, channel, stride,
            channels, width,
        )  # fmt: skip
        tl.debug_barrier()  # all threads have read the state
        tl.store(state + row[:, None] * channels + channel[None, :], last, mask=kept)


@triton.jit  # type: ignore[untyped-decorator]
def _input_or_state(
    x: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    state: tl.tensor,
    token: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    channel: tl.tensor,
    stride: tl.tensor,
    channels: tl.constexpr,
    width: tl.constexpr,
) -> tl.tensor:
    """Load inputs [tokens, channels]; inputs before the sequence are read from its state.

    state: pointer to the sequence's state.
    token, channel: indices of the inputs.
    start, end: first token of the sequence, and its end; the result is 0 from `end` on.
    width: width of the convolution. All other operands: see _input.
    """
    inside = (channel < channels)[None, :]
    given = ((token >= start) & (token < end))[:, None] & inside
    kept = (token < start)[:, None] & inside
    value = _input(x, lora, adapted, token[:, None], channel[None, :], stride, given)
    place = (token - start + (width - 1))[:, None] * channels + channel[None, :]
    return tl.where(kept, tl.load(state + place, mask=kept, other=0.0), value)
