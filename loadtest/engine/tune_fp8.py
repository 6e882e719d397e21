"""Tuning of products of few tokens and FP8 weights on this GPU, written to tuning.json.

python -m loadtest.engine.tune_fp8 --json tune.json [--config llama-3.1-8b]

For each linear of a model's layers and each of TOKENS, launch configs of kernels/fp8/few_tokens.py
are compared with the product in float32, then timed beside cuBLASLt. Copies of the weight, several
times the size of the GPU's cache, take turns in one graph: in a step none of a product's weights
are cached either. kernels/fp8/tuning.json gets the fastest config, or none if cuBLASLt is as fast;
entries of other weights are kept. Takes a minute or two; many processes compile at first. Prints a
row for each linear and number of tokens.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch

from loadtest.engine import harness
from loadtest.engine.gpu_time import medians_ms
from loadtest.engine.random_model import CONFIGS
from lorikeet_engine.kernels.fp8 import Fp8Rows, few_tokens, fused
from lorikeet_engine.kernels.fp8.few_tokens import PATH, TOKENS
from lorikeet_engine.kernels.split_k import ProductConfig

_BLOCKS = (
    # block_out, block_in, warps, stages
    (64, 128, 4, 3),
    (64, 128, 4, 4),
    (64, 128, 4, 8),
    (64, 256, 4, 3),
    (64, 256, 4, 5),
    (128, 128, 4, 4),
    (128, 128, 8, 4),
    (128, 128, 8, 6),
    (128, 256, 8, 3),
)
_SPLITS = (1, 2, 4)
_MOST_SHARED = 226 << 10  # shared memory of a multiprocessor for a program's blocks, bytes
_MOST_SUMS = 128  # registers of a thread for sums
_COPIES_BYTES = 1 << 28
_PROCESSES = 14
_TIMES = 5
_GAIN = 0.02  # smaller gains may be chance
_NEAR = 0.02  # above the error of the tensor cores' sums (fused.linear)


@dataclass(frozen=True, slots=True)
class Row:
    """Times of cuBLASLt and of the best config, for a weight [d_out, d_in] and N tokens.

    tb_s: rate at which the best config reads the weight, in TB/s.
    """

    linear: str
    d_out: int
    d_in: int
    tokens: int
    cublas_us: float
    best_us: float
    tb_s: float
    best: ProductConfig

    @property
    def entry(self) -> dict[str, int] | None:
        """Entry for tuning.json; None if cuBLASLt is as fast."""
        return asdict(self.best) if self.best_us < self.cublas_us * (1.0 - _GAIN) else None


class Products:
    """Copies of a weight, and tokens to multiply by them."""

    def __init__(self, d_out: int, d_in: int, tokens: int) -> None:
        """Draw copies of a weight [d_out, d_in] and `tokens` inputs."""
        copies = max(2, min(32, _COPIES_BYTES // (d_out * d_in)))
        self._weights = [_rounded(d_out, d_in, i) for i in range(copies)]
        self._x = _rounded(tokens, d_in, copies)
        self._want = self._x.floats() @ self._weights[0].floats().T

    def cublas_us(self) -> float:
        """Return cuBLASLt's time in microseconds."""
        return self._us(lambda weight: fused.multiply(self._x, weight, None, torch.bfloat16))

    def us(self, config: ProductConfig) -> float | None:
        """Return a config's time in microseconds; None if the config cannot run or computes a wrong
        product.
        """

        def call(weight: Fp8Rows) -> torch.Tensor:
            return few_tokens.multiply(self._x, weight, None, torch.bfloat16, config)

        try:
            got, again = (call(self._weights[0]) for _ in range(2))
        except Exception as error:  # Triton's OutOfResources is not a RuntimeError
            print(f"{config}: {type(error).__name__}", flush=True)
            return None
        off = ((got.float() - self._want).norm() / self._want.norm()).item()
        if off < _NEAR and torch.equal(got, again):
            return self._us(call)
        print(f"{config}: off by {off:.3g}, equal again: {torch.equal(got, again)}", flush=True)
        return None

    def _us(self, call: Callable[[Fp8Rows], torch.Tensor]) -> float:
        """Return the microseconds of a call in a graph of calls, each with the next weight."""
        call(self._weights[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for weight in self._weights:
                call(weight)
        (took_ms,) = medians_ms([graph.replay], _TIMES)
        return 1e3 * took_ms / len(self._weights)


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return [d_out, d_in] of a layer's weights, by linear."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    return {
        "qkv": ((heads + 2 * kv_heads) * head_dim, hidden),
        "o": (hidden, heads * head_dim),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }


def candidates(tokens: int) -> Iterator[ProductConfig]:
    """Yield the configs to try for `tokens` tokens: those that fit on a multiprocessor."""
    for (out, inner, warps, stages), split in product(_BLOCKS, _SPLITS):
        shared, sums = (out + tokens) * inner * stages, out * tokens // (32 * warps)
        if shared <= _MOST_SHARED and sums <= _MOST_SUMS:
            yield ProductConfig(out, inner, split, warps, stages)


def compile_one(case: tuple[int, ProductConfig]) -> None:
    """Launch a config once; other processes then find it compiled."""
    tokens, config = case
    Products(256, 1024, tokens).us(config)


def measure(linear: str, d_out: int, d_in: int, tokens: int) -> Row:
    """Time all configs for one weight and number of tokens, one after another; return the row of
    the best.

    linear: name of the weight's linear.
    """
    products = Products(d_out, d_in, tokens)
    tried = ((products.us(config), config) for config in candidates(tokens))
    timed = [(us, config) for us, config in tried if us is not None]
    best_us, best = min(timed, key=lambda pair: pair[0])
    tb_s = d_out * d_in / best_us / 1e6
    return Row(linear, d_out, d_in, tokens, products.cublas_us(), best_us, tb_s, best)


def save(gpu: str, rows: Iterable[Row]) -> None:
    """Write the results of the rows into tuning.json."""
    table = json.loads(PATH.read_text())
    for row in rows:
        weight = table.setdefault(gpu, {}).setdefault(f"{row.d_out}x{row.d_in}", {})
        weight[str(row.tokens)] = row.entry
    PATH.write_text(json.dumps(table, indent=1) + "\n")


def _rounded(rows: int, width: int, seed: int) -> Fp8Rows:
    random = torch.Generator("cuda").manual_seed(seed)
    numbers = torch.randn(rows, width, device="cuda", generator=random)
    return fused.quantize_rows(numbers.to(torch.bfloat16))


def main() -> None:
    """Tune on the first CUDA device."""
    parser = harness.arguments(__doc__)
    parser.add_argument(
        "--config", choices=CONFIGS, default="llama-3.1-8b", help="shapes of the model"
    )
    options = parser.parse_args()
    known = harness.facts(options.commit)
    with ProcessPoolExecutor(_PROCESSES, mp_context=get_context("spawn")) as pool:
        cases = ((tokens, config) for tokens in TOKENS for config in candidates(tokens))
        list(pool.map(compile_one, cases, chunksize=2))
    works = product(shapes(CONFIGS[options.config]).items(), TOKENS)
    rows = harness.show(measure(linear, *shape, tokens) for (linear, shape), tokens in works)
    harness.write(options.json, known, tune=rows)
    save(known["gpu"], rows)


if __name__ == "__main__":
    main()
