"""Find the best way to multiply few tokens by FP8 weights on this GPU, and write it to tuning.json.

python -m engine.benchmarks.tune_fp8 --json tune.json [--config llama-3.1-8b] [--seconds 150]

For each linear of a model's layers and each number of tokens up to 256, launch configs of
kernels/fp8/few_rows.py are held against the product in float32, then timed beside cuBLASLt's. What
is timed is a graph of roundings and products by turns: a product that follows another at once would
fetch its weights before that has ended. Copies of a weight take turns, several times what the GPU's
cache holds: in a step none of a product's weights are there either. kernels/fp8/tuning.json gets
the fastest config, none where cuBLASLt is as fast, and keeps what it had of other weights.

All are compiled first, by many processes. What has no turn before the seconds have passed is not
tried.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch

from engine.benchmarks import harness
from engine.benchmarks.random_model import CONFIGS
from lorikeet_engine.kernels.fp8 import Fp8Rows, fused
from lorikeet_engine.kernels.fp8.few_rows import multiply_few
from lorikeet_engine.kernels.fp8.tuning import PATH, TOKENS, ProductConfig
from lorikeet_engine.kernels.gemv import gemv

_BLOCKS = (
    # block_out, block_in, warps, stages
    (64, 128, 4, 3),
    (64, 128, 4, 4),
    (64, 128, 4, 8),
    (64, 256, 4, 3),
    (64, 256, 4, 5),
    (128, 128, 4, 4),
    (128, 128, 8, 3),
    (128, 128, 8, 4),
    (128, 128, 8, 6),
    (128, 256, 8, 3),
)
_ORDER = (32, 128, 256, 16, 64)  # if there is no time for all
_MOST_SHARED = 226 << 10  # bytes of a multiprocessor's that a program's blocks may take
_MOST_SUMS = 128  # of a thread's registers
_COPIES_BYTES = 1 << 28
_PROCESSES = 14
_GAIN = 0.02  # what gains less may be chance
_NEAR = 0.02  # what the tensor cores' sums lose is less (fused.linear)

Shape = tuple[int, int]
Call = Callable[[Fp8Rows], object]


@dataclass(frozen=True, slots=True)
class Row:
    """A weight [d_out, d_in] and so many tokens: microseconds of a rounding and the product.

    row_us: of one row, unrounded. tried: a candidate's time, None if it failed or was wrong.
    """

    linear: str
    d_out: int
    d_in: int
    tokens: int
    row_us: float
    cublas_us: float
    best_us: float | None
    best: ProductConfig | None
    tried: list[tuple[ProductConfig, float | None]]


class Products:
    """Copies of a weight, and tokens to multiply by them."""

    def __init__(self, d_out: int, d_in: int, tokens: int) -> None:
        """Draw them all."""
        copies = max(2, min(32, _COPIES_BYTES // (d_out * d_in)))
        self.weights = [fused.quantize_rows(_numbers(d_out, d_in, i)) for i in range(copies)]
        self.x = _numbers(tokens, d_in, copies)
        x, weight = fused.quantize_rows(self.x), self.weights[0]
        floats = [part.rows.float() * part.scales[:, None] for part in (x, weight)]
        self._want = floats[0] @ floats[1].T

    def us(self, call: Call) -> float:
        """A call's microseconds in a graph of calls, each with the next of the weights."""
        call(self.weights[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for weight in self.weights:
                call(weight)
        times = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return 1e3 * median(times) / len(self.weights)

    def cublas(self, weight: Fp8Rows) -> torch.Tensor:
        """Round, and multiply by cuBLASLt."""
        return fused.multiply(fused.quantize_rows(self.x), weight, None, self.x.dtype)

    def one_row(self, weight: Fp8Rows) -> None:
        """Round the first row for nothing, and multiply it as it is."""
        fused.quantize_rows(self.x[:1])
        gemv(self.x[:1], weight.rows, None, weight.scales)

    def few(self, config: ProductConfig) -> Callable[[Fp8Rows], torch.Tensor]:
        """What rounds, and multiplies by the kernel."""
        return lambda weight: multiply_few(
            fused.quantize_rows(self.x), weight, None, self.x.dtype, config
        )

    def try_(self, config: ProductConfig) -> float | None:
        """The config's time; None if it cannot run or computes something else."""
        call = self.few(config)
        try:
            got, again = call(self.weights[0]), call(self.weights[0])
            off = ((got.float() - self._want).norm() / self._want.norm()).item()
            if off < _NEAR and torch.equal(got, again):
                return self.us(call)
            print(f"{config}: off by {off:.3g}, equal again: {torch.equal(got, again)}", flush=True)
        except Exception as error:  # Triton's OutOfResources is not a RuntimeError
            print(f"{config}: {type(error).__name__} {str(error)[:200]}", flush=True)
        return None


def shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """[d_out, d_in] of a layer's weights, by their linears."""
    hidden, inner, heads = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    head_dim = config.get("head_dim", hidden // heads)
    kv_width = config["num_key_value_heads"] * head_dim
    return {
        "qkv": (heads * head_dim + 2 * kv_width, hidden),
        "o": (hidden, heads * head_dim),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }


def blocks(tokens: int) -> Iterator[ProductConfig]:
    """The candidates that fit a multiprocessor, each with one program."""
    for (out, inner, warps, stages), tma in product(_BLOCKS, (False, True)):
        shared, sums = (out + tokens) * inner * stages, out * tokens // (32 * warps)
        if shared <= _MOST_SHARED and sums <= _MOST_SUMS:
            yield ProductConfig(out, inner, 1, warps, stages, tma)


def candidates(tokens: int, d_out: int, sms: int) -> Iterator[ProductConfig]:
    """Blocks with some programs for each multiprocessor, or for each tile."""
    for config in blocks(tokens):
        tiles = -(-d_out // config.block_out)
        counts = {sms * n for n in (1, 2, 3, 4)} | {tiles * n for n in (1, 2, 4, 8)}
        for count in sorted(counts):
            if sms // 4 < count <= 5 * sms:
                yield ProductConfig(**asdict(config) | {"programs": count})


def compile_one(case: tuple[int, ProductConfig]) -> None:
    """Launch a candidate once, with shared tiles and without: the next process finds it compiled.

    Errors are left to the process that times it.
    """
    tokens, config = case
    weight, x = (fused.quantize_rows(_numbers(rows, 1024, 0)) for rows in (256, tokens))
    for programs in (1, 3):
        try:
            multiply_few(
                x, weight, None, torch.bfloat16,
                ProductConfig(**asdict(config) | {"programs": programs}),
            )  # fmt: skip
        except Exception as error:
            print(f"{config}: {type(error).__name__}", flush=True)


def measure(linear: str, shape: Shape, tokens: int, until: float) -> Row:
    """Try the candidates one after another."""
    products = Products(*shape, tokens)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    cublas_us, row_us = products.us(products.cublas), products.us(products.one_row)
    tried = [
        (config, products.try_(config))
        for config in candidates(tokens, shape[0], sms)
        if time.monotonic() < until
    ]
    timed = [(us, config) for config, us in tried if us is not None]
    best_us, best = min(timed, key=lambda pair: pair[0], default=(None, None))
    return Row(linear, *shape, tokens, row_us, cublas_us, best_us, best, tried)


def show(row: Row) -> None:
    """Print a row, and its fastest candidates with the speed at which they read the weight."""
    size = row.d_out * row.d_in / 1e6
    timed = sorted(((us, c) for c, us in row.tried if us is not None), key=lambda pair: pair[0])
    print(
        f"{row.linear} {row.tokens}: cuBLASLt {row.cublas_us:.1f} us "
        f"{size / row.cublas_us:.2f} TB/s, one row {row.row_us:.1f} us "
        f"{size / row.row_us:.2f} TB/s",
    )
    for us, config in timed[:4]:
        print(f"    {us:.1f} us {size / us:.2f} TB/s {config}", flush=True)


def entries(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """What tuning.json says of the rows' weights."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        better = row.best_us is not None and row.best_us < row.cublas_us * (1.0 - _GAIN)
        best = asdict(row.best) if better and row.best is not None else None
        found.setdefault(f"{row.d_out}x{row.d_in}", {})[str(row.tokens)] = best
    return found


def _numbers(rows: int, width: int, seed: int) -> torch.Tensor:
    random = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(rows, width, device="cuda", generator=random).to(torch.bfloat16)


def main() -> None:
    """Tune on the first CUDA device."""
    until = time.monotonic()
    parser = harness.arguments(__doc__)
    parser.add_argument("--config", choices=CONFIGS, default="llama-3.1-8b", help="whose shapes")
    parser.add_argument("--seconds", type=float, default=600.0, help="when to stop")
    options = parser.parse_args()
    until += options.seconds
    known = harness.facts(options.commit)
    cases = [(tokens, config) for tokens in TOKENS for config in blocks(tokens)]
    with ProcessPoolExecutor(_PROCESSES, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, cases, chunksize=2))
    rows, table = [], json.loads(PATH.read_text())
    for tokens in _ORDER:
        for linear, shape in shapes(CONFIGS[options.config]).items():
            rows.append(measure(linear, shape, tokens, until))
            show(rows[-1])
            harness.write(options.json, known, tune=rows, entries=entries(rows))
    for weight, configs in entries(rows).items():
        table.setdefault(known["gpu"], {}).setdefault(weight, {}).update(configs)
    PATH.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
