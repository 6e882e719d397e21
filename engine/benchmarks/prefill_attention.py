"""Ways to attend to a prompt's chunk deep in it, against each other: Llama-3.1-8B's heads, pages.

python -m engine.benchmarks.prefill_attention --json prefill_attention.json

One sequence's chunk of so many rows behind so many tokens, on pages in random order, of layers in
turn whose keys do not fit into the cache together. Ways:

- fa2, fa3: FlashInfer's kernels for paged keys, as they are.
- split: FA3 over the pages before the chunk, cut into as many parts as fill the GPU, all of whose
  keys each row sees; FA2 over the chunk itself; both merged.
- packed: the same with the query heads that share a key head as rows of one head.
- dense fa3, dense cudnn: what keys without pages would give; copying them together is `gather`.

All are held against FA2, and FA2 against float32, before anything is timed.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import flashinfer
import numpy as np
import numpy.typing as npt
import torch

from engine.benchmarks import harness
from lorikeet_engine.kernels.attention.merge import merge

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
GROUP = HEADS // KV_HEADS
ROWS = (128, 192, 288, 384, 768, 2048, 8192)
DEPTHS = (0, 8192, 32_768, 65_536, 122_880)
CHECKED = ((192, 8197), (77, 1000), (384, 4096))  # rows, depth
LAYERS = 4
TILE = 128  # rows of FA3's programs for these heads
MOST_PARTS = 16
CUDNN_ROWS = (192, 2048)  # it takes its time to choose a kernel for each shape
GATHER = "gather"
FULL = 0.95  # the share of the GPU's programs that has work, enough to stop cutting
TOLERANCE = 0.02  # by the norm; two ways round to bfloat16 at different places
_SLEEP_CYCLES = 4_000_000  # some 2 ms, in which the host gets ahead
_LEAST_MS, _MOST_TIMES = 60.0, 20

Run = Callable[[int], torch.Tensor]
"""Attend on a layer → [rows, heads, head_dim]."""


@dataclass(frozen=True, slots=True)
class Row:
    """One way's time for one layer. parts: into which it cut what is before the chunk."""

    rows: int
    depth: int
    way: str
    parts: int
    us: float
    tflops: float
    of_fa2: float


