"""LoRA kernels: time that LoRA adds to a forward pass of Llama-3.1-8B's shapes, against a floor.

python -m loadtest.engine.lora_kernels --json results.json

A row's time is the time of a pass with adapters minus the time of a pass without adapters. Both are
replays of CUDA graphs of the product's own model, taken in turns, medians of 30. A pass is all
seven linears of 8 layers with distinct weights, scaled to 32 layers, with the operations between
them and without attention. Between two uses of an adapter's weights 3.5 GB of others are read, far
more than the cache holds. The adapter of a token is random; as in the engine, tokens are sorted by
adapter on the host, once a step, untimed.

The floor: adapters of their true rank read once, every x read once, every y read and written once,
at the speed of a device copy. A row beats the floor if LoRA ran beside the base model's products.

Prints a row for each step.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from loadtest.engine import harness
from loadtest.engine.gpu_time import medians_ms
from loadtest.engine.random_model import LLAMA_3_1_8B, random_model, write_config
from lorikeet_engine.adapter_format import BaseShape
from lorikeet_engine.kernels.attention.protocol import PageTable
from lorikeet_engine.kernels.lora.linear import (
    begin_step,
    linear_with_lora,
    linear_with_lora_before_act,
    rows_of,
)
from lorikeet_engine.kernels.lora.reference import add_lora
from lorikeet_engine.kernels.lora.types import LoraGroup, LoraWeights, Segments
from lorikeet_engine.kernels.pointwise import act_and_mul
from lorikeet_engine.models.batch import Batch
from lorikeet_engine.models.llama import LlamaModel

LAYERS, SCALED_TO = 8, 32
CONFIG = {**LLAMA_3_1_8B, "num_hidden_layers": LAYERS, "vocab_size": 1024}
SHAPE = BaseShape.from_config(CONFIG)
COPY_BYTES_PER_S = 4.3e12  # H200, read plus written
REPLAYS = 30
PAGE = 16
# Of the norm; v and the delta are each rounded to bfloat16, and the gate multiplies two deltas.
TOLERANCE = 2 * torch.finfo(torch.bfloat16).eps


@dataclass(frozen=True, slots=True)
class Row:
    """Step to measure: `tokens` tokens with `adapters` adapters of one rank.

    pool_rank: largest rank that the step's pool could hold.
    reach_ms: target of LoRA's time, in milliseconds.
    """

    tokens: int
    adapters: int
    rank: int
    pool_rank: int
    reach_ms: float

    @property
    def floor_ms(self) -> float:
        """Shortest possible time of LoRA, as the module defines it, in milliseconds."""
        dims = [SHAPE.dims(i) for i in range(len(SHAPE.linears))]
        weights = self.adapters * self.rank * sum(d_in + d_out for d_in, d_out in dims)
        inputs = sum(dims[group[0]][0] for group in SHAPE.groups.values())
        rows = self.tokens * (inputs + 2 * sum(d_out for _, d_out in dims))
        return SCALED_TO * 2 * (weights + rows) / COPY_BYTES_PER_S * 1e3


ROWS = (
    Row(1, 1, 16, 16, 0.35),
    Row(8, 8, 16, 16, 0.45),
    Row(32, 32, 16, 16, 1.0),
    Row(128, 8, 16, 16, 0.7),
    Row(128, 128, 16, 16, 3.0),
    Row(256, 128, 16, 16, 3.4),
    Row(64, 64, 64, 64, 5.5),
    Row(128, 128, 64, 64, 11.0),
    Row(128, 128, 8, 64, 2.0),
    Row(2048, 8, 16, 16, 3.0),
    Row(8192, 8, 16, 16, 15.0),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of a step.

    base_ms: time of the pass without adapters.
    lora_ms: time that adapters add.
    floor_ms: least time that lora_ms could be, by the GPU's memory bandwidth.
    roofline: floor_ms as a share of lora_ms.
    """

    row: Row
    base_ms: float
    lora_ms: float
    floor_ms: float
    roofline: float


class Pass:
    """A row's step on the device as two checked CUDA graphs, with adapters and without."""

    @torch.inference_mode()
    def __init__(self, model: LlamaModel, row: Row) -> None:
        """Check the step's deltas and capture it. Raises AssertionError if a delta differs from a
        float32 reference.
        """
        torch.manual_seed(row.tokens + row.adapters)
        self._model, self._device = model, model.device
        self._weights, segments = _adapters(row, self._device), _segments(row, self._device)
        self._batch = _batch(row, segments, self._device)
        pages = row.tokens // PAGE + 1
        self._kv = torch.zeros(
            (LAYERS, 2, pages, PAGE, SHAPE.kv_heads, SHAPE.head_dim),
            dtype=model.dtype,
            device=self._device,
        )
        _check(self._weights, segments, row, self._device)
        self.with_lora = self._capture(self._batch)
        self.without = self._capture(replace(self._batch, segments=None))

    def recapture(self) -> None:
        """Capture the step anew, after the LoRA kernels' launch config has changed."""
        self.with_lora = self._capture(self._batch)

    @torch.inference_mode()
    def _capture(self, batch: Batch) -> torch.cuda.CUDAGraph:
        def run() -> None:
            self._model.forward(batch, self._kv, self._weights, _NoAttention())

        run()  # compiles and allocates, as a capture must not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph


