"""One token's experts at Qwen3-30B-A3B's shape: how fast each way to launch them reads weights.

python -m engine.benchmarks.experts_of_one --json experts_of_one.json [--weight-dtype fp8]

For both products of kernels/moe/one_token.py every GemvConfig that is worth trying, the taken one
first; then a layer's experts from the router's logits on, by those three launches and by the six
that several tokens take. A result is checked before it is timed. A replay of a CUDA graph takes
eight random routings in turn, more weights than the cache holds. Where another config is faster, it
belongs into one_token.py. Takes about a minute; many processes compile at first.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch

from engine.benchmarks import harness
from engine.benchmarks.experts import EXPERTS, HIDDEN, INNER, PER_TOKEN, READ_BYTES_PER_S
from engine.benchmarks.gpu_time import medians_ms
from lorikeet_engine.kernels.fp8 import Fp8Rows
from lorikeet_engine.kernels.fp8.reference import quantize_weight
from lorikeet_engine.kernels.gemv import GemvConfig
from lorikeet_engine.kernels.moe import combine, expert_products, route
from lorikeet_engine.kernels.moe.one_token import (
    DOWN,
    FP8_DOWN,
    GATE_UP,
    down_of,
    experts_of_one,
    gate_up_of,
)
from lorikeet_engine.kernels.moe.routing import choose_experts
from lorikeet_engine.kernels.pointwise import act_and_mul

_ROUTINGS = 8
_PROCESSES = 14
_TIMES = 10
_NEAR = 0.02
_CHOICE: dict[str, Any] = {"normalised": True}


@dataclass(frozen=True, slots=True)
class Row:
    """What a config's launch takes, and at which speed that reads the weights; None: it is wrong.

    config: None where it is more than one launch.
    """

    name: str
    floor_us: float
    us: float | None
    tb_s: float | None
    config: GemvConfig | None


class OneToken:
    """A layer's experts, a token, and routings of it."""

    def __init__(self, *, is_fp8: bool) -> None:
        """Draw them."""
        like = {"device": "cuda", "dtype": torch.bfloat16}
        self.x = torch.randn(1, HIDDEN, **like)
        self.logits = torch.randn(_ROUTINGS, 1, EXPERTS, **like)
        self.gate_up = _weight(2 * INNER, HIDDEN, is_fp8=is_fp8)
        self.down = _weight(HIDDEN, INNER, is_fp8=is_fp8)
        self._itemsize = 1 if is_fp8 else 2
        choices = [choose_experts(each, None, PER_TOKEN, **_CHOICE) for each in self.logits]
        self._choices = choices
        self._gated = [
            gate_up_of(self.x, self.gate_up, chosen, gelu=False) for chosen, _ in choices
        ]

    def rows(self) -> Iterator[Row]:
        """Each launch by each config, then all of a layer's."""
        for config in gate_up_configs():
            yield self._row("gate_up", 2, self._gate_up, config)
        for config in down_configs(is_fp8=isinstance(self.down, Fp8Rows)):
            yield self._row("down", 1, self._down, config)
        yield self._row("all, several tokens' way", 3, self._as_several, None)
        yield self._row("all, one token's way", 3, self._as_one, None)

    def _row(
        self,
        name: str,
        matrices: int,
        run: Callable[[int, GemvConfig | None], torch.Tensor],
        config: GemvConfig | None,
    ) -> Row:
        nbytes = PER_TOKEN * matrices * INNER * HIDDEN * self._itemsize
        want = (self._wanted_gates if name == "gate_up" else self._wanted)(0)
        got, us = run(0, config), None
        off = ((got.float() - want).norm() / want.norm()).item()
        if off < _NEAR or "several" in name:  # of FP8 they round what they read
            us = _us(lambda routing: run(routing, config))
        else:
            print(f"{name}, {config}: off by {off:.3g}", flush=True)
        tb_s = us and nbytes / us / 1e6
        return Row(name, 1e6 * nbytes / READ_BYTES_PER_S, us, tb_s, config)

    def _wanted_gates(self, routing: int) -> torch.Tensor:
        chosen, _ = self._choices[routing]
        y = torch.stack([_floats(self.gate_up, e) @ self.x[0].float() for e in chosen[0]])
        gates, values = y.bfloat16().float().chunk(2, dim=1)
        return torch.nn.functional.silu(gates) * values

    def _wanted(self, routing: int) -> torch.Tensor:
        chosen, shares = self._choices[routing]
        gated = self._gated[routing].float()
        y = [_floats(self.down, e) @ g for e, g in zip(chosen[0], gated, strict=True)]
        return (shares[0, :, None] * torch.stack(y)).sum(0, keepdim=True)

    def _gate_up(self, routing: int, config: GemvConfig | None) -> torch.Tensor:
        chosen, _ = self._choices[routing]
        return gate_up_of(self.x, self.gate_up, chosen, config or GATE_UP, gelu=False)

    def _down(self, routing: int, config: GemvConfig | None) -> torch.Tensor:
        return down_of(self._gated[routing], self.down, *self._choices[routing], config)

    def _as_one(self, routing: int, config: GemvConfig | None) -> torch.Tensor:
        del config
        given = (self.x, self.gate_up, self.down, self.logits[routing], None, PER_TOKEN)
        return experts_of_one(*given, **_CHOICE, gelu=False)

    def _as_several(self, routing: int, config: GemvConfig | None) -> torch.Tensor:
        del config
        routed = route(self.logits[routing], PER_TOKEN, **_CHOICE)
        gated = act_and_mul(expert_products(self.x, self.gate_up, routed, gathered=True))
        return combine(expert_products(gated, self.down, routed), routed)


