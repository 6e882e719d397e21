"""FP8 products of few tokens in Triton: every weight is read once.

These kernels also multiply many tokens if blocks of the weight have scales and cuBLASLt has no
product for them.

A decode step's products are bound by reading their weights. For Llama-3.1-8B and 32 tokens on an
H200, these kernels take 72 µs a layer (3.0 TB/s), and cuBLASLt takes 106 µs. A tensor core's
product has at least 64 rows, while 16 columns are enough: so the weight's outputs are the rows
here, and tokens the columns. If a weight has few outputs, several programs share its columns
(split-K): each writes its partial sums, and the program that ends last adds them up, always in the
same order.

Launch parameters are read from tuning.json, by GPU, weight and number of tokens; on a GPU,
`loadtest/engine/tune_fp8.py` writes that GPU's entry. A weight without an entry is multiplied by
cuBLASLt, unless the tokens are few and blocks of the weight have scales.
"""

import json
from dataclasses import replace
from functools import cache
from math import gcd
from pathlib import Path

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.fp8 import Fp8Rows, kernel_arguments
from lorikeet_engine.kernels.split_k import ProductConfig, arrived, turned

PATH = Path(__file__).with_name("tuning.json")
TOKENS = (16, 32, 64, 128)
"""Limits on the number of tokens of a product; for each limit, a weight has a ProductConfig.

A product uses the smallest limit that is not below its number of tokens.
"""
_BLOCK_TOKENS = 128  # at most, of one program
_TURNED = 16
"""Most tokens of programs that begin with different columns, see split_k.turned."""


UNTUNED = ProductConfig(block_out=64, block_in=128, split=1, warps=4, stages=4)
"""Launch parameters for weights whose blocks have scales, if tuning.json has none."""


def product_config(weight: Fp8Rows, tokens: int, device: torch.device) -> ProductConfig | None:
    """Return the launch parameters for a weight [d_out, d_in]; None if cuBLASLt multiplies by it.

    tokens: number of tokens that the weight is multiplied by.
    """
    if device.type != "cuda":
        return None
    config, most = None, next((count for count in TOKENS if count >= tokens), None)
    if most is not None:
        d_out, d_in = weight.rows.shape
        known = _configs(torch.cuda.get_device_name(device))
        config = known.get((f"{d_out}x{d_in}", str(most)), UNTUNED if weight.block else None)
    if weight.block is None or (config is None and _has_cublas(weight, device)):
        return config
    return _within_blocks(config or UNTUNED, weight.block)


def _within_blocks(config: ProductConfig, block: tuple[int, int]) -> ProductConfig:
    """Return a config whose block_in divides the width of a weight's blocks with scales.

    More stages make up for a smaller block_in, so that as many bytes are in flight.
    """
    columns = gcd(config.block_in, block[1])
    stages = config.stages * config.block_in // columns
    return replace(config, block_in=columns, stages=stages)


def _has_cublas(weight: Fp8Rows, device: torch.device) -> bool:
    """Return whether cuBLASLt can multiply by a weight whose blocks have scales.

    This takes CUDA 12.9, Hopper, blocks of 128 x 128, and whole blocks, four by four in d_in.
    """
    d_out, d_in = weight.rows.shape
    # torch's releases disagree on the strides of scales unless d_in has a multiple of four blocks
    fits = weight.block == (128, 128) and d_out % 128 == 0 and d_in % 512 == 0
    version = tuple(map(int, (torch.version.cuda or "0").split(".")))
    return fits and version >= (12, 9) and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def _configs(gpu: str) -> dict[tuple[str, str], ProductConfig | None]:
    """Read a GPU's launch parameters from tuning.json.

    A key is the shape of a weight, such as "4096x14336", and an element of TOKENS, a number of
    tokens, as text. The value is None if cuBLASLt was faster.
    """
    return {
        (weight, tokens): config and ProductConfig(**config)
        for weight, configs in json.loads(PATH.read_text()).get(gpu, {}).items()
        for tokens, config in configs.items()
    }