def measure(row: Row, step: Pass, replays: int = REPLAYS) -> Measured:
    """Time a pass with and without adapters in turns, so that both see the GPU equally warm."""
    base, lora = medians_ms([step.without.replay, step.with_lora.replay], replays)
    scale = SCALED_TO / LAYERS
    lora_ms = (lora - base) * scale
    return Measured(row, base * scale, lora_ms, row.floor_ms, row.floor_ms / lora_ms)


class _NoAttention:
    """Attention that returns the queries: attention has no adapters."""

    def plan(self, batch: object) -> None:
        pass

    def attend(self, q: torch.Tensor, *_: object) -> torch.Tensor:
        return q


def _adapters(row: Row, device: torch.device) -> LoraWeights:
    """Return an arena with a row's adapters, packed as the slot pool packs them."""
    rows = torch.zeros(LAYERS, len(SHAPE.linears), 3, dtype=torch.int64)
    end = 0
    for layer in range(LAYERS):
        for group in SHAPE.groups.values():
            for side in (0, 1):
                for i in group:
                    rows[layer, i, side], rows[layer, i, 2] = end, row.rank
                    end += row.rank * SHAPE.dims(i)[side]
    table = rows.repeat(row.adapters, 1, 1, 1)
    table[..., :2] += torch.arange(row.adapters)[:, None, None, None] * end
    arena = torch.empty(row.adapters * end, dtype=torch.bfloat16, device=device)
    for piece in arena.split(1 << 28):
        piece.normal_(0.0, 0.02)
    return LoraWeights(arena, table.to(device))


def _segments(row: Row, device: torch.device) -> Segments:
    owners = np.random.default_rng(row.tokens).permutation(row.tokens) % row.adapters
    slots, lengths = np.unique(owners, return_counts=True)
    columns = np.stack((slots, lengths.cumsum() - lengths, lengths)).astype(np.int32)
    parts = torch.from_numpy(columns).to(device).unbind()
    return Segments(parts[0], parts[1], parts[2], row.pool_rank)


def _batch(row: Row, segments: Segments, device: torch.device) -> Batch:
    index = torch.arange(row.tokens, device=device)
    each, ones = np.arange(row.tokens + 1, dtype=np.int32), np.ones(row.tokens, np.int32)
    return Batch(
        token_ids=index % CONFIG["vocab_size"],
        positions=index % PAGE,
        kv_slots=index[None],
        logit_rows=index,
        query_starts=each,
        kv_lengths=ones,
        page_tables=(PageTable(each, np.zeros(row.tokens, np.int32), ones),),
        segments=segments,
    )


def _check(weights: LoraWeights, segments: Segments, row: Row, device: torch.device) -> None:
    """Compare LoRA's delta for each fused linear of one layer with a float32 reference, over fresh
    memory full of NaN.

    segments: tokens of the step by adapter.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    step, layer = begin_step(weights, segments, row.tokens), LAYERS - 1
    for name, members in SHAPE.groups.items():
        d_in = SHAPE.dims(members[0])[0]
        group = LoraGroup(members, d_in, tuple(SHAPE.dims(i)[1] for i in members))
        x = torch.randn(row.tokens, d_in, device=device).bfloat16()
        weight = torch.zeros(sum(group.d_outs), d_in, dtype=x.dtype, device=device)
        _, delta = linear_with_lora(x, weight, None, step, layer, group)
        assert delta is not None
        want = torch.zeros(row.tokens, len(weight), device=device)
        add_lora(want, x, weights, segments, layer, group)
        _assert_close(delta.rows, want, f"{row}, {group}: the delta")
        if name == "gate_up":
            gates, values = want.chunk(2, dim=1)
            parts = linear_with_lora_before_act(x, weight, None, step, layer, group)
            got = rows_of(act_and_mul(*parts))
            _assert_close(got, torch.nn.functional.silu(gates) * values, f"{row}: the gate")
    torch.use_deterministic_algorithms(False)


def _assert_close(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    error = float((got - want).norm() / want.norm())
    assert error <= TOLERANCE, f"{what} is off by {error:.4f}"


def build_model() -> LlamaModel:
    """Build eight layers of random weights on the first CUDA device."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_config(Path(folder) / "model", CONFIG)
        return random_model(path, torch.device("cuda", 0), torch.bfloat16)


def run(rows: Sequence[Row]) -> list[Measured]:
    """Measure the rows, printing each as it is measured."""
    model = build_model()
    return harness.show(measure(row, Pass(model, row)) for row in rows)


def main() -> None:
    """Measure on the first CUDA device."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--rows", type=int, default=len(ROWS), help="only the first rows")
    options = parser.parse_args()
    facts = harness.facts(options.commit)
    harness.write(options.json, facts, rows=run(ROWS[: options.rows]))


if __name__ == "__main__":
    main()
