"""Attention of a prompt's chunk by FA2, by FA3, and as the engine does it on Hopper.

python -m engine.benchmarks.prefill_attention --json prefill_attention.json

Llama-3.1-8B's heads: one sequence's chunk of M rows behind N tokens, on pages in random
order. Layers take turns, so that none finds its keys in the cache. `uncut` is one launch of FA3's
kernels, `served` what HopperPrefill makes of a chunk. All are held against torch's attention, and
against one another, before they are timed.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch

from engine.benchmarks import harness
from lorikeet_engine.kernels.attention import hopper_prefill
from lorikeet_engine.kernels.attention.flashinfer import FlashInferAttention
from lorikeet_engine.kernels.attention.prefixes import PlannedSequences, cut_prefixes
from lorikeet_engine.kernels.attention.protocol import AttentionShape, PageTable
from lorikeet_engine.kernels.attention.sdpa import SdpaAttention

PAGE = 16
SHAPE = AttentionShape(32, 8, 128, PAGE, torch.bfloat16)
ROWS = (128, 192, 288, 384, 768, 2048, 8192)
DEPTHS = (0, 8192, 32_768, 65_536, 122_880)
CHECKED = ((192, 8197), (77, 10_000), (384, 16_384))  # rows, depth
LAYERS = 4
TOLERANCE = 0.02  # by the norm; two ways round to bfloat16 at different places
_SLEEP_CYCLES = 4_000_000  # some 2 ms, in which the host gets ahead
_LEAST_MS, _MOST_TIMES = 60.0, 20

Attend = Callable[[int], torch.Tensor]
"""Attend on a layer → [rows, heads, head_dim]."""


@dataclass(frozen=True, slots=True)
class Row:
    """A chunk's times for one layer, in µs. parts: into which `served` cut what is before it.

    of_fa2: the time as served, as a share of FA2's.
    """

    rows: int
    depth: int
    fa2_us: float
    uncut_us: float
    served_us: float
    parts: int
    tflops: float
    of_fa2: float


class Chunk:
    """A chunk's queries, and its sequence's pages in each of the layers."""

    def __init__(self, kv: torch.Tensor, rows: int, depth: int) -> None:
        """kv: [layers, 2, pages, PAGE, kv_heads, head_dim]."""
        self.kv, self.rows, self.depth = kv, rows, depth
        random = torch.Generator(kv.device).manual_seed(rows + depth)
        size = (rows, SHAPE.heads, SHAPE.head_dim)
        self.q = torch.randn(size, generator=random, device=kv.device).bfloat16()
        tokens = rows + depth
        order = np.random.default_rng(depth).permutation(kv.shape[2]).astype(np.int32)
        pages = order[: -(-tokens // PAGE)]
        table = PageTable(np.array([0, len(pages)], np.int32), pages, np.array([tokens], np.int32))
        self.batch = PlannedSequences(np.array([0, rows], np.int32), (table,))

    def attend(self, backend: FlashInferAttention | SdpaAttention) -> Attend:
        """Plan it; attending launches the kernels only."""
        backend.plan(self.batch)
        return lambda layer: backend.attend(self.q, self.kv[layer], self.batch)

    @property
    def flops(self) -> float:
        """The operations of both products."""
        seen = self.rows * (self.depth + (self.rows + 1) / 2)
        return 4.0 * SHAPE.heads * SHAPE.head_dim * seen


class Backends:
    """The engine's back end without FA3's kernels and with them."""

    def __init__(self, device: torch.device) -> None:
        """Compile the kernels: FA2's first, so that each one's time is its own."""
        kv = torch.zeros(1, 2, 1, PAGE, SHAPE.kv_heads, SHAPE.head_dim, device=device).bfloat16()
        self.compiled_s = dict[str, float]()
        made = []
        for name, long_contexts in (("FA2", False), ("FA3", True)):
            began_s = time.perf_counter()
            made.append(FlashInferAttention(replace(SHAPE, long_contexts=long_contexts), device))
            Chunk(kv, 1, 0).attend(made[-1])
            if (hopper := made[-1]._hopper) is not None:
                hopper.plan(Chunk(kv, 1, 0).batch)
            self.compiled_s[name] = time.perf_counter() - began_s
        self.fa2, self.served = made
        print("compiled:", *(f"{name} {s:.1f} s" for name, s in self.compiled_s.items()))

    def uncut(self, chunk: Chunk) -> Attend:
        """FA3's kernels as they are."""
        hopper = self.served._hopper
        assert hopper is not None, "this GPU is not Hopper"
        hopper_prefill.cut_prefixes = lambda *_: None  # type: ignore[attr-defined]
        torch.cuda.synchronize()  # plans are copied from pinned buffers
        hopper.plan(chunk.batch)
        torch.cuda.synchronize()
        hopper_prefill.cut_prefixes = cut_prefixes  # type: ignore[attr-defined]
        return lambda layer: hopper.attend(chunk.q, chunk.kv[layer], None)


