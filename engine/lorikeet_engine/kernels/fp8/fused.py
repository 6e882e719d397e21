"""Linear layers with FP8 weights on CUDA.

One launch rounds the tokens, then our kernel or cuBLASLt multiplies.
"""

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from lorikeet_engine.errors import ShapeError
from lorikeet_engine.kernels.fp8 import DTYPE, LARGEST, LEAST_SCALE, Fp8Rows, few_tokens
from lorikeet_engine.kernels.gemv import gemv


def linear(
    x: torch.Tensor,
    weight: Fp8Rows,
    bias: torch.Tensor | None = None,
    rounded: Fp8Rows | None = None,
) -> torch.Tensor:
    """Compute x·Wᵀ + b, with each token of x rounded to FP8 first unless it is the only one.

    rounded: x rounded to FP8, if it has been computed before; None: it is computed here. Both
    dimensions of the weight must be multiples of 16. See kernels.fp8.linear.

    Sums stay in the tensor cores, with some 14 bits (use_fast_accum): the DeepSeek-V3 report,
    §3.3.2, found errors up to 2% in sums of 4,096 products. If blocks of the weight have scales,
    only the sums over one block's columns stay in the tensor cores.
    """
    if len(x) == 1:
        return gemv(x, weight, bias)
    tokens = rounded or quantize_rows(x)
    config = few_tokens.product_config(weight, len(x), x.device)
    if config is not None:
        return few_tokens.multiply(tokens, weight, bias, x.dtype, config)
    return multiply(tokens, weight, bias, x.dtype)


def multiply(
    tokens: Fp8Rows, weight: Fp8Rows, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Compute tokens·Wᵀ + b by cuBLASLt, for FP8 tokens and an FP8 weight W.

    tokens [tokens, d_in]
    weight: W [d_out, d_in]
    bias: b [d_out]; None: no bias
    → [tokens, d_out] of dtype
    """
    y: torch.Tensor
    if weight.block is None:
        y = torch._scaled_mm(
            tokens.rows,
            weight.rows.t(),
            scale_a=tokens.scales[:, None],
            scale_b=weight.scales[None, :],
            out_dtype=dtype,
            use_fast_accum=True,
        )
    else:
        y = _multiply_blocks(tokens, weight, dtype)
    # The bias is added apart: cuBLASLt has no product with bias for some shapes (4,096 x 14,336).
    return y if bias is None else y.add_(bias)


def _multiply_blocks(tokens: Fp8Rows, weight: Fp8Rows, dtype: torch.dtype) -> torch.Tensor:
    """Compute tokens·Wᵀ by cuBLASLt for a weight W that has a scale for each block of 128 x 128.

    cuBLASLt also requires a scale for each block of a token; a token's single scale is repeated.
    Tokens are padded with rows of zeros to a multiple of 16.
    """
    count, missing = len(tokens.rows), -len(tokens.rows) % 16
    rows, scales = tokens.rows, tokens.scales
    if missing:
        rows = F.pad(rows.view(torch.uint8), (0, 0, 0, missing)).view(DTYPE)
        scales = F.pad(scales, (0, missing))
    y: torch.Tensor = torch._scaled_mm(
        rows,
        weight.rows.t(),
        scale_a=scales.expand(weight.scales.shape[1], -1).contiguous().t(),  # [tokens, blocks]
        scale_b=weight.scales.t(),
        out_dtype=dtype,
    )
    return y[:count]


def quantize_rows(x: torch.Tensor) -> Fp8Rows:
    """Round x [rows, width] to FP8 in one launch, with a scale for each row.

    A row's largest element becomes the largest FP8 number. Raises ShapeError if a row of x is not
    contiguous.
    """
    if x.dim() != 2 or x.stride(1) != 1:
        raise ShapeError(f"x is {tuple(x.shape)} with strides {x.stride()}: want dense rows")
    rows, width = x.shape
    out = empty_rows(x)
    block = triton.next_power_of_2(width)
    _quantize_rows[(rows,)](
        x, out.rows, out.scales, x.stride(0), width, block, LARGEST, LEAST_SCALE,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return out


def empty_rows(x: torch.Tensor) -> Fp8Rows:
    """Allocate the FP8 rows and scales to which x [rows, width] can be rounded."""
    return Fp8Rows(
        torch.empty(x.shape, dtype=DTYPE, device=x.device),
        torch.empty(len(x), dtype=torch.float32, device=x.device),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _quantize_rows(
    x: tl.tensor,
    y: tl.tensor,
    scales: tl.tensor,
    stride: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
    largest: tl.constexpr,
    least_scale: tl.constexpr,
) -> None:
    """Round one row of x to FP8, and store it in y and its scale in `scales`.

    stride: elements of x from row to row. block: `width` rounded up to a power of two.
    largest, least_scale: largest FP8 number, and lower bound of a row's scale.
    """
    columns = tl.arange(0, block)
    inside = columns < width
    row = tl.program_id(0).to(tl.int64)
    values = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    store_rounded(values, inside, columns, row, y, scales, width, largest, least_scale)


@triton.jit  # type: ignore[untyped-decorator]
def store_rounded(
    values: tl.tensor,
    inside: tl.tensor,
    columns: tl.tensor,
    row: tl.tensor,
    y: tl.tensor,
    scales: tl.tensor,
    width: tl.constexpr,
    largest: tl.constexpr,
    least_scale: tl.constexpr,
) -> None:
    """Round a float32 row to FP8, and store it with its scale.

    values: the row, 0 beyond its width.
    inside: mask of the columns that the row has.
    columns: indices of the columns. row: index of the row.
    y, scales: pointers to the stored rows and scales.
    largest: largest FP8 number, to which a row's largest element is scaled.
    least_scale: lower bound of the scale, for rows of zeros.
    """
    scale = scale_of(tl.abs(values), largest, least_scale)
    tl.store(y + row * width + columns, divided(values, scale, y.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit  # type: ignore[untyped-decorator]
def scale_of(sizes: tl.tensor, largest: tl.constexpr, least_scale: tl.constexpr) -> tl.tensor:
    """Return the FP8 scale of a row.

    Multiplies by 1 / largest, as torch does to divide by a constant.

    sizes: absolute values that include the row's largest.
    largest: largest FP8 number.
    least_scale: lower bound of the scale, for rows of zeros.
    """
    return tl.maximum(tl.max(sizes, 0) * (1.0 / largest), least_scale)


@triton.jit  # type: ignore[untyped-decorator]
def divided(values: tl.tensor, scale: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return values / scale rounded to FP8, by IEEE division as in torch."""
    return tl.div_rn(values, tl.zeros_like(values) + scale).to(dtype)
