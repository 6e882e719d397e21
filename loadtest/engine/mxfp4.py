"""Products of gpt-oss's experts in MXFP4 on this GPU, checked and timed beside bfloat16's.

python -m loadtest.engine.mxfp4 --json mxfp4.json [--config gpt-oss-20b] [--tokens 1 4 32 256 2048]

For gate_up and down of a layer and for each number of tokens, launch configs of
kernels/moe/grouped_mxfp4.py are compared with the float32 product of the exact values, then timed
beside the product of weights in bfloat16. For one token, those of kernels/moe/one_token_mxfp4.py,
which also activate and add up, are timed too. Tokens are routed at random, and otherwise in each
call of a graph: no call finds its weights in the GPU's cache. Takes about a minute, most of it to
compile. Prints a row for each config.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from loadtest.engine import harness
from loadtest.engine.gpu_time import medians_ms
from loadtest.engine.random_model import CONFIGS, random_mxfp4
from lorikeet_engine.kernels.moe import (
    Clamp,
    ClampedBiases,
    ExpertWeight,
    Mxfp4Experts,
    RoutedRows,
    fused,
    grouped_mxfp4,
    one_token_mxfp4,
    reference,
)
from lorikeet_engine.kernels.moe.grouped import TileConfig
from lorikeet_engine.kernels.moe.mxfp4 import GROUP
from lorikeet_engine.kernels.split_k import ProductConfig

TOKENS = (1, 4, 32, 256, 2048)
TILES = {
    # for up to so many rows of an expert: rows, outputs, warps, stages
    12: ((16, 64, 4, 5), (16, 64, 4, 8), (16, 128, 4, 4), (16, 128, 8, 5)),
    64: ((32, 64, 4, 5), (32, 128, 4, 4), (64, 128, 4, 4), (64, 128, 8, 4)),
    1 << 20: (
        (128, 64, 4, 3),
        (128, 128, 8, 2),
        (128, 128, 8, 4),
        (256, 64, 4, 3),
        (256, 128, 8, 3),
    ),
}
ONE_TOKENS = {
    # outputs, split, warps, stages
    "gate_up": ((64, 1, 4, 4), (64, 1, 4, 6), (64, 1, 4, 8), (128, 1, 4, 5)),
    "down": ((64, 1, 4, 6), (64, 2, 4, 4), (64, 3, 4, 4), (128, 4, 4, 4)),
}
_CLAMP = Clamp(1.702, 7.0)
_CALLS = 8  # of a graph
_TIMES = 5
# Sums of the same products in float32, rounded to bfloat16.
_NEAR = 2.0**-8
_DEVICE = "cuda"

Call = Callable[[Any, RoutedRows], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Row:
    """Time of one config, or of the product in bfloat16.

    product: gate_up or down.
    experts: number of experts that the tokens have, on average over the routings.
    tb_s: rate at which the weights of these experts are read, in TB/s.
    chosen: whether an engine chooses this config.
    """

    product: str
    tokens: int
    experts: float
    us: float
    tb_s: float
    chosen: bool
    config: TileConfig | ProductConfig | str


def _one_token_configs(product: str) -> Iterator[ProductConfig]:
    for outputs, split, warps, stages in ONE_TOKENS[product]:
        yield ProductConfig(outputs, GROUP, split, warps, stages)


class Layer:
    """Weights of a layer's experts, two of each, which take turns."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        """Draw the weights of a layer; raw: content of config.json."""
        self._random = torch.Generator(_DEVICE).manual_seed(0)
        self._hidden, self._width = raw["hidden_size"], raw["intermediate_size"]
        self._experts, self._per_token = raw["num_local_experts"], raw["num_experts_per_tok"]
        sizes = {"gate_up": (2 * self._width, self._hidden), "down": (self._hidden, self._width)}
        self._weights = {n: [self._mxfp4(*size) for _ in range(2)] for n, size in sizes.items()}
        of_gate_up, of_down = (self._normal(self._experts, size) for size, _ in sizes.values())
        self._biases = ClampedBiases(_CLAMP, of_gate_up, of_down)

    def rows(self, tokens: int) -> Iterator[Row]:
        """Check and time all configs for a number of tokens. Raises AssertionError if wrong."""
        routings = self._routings(tokens)
        of_rows = tokens * self._per_token
        tiles = next(tiles for most, tiles in TILES.items() if of_rows <= most * self._experts)
        configs = [
            grouped_mxfp4.tile_config(of_rows, self._experts),
            *(TileConfig(rows, outputs, GROUP, *more) for rows, outputs, *more in tiles),
        ]
        for name, weights in self._weights.items():
            gathered = name == "gate_up"
            x = self._normal(tokens if gathered else of_rows, weights[0].d_in)

            def product(
                weight: ExpertWeight,
                routed: RoutedRows,
                config: TileConfig | None = None,
                x: torch.Tensor = x,
                gathered: bool = gathered,
            ) -> torch.Tensor:
                if isinstance(weight, Mxfp4Experts):
                    return grouped_mxfp4.products(x, weight, routed, config, gathered=gathered)
                return fused.expert_products(x, weight, routed, gathered=gathered)

            exact = reference.expert_products(x.float(), weights[0], routings[0], gathered=gathered)
            yield from _timed(name, product, weights, routings, exact, configs)
            floats = [self._normal(*weights[0].shape)]
            yield _row(name, _us(product, floats, routings), floats[0], routings, "bfloat16")

    def of_one_token(self) -> Iterator[Row]:
        """Check and time all configs of a single token. Raises AssertionError if wrong."""
        routings, biases = self._routings(1), self._biases
        routed = routings[0]
        x, gated = self._normal(1, self._hidden), self._normal(self._per_token, self._width)

        def gate_up(
            weight: Mxfp4Experts, routed: RoutedRows, config: ProductConfig
        ) -> torch.Tensor:
            return one_token_mxfp4.gate_up_of(x, weight, routed.experts, biases, config)

        def down(weight: Mxfp4Experts, routed: RoutedRows, config: ProductConfig) -> torch.Tensor:
            chosen, shares = routed.experts, routed.weights
            return one_token_mxfp4.down_of(gated, weight, chosen, shares, biases.down, config)

        weights = self._weights["gate_up"]
        configs = [one_token_mxfp4.GATE_UP, *_one_token_configs("gate_up")]
        y = reference.expert_products(x.float(), weights[0], routed, gathered=True).bfloat16()
        activated = reference.clamped_swiglu(y, biases.gate_up, routed, _CLAMP)[routed.rows[0]]
        yield from _timed("gate_up", gate_up, weights, routings, activated, configs)
        weights = self._weights["down"]
        configs = [one_token_mxfp4.DOWN, *_one_token_configs("down")]
        of_rows = gated[routed.pairs].float()
        y = reference.expert_products(of_rows, weights[0], routed).bfloat16()
        total = reference.combine(y, routed, biases.down)
        yield from _timed("down", down, weights, routings, total, configs)

    def _routings(self, tokens: int) -> list[RoutedRows]:
        logits = [self._normal(tokens, self._experts) for _ in range(_CALLS)]
        return [fused.route(each, self._per_token, normalised=True) for each in logits]

    def _mxfp4(self, d_out: int, d_in: int) -> Mxfp4Experts:
        """Draw weights whose blocks have scales of four sizes."""
        weight = random_mxfp4(self._experts, d_out, d_in, d_in**-0.5, self._random)
        scales = weight.scales.view(torch.uint8)
        lower = torch.empty_like(scales).random_(0, 4, generator=self._random)
        scales -= lower * (scales > 0)  # those of blocks beyond d_in are 0
        return weight

    def _normal(self, *shape: int) -> torch.Tensor:
        drawn = torch.empty(shape, device=_DEVICE, dtype=torch.bfloat16)
        return drawn.normal_(generator=self._random)


