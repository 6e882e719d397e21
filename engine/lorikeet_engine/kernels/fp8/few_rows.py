"""FP8 products of few tokens, in Triton: a stream of weights, each of which is read once.

A decode step's products wait for weights alone. All blocks of a weight, tile after tile of outputs
and along d_in in each, are one line, of which every program takes an equal part, so no
multiprocessor is left without work however few tiles there are. Where programs share a tile, each
writes its sums apart, and the one that ends last adds them in the order of the programs: which it
is differs from run to run, what it adds does not.

Weights are the rows of the tensor cores' products, of which these have at least 64; tokens are the
columns, of which 16 are enough.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from lorikeet_engine.kernels.early_launch import can_launch_early, launch_options, prefetch, wait
from lorikeet_engine.kernels.fp8 import Fp8Rows
from lorikeet_engine.kernels.fp8.tuning import ProductConfig

MOST_TILES = 1 << 14  # of a weight: a million outputs


def multiply_few(
    tokens: Fp8Rows,
    weight: Fp8Rows,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    config: ProductConfig,
) -> torch.Tensor:
    """tokens·Wᵀ + b of up to 256 tokens → [tokens, d_out] of dtype; d_in is a multiple of 16."""
    (count, d_in), d_out, device = tokens.rows.shape, len(weight.rows), tokens.rows.device
    y = torch.empty((count, d_out), dtype=dtype, device=device)
    block_tokens = max(16, triton.next_power_of_2(count))
    tiles, steps = triton.cdiv(d_out, config.block_out), triton.cdiv(d_in, config.block_in)
    programs = min(_without_lora(config.programs, device), tiles * steps)
    parts = arrived = None
    if tiles % programs:  # some tiles are shared
        size = (programs, 2, config.block_out, block_tokens)
        parts = torch.empty(size, dtype=torch.float32, device=device)
        arrived = _counters(device)
    x_rows, w_rows = tokens.rows, weight.rows
    if config.tma:
        x_rows = TensorDescriptor.from_tensor(x_rows, [block_tokens, config.block_in])
        w_rows = TensorDescriptor.from_tensor(w_rows, [config.block_out, config.block_in])
    _multiply_few[(programs,)](
        x_rows, tokens.scales, w_rows, weight.rows, weight.scales, bias, y, parts, arrived,
        count, d_out, d_in, tiles, steps,
        config.tma,
        d_in % config.block_in == 0,
        device.type == "cpu",  # Triton's interpreter, which multiplies raw bits of FP8
        block_tokens, config.block_out, config.block_in, config.stages,
        num_warps=config.warps,
        num_stages=config.stages,
        **launch_options(can_launch_early(device)),
    )  # fmt: skip
    return y


def _without_lora(programs: int, device: torch.device) -> int:
    """How many programs run where LoRA is to have some multiprocessors (kernels/lora/linear.py)."""
    for_lora = torch._C._get_sm_carveout_experimental()
    if not for_lora:
        return programs
    total = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, programs * (total - for_lora) // total)


@cache
def _counters(device: torch.device) -> torch.Tensor:
    """How many parts of each tile are there: zero between products, who adds them sees to it."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["count", "tiles", "steps"])  # type: ignore[untyped-decorator]
def _multiply_few(
    x: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
    w_start: tl.tensor,
    w_scales: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    parts: tl.tensor,
    arrived: tl.tensor,
    count: tl.tensor,
    d_out: tl.tensor,
    d_in: tl.tensor,
    tiles: tl.tensor,
    steps: tl.tensor,
    tma: tl.constexpr,
    even: tl.constexpr,
    upcast: tl.constexpr,
    block_tokens: tl.constexpr,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
    stages: tl.constexpr,
    early: tl.constexpr,
) -> None:
    """Compute one program's part of the line: ends of tiles, and whole tiles between them."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    total = tiles * steps
    at = program * total // programs
    end = (program + 1) * total // programs
    m, n = tl.arange(0, block_out), tl.arange(0, block_tokens)
    k = tl.arange(0, block_in)
    places = m[:, None] * block_tokens + n[None, :]
    if early:
        lines = tl.arange(0, block_in // 128) * 128
        at_row = tl.minimum(at // steps * block_out + m, d_out - 1)[:, None].to(tl.int64) * d_in
        for ahead in tl.static_range(stages):
            line = tl.minimum((at % steps + ahead) * block_in + lines, d_in - 1)
            prefetch(w_start + at_row + line[None, :])
    wait(early)
    while at < end:
        tile, first = at // steps, at % steps
        last = tl.minimum(steps, first + end - at)
        at += last - first
        row = tile * block_out + m
        if not tma:
            w_at = w_start + tl.minimum(row, d_out - 1)[:, None].to(tl.int64) * d_in + k[None, :]
            x_at = x + tl.minimum(n, count - 1)[:, None] * d_in + k[None, :]
        sums = tl.zeros((block_out, block_tokens), tl.float32)
        for step in tl.range(first, last, num_stages=stages):
            column = step * block_in
            if tma:
                w_block = weight.load([tile * block_out, column])
                x_block = x.load([0, column])
            elif even:
                w_block = tl.load(w_at + column, eviction_policy="evict_first")
                x_block = tl.load(x_at + column)
            else:
                inside = (column + k < d_in)[None, :]
                w_block = tl.load(w_at + column, mask=inside, other=0.0)
                x_block = tl.load(x_at + column, mask=inside, other=0.0)
            if upcast:
                sums += tl.dot(w_block.to(tl.float32), x_block.to(tl.float32).T)
            else:
                sums = tl.dot(w_block, x_block.T, sums)
        whole = last - first == steps
        if parts is not None and not whole:
            own = parts + (program * 2 + (first == 0)) * (block_out * block_tokens)
            tl.store(own + places, sums)
            tl.debug_barrier()  # all threads' sums lie there before one of them says so
            lowest = ((tile * steps + 1) * programs - 1) // total
            highest = ((tile + 1) * steps * programs - 1) // total
            whole = tl.atomic_add(arrived + tile, 1) == highest - lowest
            if whole:
                sums = tl.zeros((block_out, block_tokens), tl.float32)
                for other in range(lowest, highest + 1):
                    theirs = parts + (other * 2 + (other == lowest)) * (block_out * block_tokens)
                    # .cg: from the L2 cache, which is where other programs' sums are
                    sums += tl.load(theirs + places, cache_modifier=".cg")
                tl.store(arrived + tile, 0)
        if whole:
            real = row < d_out
            out = sums * tl.load(w_scales + row, mask=real, other=0.0)[:, None]
            out *= tl.load(x_scales + n, mask=n < count, other=0.0)[None, :]
            if bias is not None:
                out += tl.load(bias + row, mask=real, other=0.0).to(tl.float32)[:, None]
            mask = real[:, None] & (n < count)[None, :]
            tl.store(y + n[None, :] * d_out + row[:, None], out.to(y.dtype.element_ty), mask=mask)