def gate_up_configs() -> Iterator[GemvConfig]:
    """What is worth trying, the taken one first."""
    cuts = product((2, 4, 8), (512, 1024, 2048), (2, 4, 8), (8,))
    yield from dict.fromkeys((GATE_UP, *(GemvConfig(*cut) for cut in cuts)))


def down_configs(*, is_fp8: bool) -> Iterator[GemvConfig]:
    """What is worth trying, the taken one first."""
    cuts = product((1, 2, 4), (256, 1024), (2, 4, 8), (8,))
    yield from dict.fromkeys((FP8_DOWN if is_fp8 else DOWN, *(GemvConfig(*cut) for cut in cuts)))


def compile_one(case: tuple[str, GemvConfig, bool]) -> None:
    """Launch a config once: the next process finds it compiled."""
    name, config, is_fp8 = case
    size = (2 * INNER, HIDDEN) if name == "gate_up" else (HIDDEN, INNER)
    weight: torch.Tensor | Fp8Rows = torch.zeros(8, *size, device="cuda", dtype=torch.bfloat16)
    if is_fp8:
        weight = _weight(*size, is_fp8=True, experts=8)
    chosen = torch.arange(8, device="cuda", dtype=torch.int32)[None]
    x = torch.zeros(1 if name == "gate_up" else 8, size[1], device="cuda", dtype=torch.bfloat16)
    if name == "gate_up":
        gate_up_of(x, weight, chosen, config, gelu=False)
    else:
        down_of(x, weight, chosen, chosen.float(), config)
    torch.cuda.synchronize()


def _weight(
    d_out: int, d_in: int, *, is_fp8: bool, experts: int = EXPERTS
) -> torch.Tensor | Fp8Rows:
    weight = torch.randn(experts, d_out, d_in, device="cuda") * d_in**-0.5
    if not is_fp8:
        return weight.bfloat16()
    rounded = quantize_weight(weight.flatten(0, 1))
    return Fp8Rows(rounded.rows.view(weight.shape), rounded.scales.view(experts, d_out))


def _floats(weight: torch.Tensor | Fp8Rows, expert: torch.Tensor) -> torch.Tensor:
    of = weight[int(expert)]
    return of.floats() if isinstance(of, Fp8Rows) else of.float()


def _us(run: Callable[[int], object]) -> float:
    """One routing's microseconds, in a graph of all."""
    for routing in range(_ROUTINGS):
        run(routing)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for routing in range(_ROUTINGS):
            run(routing)
    (took_ms,) = medians_ms([graph.replay], _TIMES)
    return 1e3 * took_ms / _ROUTINGS


def main() -> None:
    """Measure on the first CUDA device."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--weight-dtype", choices=("auto", "fp8"), default="auto")
    options = parser.parse_args()
    known, is_fp8 = harness.facts(options.commit), options.weight_dtype == "fp8"
    configs = [("gate_up", config) for config in gate_up_configs()]
    configs += [("down", config) for config in down_configs(is_fp8=is_fp8)]
    with ProcessPoolExecutor(_PROCESSES, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, [(*case, is_fp8) for case in configs], chunksize=2))
    rows = harness.show(OneToken(is_fp8=is_fp8).rows())
    harness.write(options.json, known, weight_dtype=options.weight_dtype, experts_of_one=rows)


if __name__ == "__main__":
    main()
