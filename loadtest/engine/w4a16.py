"""Products of 4-bit weights on this GPU: launch configs of kernels/w4a16 beside cuBLAS.

python -m loadtest.engine.w4a16 --json w4a16.json [--config llama-3.1-8b]

For each linear of a model's layers, each format and each number of tokens, launch configs of
kernels/w4a16/fused.py are compared with the product of the decoded weight in float32, then timed
beside the product of a weight in bfloat16, and beside decoding followed by cuBLAS. Copies of the
weight, several times the size of the GPU's cache, take turns in one graph: in a step none of a
product's weights are cached either. Prints a row for each linear, format and number of tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.nn import functional as F

from loadtest.engine import harness
from loadtest.engine.gpu_time import medians_ms
from loadtest.engine.random_model import CONFIGS
from loadtest.engine.tune_fp8 import shapes
from lorikeet_engine.kernels.split_k import ProductConfig
from lorikeet_engine.kernels.w4a16 import SPAN, PackedWeight, fused, pack

FORMATS = ("groups of 128", "groups of 32", "nf4")
TOKENS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096)
_BLOCKS = (
    # block_out, warps, stages
    (64, 4, 2),
    (64, 4, 3),
    (64, 4, 4),
    (128, 4, 3),
    (128, 8, 3),
)
_SPLITS = (1, 2, 4, 8)
_MOST_SPLIT_TOKENS = 256
_COPIES_BYTES = 1 << 28
_TIMES = 5
# Sums of exact products of bfloat16 numbers, rounded once; decoded weights are rounded too.
_NEAR = 0.01


@dataclass(frozen=True, slots=True)
class Row:
    """Times of a product of a weight [d_out, d_in] and a number of tokens.

    chosen_us: by the config that fused.linear chooses. decoded_us: by fused.multiply_decoded.
    tb_s: rate at which the best config reads the weight, in TB/s.
    """

    linear: str
    stored: str
    d_out: int
    d_in: int
    tokens: int
    bfloat16_us: float
    decoded_us: float
    chosen_us: float
    best_us: float
    tb_s: float
    best: ProductConfig


class Products:
    """Copies of a weight, and tokens to multiply by them."""

    def __init__(self, stored: str, d_out: int, d_in: int, tokens: int) -> None:
        """Draw copies of a weight [d_out, d_in] and `tokens` inputs.

        stored: element of FORMATS.
        """
        random = torch.Generator("cuda").manual_seed(d_out + d_in)
        copies = max(2, min(32, 2 * _COPIES_BYTES // (d_out * d_in)))
        self.weights = [_drawn(stored, d_out, d_in, random) for _ in range(copies)]
        self._floats = [weight.floats().bfloat16() for weight in self.weights[: copies // 4 + 1]]
        self._x = torch.randn(tokens, d_in, device="cuda", generator=random).bfloat16()
        self._want = self._x.float() @ self.weights[0].floats().T

    def bfloat16_us(self) -> float:
        """Return cuBLAS's time for the weight in bfloat16, in microseconds."""
        return _us(lambda weight: F.linear(self._x, weight), self._floats)

    def decoded_us(self) -> float:
        """Return the microseconds of decoding the weight and then multiplying by it with cuBLAS."""
        return self._checked_us(lambda weight: fused.multiply_decoded(self._x, weight, None))

    def chosen_us(self) -> float:
        """Return the time of fused.linear in microseconds."""
        return self._checked_us(lambda weight: fused.linear(self._x, weight))

    def us(self, config: ProductConfig) -> float | None:
        """Return a config's time in microseconds; None if the config cannot run."""
        try:
            fused.multiply(self._x, self.weights[0], None, config)
        except Exception as error:  # Triton's OutOfResources is not a RuntimeError
            print(f"{config}: {type(error).__name__}", flush=True)
            return None
        return self._checked_us(lambda weight: fused.multiply(self._x, weight, None, config))

    def _checked_us(self, call: Callable[[PackedWeight], torch.Tensor]) -> float:
        """Time a call. Raises AssertionError if its product is wrong or differs at a second run."""
        got, again = (call(self.weights[0]) for _ in range(2))
        off = ((got.float() - self._want).norm() / self._want.norm()).item()
        assert off < _NEAR, f"the product is off by {off:.3g}"
        assert torch.equal(got, again), "the product differs at the second run"
        return _us(call, self.weights)


def _us(call: Callable[[Any], object], weights: Sequence[Any]) -> float:
    """Return the microseconds of a call in a graph of calls, each with the next weight."""
    call(weights[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            call(weight)
    (took_ms,) = medians_ms([graph.replay], _TIMES)
    return 1e3 * took_ms / len(weights)


def candidates(tokens: int) -> Iterator[ProductConfig]:
    """Yield the configs to try for `tokens` tokens."""
    splits = _SPLITS if tokens <= _MOST_SPLIT_TOKENS else (1,)
    for (out, warps, stages), split in product(_BLOCKS, splits):
        yield ProductConfig(out, SPAN, split, warps, stages)


def measure(linear: str, stored: str, d_out: int, d_in: int, tokens: int) -> Row:
    """Check and time all configs for one weight and number of tokens.

    linear: name of the weight's linear. stored: element of FORMATS.
    """
    products = Products(stored, d_out, d_in, tokens)
    tried = ((products.us(config), config) for config in candidates(tokens))
    timed = [(us, config) for us, config in tried if us is not None]
    best_us, best = min(timed, key=lambda pair: pair[0])
    tb_s = products.weights[0].nbytes / best_us / 1e6
    others = products.bfloat16_us(), products.decoded_us(), products.chosen_us()
    return Row(linear, stored, d_out, d_in, tokens, *others, best_us, tb_s, best)


def _drawn(stored: str, d_out: int, d_in: int, random: torch.Generator) -> PackedWeight:
    group = {"groups of 128": 128, "groups of 32": 32}.get(stored, 64)
    q = torch.randint(16, (d_out, d_in), dtype=torch.uint8, device="cuda", generator=random)
    shape = d_out, d_in // group
    scales = torch.rand(shape, device="cuda", generator=random) / 100 + 0.01
    if stored == "nf4":
        levels = torch.linspace(-1, 1, 16, device="cuda")
        return pack(q, scales, None, levels=levels, rounded=torch.bfloat16)
    zeros = torch.randint(6, 11, shape, dtype=torch.uint8, device="cuda", generator=random)
    return pack(q, scales.half(), zeros)


def main() -> None:
    """Measure on the first CUDA device."""
    parser = harness.arguments(__doc__)
    parser.add_argument(
        "--config", choices=CONFIGS, default="llama-3.1-8b", help="shapes of the model"
    )
    options = parser.parse_args()
    known = harness.facts(options.commit)
    works = product(shapes(CONFIGS[options.config]).items(), FORMATS, TOKENS)
    rows = harness.show(
        measure(linear, stored, *shape, tokens) for (linear, shape), stored, tokens in works
    )
    harness.write(options.json, known, w4a16=rows)


if __name__ == "__main__":
    main()
