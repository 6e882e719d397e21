"""One token's products: how fast each way to launch them reads the weight, on this GPU.

python -m engine.benchmarks.tune_gemv --json gemv.json [--config llama-3.1-8b]
    [--weight-dtype fp8] [--linears qkv o gate_up down lm_head]

For each linear every GemvConfig of kernels/gemv.py that is worth trying, the taken one first; a
result is checked before it is timed. A norm stands before each product, as in a decode step, and
its own time is taken off. Copies of a weight take turns in a graph, more than the GPU's cache
holds. lm_head is of floats, whatever the others are. Where another config is faster, it belongs
into gemv_config. Takes about a minute; many processes compile at first.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch

from engine.benchmarks import harness
from engine.benchmarks.gpu_time import medians_ms
from engine.benchmarks.random_model import CONFIGS
from engine.benchmarks.tune_fp8 import shapes
from lorikeet_engine.kernels.fp8 import DTYPE, Fp8Rows, fused
from lorikeet_engine.kernels.gemv import GemvConfig, gemv, gemv_act_and_mul, gemv_config
from lorikeet_engine.kernels.pointwise import add_rms_norm
from lorikeet_engine.kernels.pointwise.reference import act_and_mul

_BYTES = 1 << 28  # of all copies of a weight, if one has fewer
_PRODUCTS = 16  # of a graph, at least
_SHARED = 200 << 10  # bytes of a multiprocessor's that its programs' reads under way may take
_MULTIPROCESSORS = 132
_PROCESSES = 14
_TIMES = 5
_NEAR = 0.01


@dataclass(frozen=True, slots=True)
class Shape:
    """A linear's weight [d_out, d_in], in FP8 or bfloat16; gated: an MLP's first."""

    linear: str
    d_out: int
    d_in: int
    is_fp8: bool

    @property
    def gated(self) -> bool:
        """Whether the product gates what it computes."""
        return self.linear == "gate_up"

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 1 if self.is_fp8 else 2

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return self.d_out * self.d_in * self.itemsize


@dataclass(frozen=True, slots=True)
class Row:
    """What a config adds to a step, and at which speed that reads the weight; None: it is wrong."""

    linear: str
    d_out: int
    d_in: int
    us: float | None
    tb_s: float | None
    config: GemvConfig


class Products:
    """Copies of a weight, and a token to multiply by them."""

    def __init__(self, shape: Shape) -> None:
        """Draw them."""
        self._gated = shape.gated
        random = torch.Generator("cuda").manual_seed(0)
        size = (shape.d_out, shape.d_in)
        like = {"device": "cuda", "dtype": torch.bfloat16}
        weight = torch.randn(size, generator=random, **like).mul_(shape.d_in**-0.5)
        rounded = fused.quantize_rows(weight) if shape.is_fp8 else None
        floats = weight.float() if rounded is None else rounded.floats()
        copies = range(-(-_BYTES // shape.nbytes))
        self._weights: list[torch.Tensor | Fp8Rows] = (
            [weight.clone() for _ in copies]
            if rounded is None
            else [Fp8Rows(rounded.rows.clone(), rounded.scales) for _ in copies]
        )
        self._x = torch.randn(1, shape.d_in, generator=random, **like)
        self._zeros, self._ones = torch.zeros_like(self._x), torch.ones(shape.d_in, **like)
        y = self._norm().float() @ floats.T
        self._want = act_and_mul(y) if self._gated else y
        self._norms_us = self._us(lambda _: self._norm())

    def us(self, config: GemvConfig) -> float | None:
        """What a config's product takes behind a norm; None if it computes something else."""
        got = self._multiply(self._weights[0], config).float()
        off = ((got - self._want).norm() / self._want.norm()).item()
        if not off < _NEAR:
            print(f"{config}: off by {off:.3g}", flush=True)
            return None
        return self._us(lambda weight: self._multiply(weight, config)) - self._norms_us

    def _norm(self) -> torch.Tensor:
        return add_rms_norm(self._x, self._zeros, self._ones, 1e-5)

    def _multiply(self, weight: torch.Tensor | Fp8Rows, config: GemvConfig) -> torch.Tensor:
        return multiply(self._norm(), weight, config, gated=self._gated)

    def _us(self, call: Callable[[torch.Tensor | Fp8Rows], object]) -> float:
        call(self._weights[0])
        weights = self._weights * -(-_PRODUCTS // len(self._weights))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for weight in weights:
                call(weight)
        (took_ms,) = medians_ms([graph.replay], _TIMES)
        return 1e3 * took_ms / len(weights)


def multiply(
    x: torch.Tensor, weight: torch.Tensor | Fp8Rows, config: GemvConfig, *, gated: bool
) -> torch.Tensor:
    """One product."""
    if gated:
        return gemv_act_and_mul(x, weight, None, config, gelu=False)
    return gemv(x, weight, None, config)


def candidates(shape: Shape) -> Iterator[GemvConfig]:
    """The taken config, then others: a block at a time, several under way, and shared rows."""
    taken = gemv_config(shape.d_in, is_fp8=shape.is_fp8)
    yield from (taken, replace(taken, summed=1))
    each = 16 // shape.itemsize
    for rows, columns, warps in product((2, 4, 8), (2048, 4096), (4, 8)):
        if (other := GemvConfig(rows, columns, warps, each)) != taken:
            yield other
    for rows, columns, warps, stages in (
        (8, 32 * each, 8, 6),
        (16, 32 * each, 8, 4),
        (8, 64 * each, 8, 4),
        (4, 2048, 4, 3),
        (8, 2048, 8, 3),
        (4, 4096, 8, 3),
    ):
        yield GemvConfig(rows, columns, warps, each, stages)
    row_bytes = (1 << (shape.d_in - 1).bit_length()) * shape.itemsize
    for rows, warps, on_each in product((1, 2, 4), (8, 16), (1, 2)):
        stages = min(6, _SHARED // on_each // (rows * row_bytes))
        if stages > 1 and (rows > 1 or not shape.gated):
            programs = on_each * _MULTIPROCESSORS
            yield GemvConfig(rows, 0, warps, each, stages, programs)


def compile_one(case: tuple[Shape, GemvConfig]) -> None:
    """Launch a config once: the next process finds it compiled."""
    shape, config = case
    dtype, like = DTYPE if shape.is_fp8 else torch.bfloat16, {"device": "cuda"}
    rows = torch.empty(shape.d_out, shape.d_in, dtype=dtype, **like)
    weight = Fp8Rows(rows, torch.empty(shape.d_out, **like)) if shape.is_fp8 else rows
    x = torch.empty(1, shape.d_in, dtype=torch.bfloat16, **like)
    multiply(x, weight, config, gated=shape.gated)
    torch.cuda.synchronize()


def measure(shape: Shape) -> Iterator[Row]:
    """Each candidate, one after another."""
    products = Products(shape)
    for config in candidates(shape):
        us = products.us(config)
        tb_s = us and shape.nbytes / us / 1e6
        yield Row(shape.linear, shape.d_out, shape.d_in, us, tb_s, config)


def all_shapes(config: Mapping[str, Any], *, is_fp8: bool) -> dict[str, Shape]:
    """The linears of a layer, and lm_head."""
    found = {name: Shape(name, *size, is_fp8) for name, size in shapes(config).items()}
    head = config["vocab_size"], config["hidden_size"]
    return {**found, "lm_head": Shape("lm_head", *head, is_fp8=False)}


def main() -> None:
    """Try all on the first CUDA device."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--config", choices=CONFIGS, default="llama-3.1-8b", help="whose shapes")
    parser.add_argument("--weight-dtype", choices=("auto", "fp8"), default="fp8")
    parser.add_argument("--linears", nargs="+", help="without: all")
    options = parser.parse_args()
    known = harness.facts(options.commit)
    found = all_shapes(CONFIGS[options.config], is_fp8=options.weight_dtype == "fp8")
    asked = [found[name] for name in options.linears or found]
    with ProcessPoolExecutor(_PROCESSES, mp_context=get_context("spawn")) as pool:
        cases = [(shape, config) for shape in asked for config in candidates(shape)]
        list(pool.map(compile_one, cases, chunksize=2))
    rows = harness.show(row for shape in asked for row in measure(shape))
    best = dict[str, Row]()
    for row in rows:
        if row.us is not None and (row.linear not in best or row.us < best[row.linear].us):
            best[row.linear] = row
    print("the fastest:")
    harness.show(best.values())
    harness.write(options.json, known, gemv=rows)


if __name__ == "__main__":
    main()