def check(kv: torch.Tensor, backends: Backends) -> None:
    """Hold all against torch. Raises AssertionError."""
    for rows, depth in CHECKED:
        chunk = Chunk(kv, rows, depth)
        want = chunk.attend(SdpaAttention())(1)
        for attend in (
            chunk.attend(backends.fa2)(1),
            backends.uncut(chunk)(1),
            chunk.attend(backends.served)(1),
        ):
            _assert_near(attend, want, f"{rows} at {depth}")


def measure(kv: torch.Tensor, backends: Backends, rows: int, depth: int) -> Row:
    """Check and time a chunk."""
    chunk, what = Chunk(kv, rows, depth), f"{rows} at {depth}"
    fa2 = chunk.attend(backends.fa2)
    want, fa2_us = fa2(1), _us(fa2)
    uncut = backends.uncut(chunk)
    _assert_near(uncut(1), want, what)
    uncut_us = _us(uncut)
    served = chunk.attend(backends.served)
    _assert_near(served(1), want, what)
    us, hopper = _us(served), backends.served._planned_hopper
    parts = len(hopper._cut.parts.query_starts) - 1 if hopper and hopper._cut else 1
    return Row(rows, depth, fa2_us, uncut_us, us, parts, chunk.flops / us / 1e6, us / fa2_us)


@torch.inference_mode()
def run(rows: Iterable[int], depths: Iterable[int], backends: Backends) -> list[Row]:
    """Check, then measure, printing each row as it comes."""
    rows, depths = list(rows), list(depths)
    tokens = max(max(rows) + max(depths), 2 * max(sum(at) for at in CHECKED))
    size = (LAYERS, 2, -(-tokens // PAGE) + 1, PAGE, SHAPE.kv_heads, SHAPE.head_dim)
    kv = torch.randn(size, dtype=torch.bfloat16, device="cuda")
    check(kv, backends)
    return harness.show(_measure_all(kv, backends, rows, depths))


def main() -> None:
    """Measure on the first CUDA device."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    options = parser.parse_args()
    facts = harness.facts(options.commit)
    backends = Backends(torch.device("cuda", 0))
    rows = run(options.rows, options.depths, backends)
    harness.write(options.json, facts, compiled_s=backends.compiled_s, prefill_attention=rows)


def _measure_all(
    kv: torch.Tensor, backends: Backends, rows: Iterable[int], depths: Iterable[int]
) -> Iterator[Row]:
    for n in rows:
        for depth in depths:
            yield measure(kv, backends, n, depth)


def _assert_near(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    error = float((got.float() - want.float()).norm() / want.float().norm())
    assert error <= TOLERANCE, f"{what}: off by {error:.4f}"


def _us(attend: Attend) -> float:
    """The median time of one layer, the host ahead of the GPU."""
    attend(0)
    took_ms: list[float] = []
    while not took_ms or (sum(took_ms) < _LEAST_MS and len(took_ms) < _MOST_TIMES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_SLEEP_CYCLES)
        begin.record()
        for layer in range(LAYERS):
            attend(layer)
        end.record()
        end.synchronize()
        took_ms.append(begin.elapsed_time(end))
    return 1e3 * median(took_ms) / LAYERS


if __name__ == "__main__":
    main()