def _timed(
    name: str,
    call: Callable[..., torch.Tensor],
    weights: Sequence[Mxfp4Experts],
    routings: Sequence[RoutedRows],
    want: torch.Tensor,
    configs: Sequence[TileConfig | ProductConfig],
) -> Iterator[Row]:
    """Check and time a call with each config.

    want: result for the first weight and routing.
    configs: an engine chooses the first.
    """
    for config in dict.fromkeys(configs):
        try:
            got, again = (call(weights[0], routings[0], config) for _ in range(2))
        except Exception as error:  # Triton's OutOfResources is not a RuntimeError
            print(f"{config}: {type(error).__name__}: {error}", flush=True)
            continue
        off = ((got.float() - want.float()).norm() / want.float().norm()).item()
        assert off < _NEAR, f"{name}, {config}: the product is off by {off:.3g}"
        assert torch.equal(got, again), f"{name}, {config}: the second product differs"
        us = _us(partial(_with, call, config), weights, routings)
        yield _row(name, us, weights[0], routings, config, chosen=config == configs[0])


def _with(
    call: Callable[..., torch.Tensor], config: object, weight: Any, routed: RoutedRows
) -> torch.Tensor:
    return call(weight, routed, config)


def _row(
    name: str,
    us: float,
    weight: ExpertWeight,
    routings: Sequence[RoutedRows],
    config: TileConfig | ProductConfig | str,
    *,
    chosen: bool = False,
) -> Row:
    counts = [int((routed.starts.diff() > 0).sum()) for routed in routings]
    experts = sum(counts) / len(counts)
    nbytes = weight.nbytes / weight.shape[0] * experts
    return Row(name, len(routings[0].weights), experts, us, nbytes / us / 1e6, chosen, config)


def _us(call: Call, weights: Sequence[Any], routings: Sequence[RoutedRows]) -> float:
    """Return the microseconds of a call in a graph of calls, each on the next weight and
    routing.
    """
    call(weights[0], routings[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i, routed in enumerate(routings):
            call(weights[i % len(weights)], routed)
    (took_ms,) = medians_ms([graph.replay], _TIMES)
    return 1e3 * took_ms / len(routings)


def main() -> None:
    """Measure on the first CUDA device."""
    parser = harness.arguments(__doc__)
    parser.add_argument(
        "--config",
        choices=[name for name in CONFIGS if name.startswith("gpt-oss")],
        default="gpt-oss-20b",
        help="shapes of the model",
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=TOKENS, help="numbers of tokens of a step"
    )
    options = parser.parse_args()
    known, layer = harness.facts(options.commit), Layer(CONFIGS[options.config])
    rows = harness.show(row for tokens in options.tokens for row in layer.rows(tokens))
    of_one = harness.show(layer.of_one_token())
    harness.write(options.json, known, config=options.config, mxfp4=rows, one_token=of_one)


if __name__ == "__main__":
    main()