def multiply(
    tokens: Fp8Rows,
    weight: Fp8Rows,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    config: ProductConfig,
) -> torch.Tensor:
    """Compute tokens·Wᵀ + b for FP8 tokens and an FP8 weight W.

    tokens [tokens, d_in]: at most 128 if config.split > 1; d_in is a multiple of 16
    weight: W [d_out, d_in]; if its blocks have scales, config.block_in divides their width
    bias: b [d_out]
    → [tokens, d_out] of dtype

    The tensor cores add up a program's sums with about 14 bits of precision (see fused.linear). If
    blocks have scales, each such sum covers only block_in of the d_in columns, and these sums are
    added in float32.
    """
    (count, d_in), d_out, device = tokens.rows.shape, len(weight.rows), tokens.rows.device
    y = torch.empty((count, d_out), dtype=dtype, device=device)
    block_tokens = min(_BLOCK_TOKENS, max(16, triton.next_power_of_2(count)))
    tiles = triton.cdiv(d_out, config.block_out)
    parts = counters = None
    if config.split > 1:
        size = (tiles, config.split, config.block_out, block_tokens)
        parts = torch.empty(size, dtype=torch.float32, device=device)
        counters = arrived(device)
    matrix, scales, high, wide = kernel_arguments(weight)
    # programs that run at the same time read the same weights: token blocks vary fastest
    _multiply[(triton.cdiv(count, block_tokens), tiles, config.split)](
        tokens.rows, tokens.scales, matrix, scales, bias, y, parts, counters,
        count, d_out, d_in,
        d_in % config.block_in == 0,
        device.type == "cpu",  # Triton's interpreter, which multiplies raw bits of FP8
        high, wide, block_tokens <= _TURNED,
        block_tokens, config.block_out, config.block_in, config.split, config.stages,
        num_warps=config.warps,
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _multiply(
    x: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
    w_scales: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    parts: tl.tensor,
    arrived: tl.tensor,
    count: tl.tensor,
    d_out: tl.tensor,
    d_in: tl.tensor,
    even: tl.constexpr,
    upcast: tl.constexpr,
    high: tl.constexpr,
    wide: tl.constexpr,
    turn: tl.constexpr,
    block_tokens: tl.constexpr,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
    split: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    """Compute an output tile, some outputs of some tokens, or its partial sums over some inputs.

    x, x_scales, weight, w_scales: elements and scales of the tokens and of the weight. y: result.
    bias: added to each output; None: no bias.
    parts: partial sums of all programs.
    arrived: counters of finished programs, one for each output tile. Both None without split-K.
    count: number of tokens.
    even: whether d_in is a multiple of block_in.
    upcast: whether to multiply in float32, as Triton's interpreter must.
    high, wide: height and width of the weight's blocks that have scales; wide 0: rows have scales.
    turn: whether programs begin with different columns.
    block_tokens, block_out: size of an output tile.
    block_in: inputs read at once.
    split: programs that share the inputs of an output.
    stages: number of tiles that are loaded at the same time.
    """
    tile, part = tl.program_id(1), tl.program_id(2)
    m, k = tl.arange(0, block_out), tl.arange(0, block_in)
    n = tl.program_id(0) * block_tokens + tl.arange(0, block_tokens)
    row = tile * block_out + m
    steps = tl.cdiv(d_in, block_in)
    # Rows and tokens beyond the last repeat the last; they are not stored.
    w_at = weight + tl.minimum(row, d_out - 1)[:, None].to(tl.int64) * d_in + k[None, :]
    x_at = x + tl.minimum(n, count - 1)[:, None].to(tl.int64) * d_in + k[None, :]
    sums = tl.zeros((block_out, block_tokens), tl.float32)
    begin, end = part * steps // split, (part + 1) * steps // split
    for step in tl.range(begin, end, num_stages=stages):
        column = (turned(step, begin, end, tile) if turn else step) * block_in
        if even:
            # evict_first: the next step's weights will not be found in the cache anyway
            weights = tl.load(w_at + column, eviction_policy="evict_first")
            tokens = tl.load(x_at + column)
        else:
            inside = (column + k < d_in)[None, :]
            weights = tl.load(w_at + column, mask=inside, other=0.0)
            tokens = tl.load(x_at + column, mask=inside, other=0.0)
        if upcast:
            weights, tokens = weights.to(tl.float32), tokens.to(tl.float32)
        if wide:
            block = tl.minimum(row, d_out - 1) // high * tl.cdiv(d_in, wide) + column // wide
            sums += tl.dot(weights, tokens.T) * tl.load(w_scales + block)[:, None]
        else:
            sums = tl.dot(weights, tokens.T, sums)
    if split > 1:
        place = m[:, None] * block_tokens + n[None, :]
        size: tl.constexpr = block_out * block_tokens
        of_tile = parts + tile * split * size + place
        tl.store(of_tile + part * size, sums)
        tl.debug_barrier()  # all of this program's sums are stored before it counts itself done
        if tl.atomic_add(arrived + tile, 1) < split - 1:
            return
        sums = tl.zeros((block_out, block_tokens), tl.float32)
        for other in tl.static_range(split):
            # .cg: from the L2 cache, which holds other programs' sums
            sums += tl.load(of_tile + other * size, cache_modifier=".cg")
        tl.store(arrived + tile, 0)
    real = row < d_out
    out = sums * tl.load(x_scales + n, mask=n < count, other=0.0)[None, :]
    if not wide:
        out *= tl.load(w_scales + row, mask=real, other=0.0)[:, None]
    if bias is not None:
        out += tl.load(bias + row, mask=real, other=0.0).to(tl.float32)[:, None]
    at = n[None, :].to(tl.int64) * d_out + row[:, None]
    mask = real[:, None] & (n < count)[None, :]
    tl.store(y + at, out.to(y.dtype.element_ty), mask=mask)