class Inputs:
    """A chunk's queries and its sequence's pages, for each layer."""

    def __init__(self, kv: torch.Tensor, rows: int, depth: int) -> None:
        """kv: [layers, 2, pages, PAGE, KV_HEADS, HEAD_DIM]."""
        self.kv, self.rows, self.depth = kv, rows, depth
        self.device = kv.device
        random = torch.Generator(kv.device).manual_seed(rows + depth)
        size = (rows, HEADS, HEAD_DIM)
        self.q = torch.randn(size, generator=random, device=kv.device).bfloat16()
        order = np.random.default_rng(depth).permutation(kv.shape[2]).astype(np.int32)
        self.pages = order[: -(-(depth + rows) // PAGE)]
        self.before = depth // PAGE  # whole pages before the chunk

    def dense(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values [tokens, KV_HEADS, HEAD_DIM], copied together."""
        pages = torch.from_numpy(self.pages).to(self.device)
        k, v = self.kv[layer].index_select(1, pages).flatten(1, 2)
        tokens = self.depth + self.rows
        return k[:tokens], v[:tokens]

    @property
    def flops(self) -> float:
        """Of both products."""
        return 4.0 * HEADS * HEAD_DIM * self.rows * (self.depth + (self.rows + 1) / 2)


class Wrappers:
    """FlashInfer's wrappers, over one workspace."""

    def __init__(self, device: torch.device) -> None:
        self.workspace = torch.empty(512 << 20, dtype=torch.uint8, device=device)

    def paged(
        self,
        backend: str,
        lengths: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        pages: npt.NDArray[np.int32],
        last: npt.NDArray[np.int64],
        heads: int,
        *,
        causal: bool,
    ) -> Any:
        """A planned one. lengths, counts, last: each sequence's rows, pages, last page's tokens."""
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self.workspace, "NHD", backend=backend
        )
        wrapper.plan(
            _starts(lengths),
            _starts(counts),
            torch.from_numpy(pages),
            torch.from_numpy(last.astype(np.int32)),
            heads,
            KV_HEADS,
            HEAD_DIM,
            PAGE,
            causal=causal,
            sm_scale=HEAD_DIM**-0.5,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        return wrapper

    def whole(self, backend: str, inputs: Inputs, first: int = 0) -> Any:
        """A planned one for the chunk over all its pages from this one on."""
        pages = inputs.pages[first:]
        seen = inputs.depth + inputs.rows - first * PAGE
        last = seen - (len(pages) - 1) * PAGE
        return self.paged(
            backend,
            np.array([inputs.rows]),
            np.array([len(pages)]),
            pages,
            np.array([last]),
            HEADS,
            causal=True,
        )


def plain(backend: str, inputs: Inputs, wrappers: Wrappers) -> Run:
    """FlashInfer's kernels as they are."""
    wrapper = wrappers.whole(backend, inputs)

    def run(layer: int) -> torch.Tensor:
        out: torch.Tensor = wrapper.run(
            inputs.q, tuple(inputs.kv[layer]), out=torch.empty_like(inputs.q)
        )
        return out

    return run


def count_parts(tiles: int, device: torch.device) -> int:
    """Into how many parts to cut keys, so that so many tiles each fill the GPU's programs."""
    programs = torch.cuda.get_device_properties(device).multi_processor_count

    def used(parts: int) -> float:
        return parts * tiles / (programs * math.ceil(parts * tiles / programs))

    counts = range(1, MOST_PARTS + 1)
    return next((n for n in counts if used(n) >= FULL), max(counts, key=used))


def tiles_of(rows: int, *, packed: bool) -> int:
    """FA3's tiles of a chunk, of all heads."""
    heads = KV_HEADS if packed else HEADS
    return math.ceil(rows * (GROUP if packed else 1) / TILE) * heads


def split(inputs: Inputs, wrappers: Wrappers, parts: int, *, packed: bool) -> Run:
    """See the module. parts: of what is before the chunk."""
    rows, each = inputs.rows, GROUP if packed else 1
    heads = HEADS // each
    counts = np.diff(np.linspace(0, inputs.before, parts + 1, dtype=np.int64))
    before = wrappers.paged(
        "fa3",
        np.full(parts, rows * each),
        counts,
        inputs.pages[: inputs.before],
        np.full(parts, PAGE),
        heads,
        causal=False,
    )
    own = wrappers.whole("fa2", inputs, inputs.before)
    index = torch.arange(rows, device=inputs.device).repeat(parts)
    places = torch.tensor(
        [[row * each, rows * each, parts] for row in range(rows)], dtype=torch.int32
    ).to(inputs.device)

    def run(layer: int) -> torch.Tensor:
        kv = tuple(inputs.kv[layer])
        grouped = inputs.q.view(rows, heads, each, HEAD_DIM).transpose(1, 2)
        q = grouped.index_select(0, index).view(-1, heads, HEAD_DIM)
        of_before, before_lse = before.run(q, kv, out=torch.empty_like(q), return_lse=True)
        out, lse = own.run(inputs.q, kv, out=torch.empty_like(inputs.q), return_lse=True)
        return merge(out, lse, of_before, before_lse, places, out)

    return run


def dense_fa3(inputs: Inputs, wrappers: Wrappers) -> Run:
    """FlashInfer's FA3 kernels, which load tiles of dense keys by TMA."""
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        wrappers.workspace, "NHD", backend="fa3"
    )
    starts = _starts(np.array([inputs.depth + inputs.rows]))
    wrapper.plan(
        _starts(np.array([inputs.rows])),
        starts,
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        causal=True,
        sm_scale=HEAD_DIM**-0.5,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    layers = [inputs.dense(layer) for layer in range(LAYERS)]

    def run(layer: int) -> torch.Tensor:
        out: torch.Tensor = wrapper.run(inputs.q, *layers[layer], out=torch.empty_like(inputs.q))
        return out

    return run


def gather(inputs: Inputs) -> Run:
    """What copying keys and values together takes."""
    return lambda layer: inputs.dense(layer)[0]


def dense_cudnn(inputs: Inputs, wrappers: Wrappers, parts: int) -> Run:
    """Torch's kernels of cuDNN, packed and cut as in `split`; parts: a divisor of the pages."""
    rows, each = inputs.rows, inputs.before // parts * PAGE
    own = wrappers.whole("fa2", inputs, inputs.before)
    layers = [
        [part[: each * parts].view(parts, each, KV_HEADS, HEAD_DIM) for part in inputs.dense(layer)]
        for layer in range(LAYERS)
    ]
    places = torch.tensor(
        [[row * GROUP, rows * GROUP, parts] for row in range(rows)], dtype=torch.int32
    ).to(inputs.device)
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention

    def run(layer: int) -> torch.Tensor:
        grouped = inputs.q.view(rows, KV_HEADS, GROUP, HEAD_DIM).transpose(1, 2)
        q = grouped.reshape(1, rows * GROUP, KV_HEADS, HEAD_DIM).repeat(parts, 1, 1, 1)
        k, v = layers[layer]
        of_before, lse = attend(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, True, 0.0, False
        )[:2]
        before = of_before.transpose(1, 2).reshape(-1, KV_HEADS, HEAD_DIM)
        before_lse = lse.reshape(parts, KV_HEADS, -1).transpose(1, 2).reshape(-1, KV_HEADS)
        out, own_lse = own.run(
            inputs.q, tuple(inputs.kv[layer]), out=torch.empty_like(inputs.q), return_lse=True
        )
        return merge(out, own_lse, before, before_lse * math.log2(math.e), places, out)

    return run


def ways_of(inputs: Inputs, wrappers: Wrappers) -> Iterator[tuple[str, int, Callable[[], Run]]]:
    """Name, parts, and what prepares it, of the ways that this chunk can be attended to."""
    yield "fa2", 0, partial(plain, "fa2", inputs, wrappers)
    yield "fa3", 0, partial(plain, "fa3", inputs, wrappers)
    yield "dense fa3", 0, partial(dense_fa3, inputs, wrappers)
    if not inputs.depth:
        return
    for name, packed in (("split", False), ("packed", True)):
        parts = count_parts(tiles_of(inputs.rows, packed=packed), inputs.device)
        yield name, parts, partial(split, inputs, wrappers, parts, packed=packed)
    if inputs.rows in CUDNN_ROWS:
        for parts in (1, 8):
            if inputs.before % parts == 0:
                yield "dense cudnn", parts, partial(dense_cudnn, inputs, wrappers, parts)
    yield GATHER, 0, partial(gather, inputs)


def check(kv: torch.Tensor, wrappers: Wrappers) -> None:
    """Hold all ways against float32 at odd depths too; those that are not near are named."""
    for rows, depth in CHECKED:
        inputs = Inputs(kv, rows, depth)
        k, v = (part.float().repeat_interleave(GROUP, 1) for part in inputs.dense(1))
        mask = torch.ones(rows, depth + rows, dtype=torch.bool, device=kv.device).tril(depth)
        want = torch.nn.functional.scaled_dot_product_attention(
            inputs.q.float().transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=mask,
        )[0].transpose(0, 1)
        for way, parts, prepare in ways_of(inputs, wrappers):
            what = f"{way} {parts}, {rows} at {depth}"
            if (attend := _attempt(what, prepare)) and way != GATHER:
                _attempt(what, partial(_assert_near, attend, want))


def measure(kv: torch.Tensor, wrappers: Wrappers, rows: int, depth: int) -> Iterator[Row]:
    """Time each way that works here; one that does not agree with FA2 is named."""
    inputs = Inputs(kv, rows, depth)
    fa2 = plain("fa2", inputs, wrappers)
    want, fa2_us = fa2(1), _us(fa2)
    for way, parts, prepare in ways_of(inputs, wrappers):
        what = f"{way} {parts}, {rows} at {depth}"
        if (attend := _attempt(what, prepare)) is None:
            continue
        if way != GATHER:
            _attempt(what, partial(_assert_near, attend, want))
        if us := _attempt(what, partial(_us, attend)):
            yield Row(rows, depth, way, parts, us, inputs.flops / us / 1e6, us / fa2_us)


def compile_all(device: torch.device) -> dict[str, float]:
    """The seconds in which each backend's kernels were compiled, all beside one another."""

    def compile_one(backend: str) -> float:
        began_s = time.perf_counter()
        with torch.cuda.device(device):
            kv = torch.zeros(1, 2, 1, PAGE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
            plain(backend, Inputs(kv, 1, 0), Wrappers(device))
        return time.perf_counter() - began_s

    with ThreadPoolExecutor(2) as threads:
        took_s = dict(zip(("fa2", "fa3"), threads.map(compile_one, ("fa2", "fa3")), strict=True))
    print(
        "compiled beside one another:", *(f"{n} {s:.1f} s" for n, s in took_s.items()), flush=True
    )
    return took_s


def run(rows: Iterable[int], depths: Iterable[int], device: torch.device) -> list[Row]:
    """Check, then measure, printing each row as it comes."""
    tokens = max(max(rows) + max(depths), 2 * 8192) + PAGE  # what is checked fits as well
    size = (LAYERS, 2, -(-tokens // PAGE) + 1, PAGE, KV_HEADS, HEAD_DIM)
    kv = torch.randn(size, dtype=torch.bfloat16, device=device)
    wrappers = Wrappers(device)
    check(kv, wrappers)
    return harness.show(
        row for n in rows for depth in depths for row in measure(kv, wrappers, n, depth)
    )


def main() -> None:
    """Measure on the first CUDA device."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    options = parser.parse_args()
    facts = harness.facts(options.commit)
    device = torch.device("cuda", 0)
    with torch.inference_mode():
        compiled_s = compile_all(device)
        rows = run(options.rows, options.depths, device)
    harness.write(options.json, facts, compiled_s=compiled_s, prefill_attention=rows)


def _attempt(what: str, do: Callable[[], Any]) -> Any:
    """What it gives; None where it fails, which is printed."""
    try:
        return do()
    except Exception as error:  # some ways are not there on every GPU
        print(f"{what}: {type(error).__name__}: {str(error).strip().splitlines()[:1]}", flush=True)
        return None


def _assert_near(attend: Run, want: torch.Tensor) -> None:
    error = float((attend(1).float() - want.float()).norm() / want.float().norm())
    assert error <= TOLERANCE, f"off by {error:.4f}"


def _us(attend: Run) -> float:
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


def _starts(lengths: npt.NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(([0], lengths.cumsum())).astype(np.int32))


if __name__ == "__main__":
    main()
