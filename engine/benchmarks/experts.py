"""The products of experts at Qwen3-30B-A3B's shape, by tokens of a step and by how work is cut.

python -m engine.benchmarks.experts --json experts.json [--tokens 1 32 256] [--seconds 60]

Each row is the fastest TileConfig found, beside the one that grouped.tile_config takes and torch's
grouped product; a result is checked before it is timed. A replay of a CUDA graph multiplies by the
experts of eight random routings in turn, more weights than the cache holds. The floor is the time
that reading each expert's weights once takes. Where torch's product is faster, grouped.TORCHS_ROWS
should be lower, and where another config is, tile_config's.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from engine.benchmarks import harness
from engine.benchmarks.gpu_time import medians_ms
from engine.benchmarks.random_model import QWEN3_30B_A3B
from lorikeet_engine.kernels.moe import RoutedRows, combine, route
from lorikeet_engine.kernels.moe.grouped import TileConfig, products, tile_config

TOKENS = (1, 8, 32, 128, 256, 512, 1024, 2048, 8192)
ROUTINGS = 8
REPLAYS = 10
EXPERTS, PER_TOKEN = QWEN3_30B_A3B["num_experts"], QWEN3_30B_A3B["num_experts_per_tok"]
HIDDEN, INNER = QWEN3_30B_A3B["hidden_size"], QWEN3_30B_A3B["moe_intermediate_size"]
READ_BYTES_PER_S = 4.3e12  # of an H200


@dataclass(frozen=True, slots=True)
class Row:
    """One product in a step of so many tokens; times of one layer, in microseconds.

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


def configs(tokens: int) -> Iterator[TileConfig]:
    """The cuts worth trying for a step of so many tokens."""
    average = tokens * PER_TOKEN / EXPERTS
    if average <= 4:
        cuts = product((16,), (32, 64, 128), (64, 128, 256), (4,), (3, 5))
    elif average <= 32:
        cuts = product((16, 32), (64, 128), (64, 128), (4,), (3, 4))
    else:
        cuts = product((64, 128), (128, 256), (64,), (4, 8), (3, 4))
    return (TileConfig(*cut) for cut in cuts)


def measure(tokens: int, name: str, until_s: float) -> Row:
    """Check each config's product, then time it, until the clock says so."""
    gathered = name == "gate_up"
    d_out, d_in = (2 * INNER, HIDDEN) if gathered else (HIDDEN, INNER)
    like = {"device": "cuda", "dtype": torch.bfloat16}
    weight = torch.randn(EXPERTS, d_out, d_in, **like) * d_in**-0.5
    logits = torch.randn(ROUTINGS, tokens, EXPERTS, **like)
    routed = [route(each, PER_TOKEN, normalised=True) for each in logits]
    x = torch.randn(tokens if gathered else tokens * PER_TOKEN, d_in, **like)

    def by_torch(rows: RoutedRows) -> torch.Tensor:
        inputs = x[rows.pairs // rows.per_token] if gathered else x
        return torch._grouped_mm(inputs, weight.transpose(1, 2), offs=rows.starts[1:])

    want = by_torch(routed[0])
    found = dict[TileConfig, float]()
    taken = tile_config(tokens * PER_TOKEN, EXPERTS)
    for config in dict.fromkeys((taken, *configs(tokens))):
        if found and time.monotonic() > until_s:
            break

        def cut(rows: RoutedRows, config: TileConfig = config) -> torch.Tensor:
            return products(x, weight, rows, config, gathered=gathered)

        torch.testing.assert_close(cut(routed[0]), want, rtol=0.02, atol=0.02)
        found[config] = _us(cut, routed)
    best = min(found, key=lambda config: found[config])
    used = sum(int(rows.starts.diff().count_nonzero()) for rows in routed) / ROUTINGS
    floor_us = 1e6 * used * d_out * d_in * 2 / READ_BYTES_PER_S

    def around(_: RoutedRows) -> torch.Tensor:
        return combine(y, route(logits[0], PER_TOKEN, normalised=True))

    y = torch.randn(tokens * PER_TOKEN, HIDDEN, **like)
    return Row(
        tokens,
        name,
        floor_us,
        found[best],
        best,
        found[taken],
        _us(by_torch, routed),
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
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="of a step")
    parser.add_argument("--seconds", type=float, default=120.0, help="to try configs for")
    options = parser.parse_args()
    facts = harness.facts(options.commit)
    asked = list(product(options.tokens, ("gate_up", "down")))
    each_s = options.seconds / len(asked)
    rows = harness.show(measure(tokens, name, time.monotonic() + each_s) for tokens, name in asked)
    harness.write(options.json, facts, experts=rows)


if __name__ == "__main__":
    main()
