"""A product with one row, in Triton: a stream of weights that are read once.

On an H200 cuBLAS reads Llama-3.1-8B's weights at 85% of the memory's speed for one token, this
kernel at 95%: 0.45 ms less for a step of 4.8. From two rows on cuBLAS is as good. An MLP's first
product gates what it computes, too.
"""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.lora.expand_act import activated

ROWS = 4  # of the weight, summed by one program
COLUMNS = 2048  # of the weight, read at once
FP8_COLUMNS = 4096  # of FP8, if they divide a row: 3 to 9% faster for rows of 4,096


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """x·Wᵀ + b as `linear` of kernels/lora/linear.py has it, which calls this; x [1, d_in].

    scales [d_out] float32: of the weight's rows, which then are FP8. Sums are float32, rounded
    once.
    """
    y = x.new_empty((1, len(weight)))
    _launch(x, weight, bias, scales, y, gated=False, gelu=False)
    return y


def gemv_act_and_mul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None = None,
    *,
    gelu: bool,
) -> torch.Tensor:
    """act_and_mul (kernels/pointwise) of what gemv gives, [1, d_out / 2], without a launch for it.

    What is gated is rounded to x's dtype before, as between the two.
    """
    y = x.new_empty((1, len(weight) // 2))
    _launch(x, weight, bias, scales, y, gated=True, gelu=gelu)
    return y


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    y: torch.Tensor,
    *,
    gated: bool,
    gelu: bool,
) -> None:
    d_out, d_in = weight.shape
    is_fp8 = scales is not None
    columns = FP8_COLUMNS if is_fp8 and d_in % FP8_COLUMNS == 0 else COLUMNS
    _gemv[(triton.cdiv(d_out, ROWS),)](
        x, weight, bias, scales, y, d_out, d_in, bias is not None, gated, gelu,
        ROWS, min(columns, triton.next_power_of_2(d_in)),
        num_warps=4 if is_fp8 else 8,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _gemv(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    scales: tl.tensor,
    y: tl.tensor,
    d_out: tl.constexpr,
    d_in: tl.constexpr,
    biased: tl.constexpr,
    gated: tl.constexpr,
    gelu: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Compute some of y's elements. gated: each is of a gate's row and the row of what it gates."""
    place = tl.program_id(0) * rows + tl.arange(0, rows)
    real = place < d_out
    row = place
    if gated:
        row = place // 2 + place % 2 * (d_out // 2)
    line = weight + row[:, None].to(tl.int64) * d_in
    total = tl.zeros((rows, block), tl.float32)
    for start in range(0, d_in, block):
        column = start + tl.arange(0, block)
        inside = column < d_in
        # evict_first: the next token's weights will not be found in the cache anyway
        weights = tl.load(
            line + column[None, :],
            mask=real[:, None] & inside[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        values = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
        total += weights.to(tl.float32) * values[None, :]
    out = tl.sum(total, 1)
    if scales is not None:
        out *= tl.load(scales + row, mask=real, other=0.0)
    if biased:
        out += tl.load(bias + row, mask=real, other=0.0).to(tl.float32)
    if gated:
        rounded = out.to(y.dtype.element_ty).to(tl.float32)
        gates, values = tl.split(tl.reshape(rounded, (rows // 2, 2)))
        place = tl.program_id(0) * (rows // 2) + tl.arange(0, rows // 2)
        out, real = activated(gates, gelu) * values, place < d_out // 2
    tl.store(y + place, out.to(y.dtype.element_ty), mask=real)
