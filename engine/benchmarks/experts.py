"""The products of experts at Qwen3-30B-A3B's shape, by tokens of a step and by how work is cut.

python -m engine.benchmarks.experts --json experts.json [--weight-dtype fp8] [--tokens 1 32 256]
    [--seconds 60]

Each row is the fastest TileConfig found, beside the one that tile_config takes and torch's grouped
product; a result is checked before it is timed. A replay of a CUDA graph multiplies by the experts
of eight random routings in turn, more weights than the cache holds. The floor is the time that
reading each expert's weights once takes. Where another config is faster, it belongs into
tile_config of kernels/moe/grouped.py, or of FP8 into TILES of grouped_fp8.py; where torch's product
is, grouped.TORCHS_ROWS should be lower, and FP8 should have the like. Rows are rounded to FP8
before: what that takes is not in the times.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from engine.benchmarks import harness
from engine.benchmarks.gpu_time import medians_ms
from engine.benchmarks.random_model import QWEN3_30B_A3B
from lorikeet_engine.kernels.fp8 import Fp8Rows
from lorikeet_engine.kernels.fp8.reference import quantize_rows, quantize_weight
from lorikeet_engine.kernels.moe import RoutedRows, combine, grouped, grouped_fp8, route
from lorikeet_engine.kernels.moe.grouped import TileConfig

TOKENS = (1, 8, 32, 128, 256, 512, 1024, 2048, 8192)
ROUTINGS = 8
REPLAYS = 10
EXPERTS, PER_TOKEN = QWEN3_30B_A3B["num_experts"], QWEN3_30B_A3B["num_experts_per_tok"]
HIDDEN, INNER = QWEN3_30B_A3B["hidden_size"], QWEN3_30B_A3B["moe_intermediate_size"]
READ_BYTES_PER_S = 4.3e12  # of an H200


@dataclass(frozen=True, slots=True)
class Row:
    """One product in a step of N tokens; times of one layer, in microseconds.

    around_us: of the routing before both products and the sum behind them, once a layer.
    """

    tokens: int
    name: str
    floor_us: float
    best_us: float
    best: TileConfig
    taken_us: float
    torch_us: float
    around_us: float

    @property
    def label(self) -> str:
        """Which row it is."""
        return f"{self.name} of {self.tokens}"


class Floats:
    """A product's operands in bfloat16, and how they are multiplied."""

    itemsize = 2
    tile_config = staticmethod(grouped.tile_config)

    def __init__(self, rows: int, d_out: int, d_in: int, *, gathered: bool) -> None:
        """Draw numbers; rows: of x."""
        like = {"device": "cuda", "dtype": torch.bfloat16}
        self.weight = torch.randn(EXPERTS, d_out, d_in, **like) * d_in**-0.5
        self.x = torch.randn(rows, d_in, **like)
        self.gathered = gathered

    def ours(self, routed: RoutedRows, config: TileConfig) -> torch.Tensor:
        """Multiply by the Triton kernel."""
        return grouped.products(self.x, self.weight, routed, config, gathered=self.gathered)

    def torchs(self, routed: RoutedRows) -> torch.Tensor:
        """Multiply by torch's grouped product."""
        inputs = self.x[routed.pairs // routed.per_token] if self.gathered else self.x
        y: torch.Tensor = torch._grouped_mm(
            inputs, self.weight.transpose(1, 2), offs=routed.starts[1:]
        )
        return y

    def configs(self, average: float) -> Iterator[TileConfig]:
        """The cuts worth trying where an expert has N rows on average."""
        if average <= 4:
            cuts = product((16,), (32, 64, 128), (64, 128, 256), (4,), (3, 5))
        elif average <= 32:
            cuts = product((16, 32), (64, 128), (64, 128), (4,), (3, 4))
        else:
            cuts = product((64, 128), (128, 256), (64,), (4, 8), (3, 4))
        return (TileConfig(*cut) for cut in cuts)


class Fp8:
    """A product's operands in FP8, and how they are multiplied."""

    itemsize = 1
    tile_config = staticmethod(grouped_fp8.tile_config)

    def __init__(self, rows: int, d_out: int, d_in: int, *, gathered: bool) -> None:
        """Draw numbers and round them; rows: of x."""
        weight = quantize_weight(torch.randn(EXPERTS * d_out, d_in, device="cuda") * d_in**-0.5)
        self.weight = Fp8Rows(
            weight.rows.view(EXPERTS, d_out, d_in), weight.scales.view(EXPERTS, d_out)
        )
        self.x = quantize_rows(torch.randn(rows, d_in, device="cuda"))
        self.gathered = gathered

    def ours(self, routed: RoutedRows, config: TileConfig) -> torch.Tensor:
        """Multiply by the Triton kernel."""
        x, weight = self.x, self.weight
        return grouped_fp8.products(
            x, weight, routed, torch.bfloat16, config, gathered=self.gathered
        )

    def torchs(self, routed: RoutedRows) -> torch.Tensor:
        """Multiply by torch's grouped product."""
        inputs = self.x[routed.pairs // routed.per_token] if self.gathered else self.x
        y: torch.Tensor = torch._scaled_grouped_mm(
            inputs.rows,
            self.weight.rows.transpose(1, 2),
            inputs.scales,
            self.weight.scales,
            offs=routed.starts[1:],
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return y

    def configs(self, average: float) -> Iterator[TileConfig]:
        """The cuts worth trying where an expert has N rows on average."""
        if average <= 4:
            cuts = product((16,), (64, 128), (128, 256), (4,), (3, 4, 6))
        elif average <= 32:
            cuts = product((16, 32), (64, 128), (128, 256), (4,), (3, 4))
        else:
            cuts = product((64, 128), (128, 256), (128,), (4, 8), (3, 4))
        return (TileConfig(*cut) for cut in cuts)


OPERANDS: dict[str, type[Floats] | type[Fp8]] = {"auto": Floats, "fp8": Fp8}


def measure(operands: type[Floats] | type[Fp8], tokens: int, name: str, until_s: float) -> Row:
    """Check each config's product, then time it, until the clock says so."""
    gathered, pairs = name == "gate_up", tokens * PER_TOKEN
    d_out, d_in = (2 * INNER, HIDDEN) if gathered else (HIDDEN, INNER)
    like = {"device": "cuda", "dtype": torch.bfloat16}
    of = operands(tokens if gathered else pairs, d_out, d_in, gathered=gathered)
    logits = torch.randn(ROUTINGS, tokens, EXPERTS, **like)
    routed = [route(each, PER_TOKEN, normalised=True) for each in logits]
    want = of.torchs(routed[0])
    found = dict[TileConfig, float]()
    taken = of.tile_config(pairs, EXPERTS)
    for config in dict.fromkeys((taken, *of.configs(pairs / EXPERTS))):
        if found and time.monotonic() > until_s:
            break
        ours = partial(of.ours, config=config)
        torch.testing.assert_close(ours(routed[0]), want, rtol=0.02, atol=0.02)
        found[config] = _us(ours, routed)
    best = min(found, key=lambda config: found[config])
    used = sum(int(rows.starts.diff().count_nonzero()) for rows in routed) / ROUTINGS
    floor_us = 1e6 * used * d_out * d_in * of.itemsize / READ_BYTES_PER_S

    def around(_: RoutedRows) -> torch.Tensor:
        return combine(y, route(logits[0], PER_TOKEN, normalised=True))

    y = torch.randn(pairs, HIDDEN, **like)
    return Row(
        tokens,
        name,
        floor_us,
        found[best],
        best,
        found[taken],
        _us(of.torchs, routed),
        _us(around, routed),
    )


def _us(run: Callable[[RoutedRows], object], routed: Sequence[RoutedRows]) -> float:
    """One run's microseconds, in a graph of one for each routing."""
    for rows in routed:
        run(rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for rows in routed:
            run(rows)
    (took_ms,) = medians_ms([graph.replay], REPLAYS)
    return 1e3 * took_ms / len(routed)


def main() -> None:
    """Measure both products at the steps that are asked for."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--weight-dtype", choices=OPERANDS, default="auto", help="of the experts")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="of a step")
    parser.add_argument("--seconds", type=float, default=120.0, help="to try configs for")
    options = parser.parse_args()
    facts = harness.facts(options.commit)
    asked = list(product(options.tokens, ("gate_up", "down")))
    each_s = options.seconds / len(asked)
    operands = OPERANDS[options.weight_dtype]
    rows = harness.show(
        measure(operands, tokens, name, time.monotonic() + each_s) for tokens, name in asked
    )
    harness.write(options.json, facts, weight_dtype=options.weight_dtype, experts=rows)


if __name__ == "__main__":
    main()
