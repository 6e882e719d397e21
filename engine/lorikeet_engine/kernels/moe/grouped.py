"""Products of rows sorted by expert, in Triton: each expert's weights are read once.

In a decode an expert has few rows, and the product is bound by reading the weights. A program
multiplies a tile of one expert's rows by some of the expert's outputs, and finds its tile from the
experts' starts. The number of tiles is an upper bound for any routing, so a CUDA graph can hold the
launch.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.routed_rows import RoutedRows

_FIRST_WITH_GROUPED = (9, 0)
# Average rows of an expert from which on torch's grouped product is faster. Its rows have to be
# gathered first. Measured on an H100, µs, torch's against ours: for 2,048 tokens
# 223 against 250 for down, 443 against 357 for gate_up, which is gathered; for 8,192 tokens 407
# against 649, and 904 against 990.
TORCHS_ROWS, TORCHS_GATHERED_ROWS = 64, 256
_TORCHS_SIDES = 8  # 16 bytes: torch refuses other inputs, and pads rows of other outputs


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Launch parameters of a product of experts.

    rows, outputs: size of a program's output tile.
    inputs: columns of the weight read at once.
    warps: number of warps of a program.
    stages: number of tiles that are loaded at the same time.
    """

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


FEW = TileConfig(16, 32, 128, 4, 4)
SOME = TileConfig(32, 64, 128, 4, 3)
MANY = TileConfig(64, 128, 64, 4, 3)
MOST = TileConfig(128, 128, 64, 8, 3)


def is_torchs_better(x: torch.Tensor, weight: torch.Tensor, rows: int, *, gathered: bool) -> bool:
    """Return whether torch's grouped product supports these operands and is faster than `products`.

    weight [experts, d_out, d_in].
    gathered: whether x has a row for each token, instead of one for each token and expert.
    rows: number of rows of all experts.
    """
    least = TORCHS_GATHERED_ROWS if gathered else TORCHS_ROWS
    experts, *sides = weight.shape
    return (
        rows >= least * experts
        and not any(side % _TORCHS_SIDES for side in sides)
        and x.dtype is torch.bfloat16
        and x.is_cuda
        and torch.cuda.get_device_capability(x.device) >= _FIRST_WITH_GROUPED
    )


def tile_config(rows: int, experts: int) -> TileConfig:
    """Choose tiles about as high as the average number of an expert's rows.

    rows: number of rows of all experts.
    """
    average = rows / experts
    if average <= 8:
        return FEW
    return SOME if average <= 32 else MANY if average <= 96 else MOST


def products(
    x: torch.Tensor,
    weight: torch.Tensor,
    routed: RoutedRows,
    config: TileConfig | None = None,
    *,
    gathered: bool = False,
) -> torch.Tensor:
    """Compute each routed row's product with its expert's weight: see kernels.moe.expert_products.

    x [rows, d_in]; if gathered [tokens, d_in], and each row reads x of its token
    config: launch parameters; None: tile_config's
    """
    experts, d_out, d_in = weight.shape
    rows = len(routed.pairs)
    c = config or tile_config(rows, experts)
    tiles = rows // c.rows + min(rows, experts)
    y = x.new_empty((rows, d_out))
    inputs = min(c.inputs, max(16, triton.next_power_of_2(d_in)))
    _products[(tiles, triton.cdiv(d_out, c.outputs))](
        x, weight, routed.pairs, routed.starts, y, experts, d_out, d_in, routed.per_token, gathered,
        triton.next_power_of_2(experts), c.rows, c.outputs, inputs,
        num_warps=c.warps, num_stages=c.stages,
    )  # fmt: skip
    return y


@triton.jit  # type: ignore[untyped-decorator]
def _products(
    x: tl.tensor,
    weight: tl.tensor,
    pairs: tl.tensor,
    starts: tl.tensor,
    y: tl.tensor,
    experts: tl.constexpr,
    d_out: tl.constexpr,
    d_in: tl.constexpr,
    per_token: tl.constexpr,
    gathered: tl.constexpr,
    expert_block: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    block_inputs: tl.constexpr,
) -> None:
    """Compute one tile of expert products: some outputs of some rows of one expert.

    Programs beyond the last tile do nothing.

    x, weight: inputs, and weights of all experts. y: result.
    gathered: whether x has a row for each token, instead of one for each token and expert.
    pairs, starts: pair of token and expert of each row, and first row of each expert.
    per_token: experts of a token.
    expert_block: `experts` rounded up to a power of two.
    block_rows, block_outputs: size of an output tile.
    block_inputs: inputs read at once.
    """
    expert, first_row, end = tile_at(tl.program_id(0), starts, experts, expert_block, block_rows)
    if expert >= experts:
        return
    row = first_row + tl.arange(0, block_rows)
    real = row < end
    token = row
    if gathered:
        token = tl.load(pairs + row, mask=real, other=0) // per_token
    output = tl.program_id(1) * block_outputs + tl.arange(0, block_outputs)
    held = output < d_out
    element = tl.arange(0, block_inputs)
    at_x = x + token[:, None].to(tl.int64) * d_in + element[None, :]
    line = expert.to(tl.int64) * d_out + output
    at_weight = weight + line[None, :] * d_in + element[:, None]
    total = tl.zeros((block_rows, block_outputs), tl.float32)
    for first in range(0, d_in, block_inputs):
        inside = first + element < d_in
        values = tl.load(at_x + first, mask=real[:, None] & inside[None, :], other=0.0)
        weights = tl.load(at_weight + first, mask=held[None, :] & inside[:, None], other=0.0)
        total = tl.dot(values, weights, total, input_precision="ieee")
    at_y = y + row[:, None].to(tl.int64) * d_out + output[None, :]
    tl.store(at_y, total.to(y.dtype.element_ty), mask=real[:, None] & held[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def tile_at(
    tile: tl.tensor,
    starts: tl.tensor,
    experts: tl.constexpr,
    expert_block: tl.constexpr,
    block_rows: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return a tile's expert, its first row, and the end of that expert's rows.

    The returned expert is `experts` or more if `tile` is past the last tile with rows.

    tile: index of the tile.
    starts: first row of each expert (RoutedRows.starts).
    block_rows: rows of a tile.
    expert_block: `experts` rounded up to a power of two.
    """
    each = tl.arange(0, expert_block)
    begins = tl.load(starts + each, mask=each < experts, other=0)
    ends = tl.load(starts + each + 1, mask=each < experts, other=0)
    tiles = (ends - begins + block_rows - 1) // block_rows
    past = tl.cumsum(tiles, 0)
    expert = tl.sum((past <= tile).to(tl.int32), 0)
    mine = each == expert
    ahead = tile - tl.sum(tl.where(mine, past - tiles, 0), 0)
    begin, end = tl.sum(tl.where(mine, begins, 0), 0), tl.sum(tl.where(mine, ends, 0), 0)
    return expert, begin + ahead * block_rows, end
