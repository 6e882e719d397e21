"""How many adapters one GPU holds beside Llama-3.1-8B, and that they can be used.

python -m engine.benchmarks.residents --json residents.json

2,000 adapters of rank 8 on q and v and 300 of rank 16 on all linears are brought to a slot pool of
exactly their size, from a host arena that holds a few of them at a time; KV pages take 90% of what
is left. Then 256 requests use 256 of the adapters, drawn at random: once held against a plain
forward pass, once timed.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.benchmarks import plain, results
from engine.benchmarks.offline import Run, Work, generate
from engine.benchmarks.random_adapters import Nowhere, fill_device, random_layout, random_refs
from engine.benchmarks.random_engine import SETTINGS
from engine.benchmarks.random_model import LLAMA_3_1_8B, random_model, write_config
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.adapter_format import LINEARS, BaseShape
from lorikeet_engine.device_memory import Share, gib
from lorikeet_engine.engine import Engine, EngineSettings

Q_AND_V = (LINEARS.index("q_proj"), LINEARS.index("v_proj"))
HOST_BYTES = 2 << 30
WORK = Work("256 of the residents", 64, 128)


@dataclass(frozen=True, slots=True)
class Kind:
    """So many adapters of one rank on the same linears."""

    count: int
    rank: int
    linears: tuple[int, ...]


KINDS = (Kind(2000, 8, Q_AND_V), Kind(300, 16, tuple(range(len(LINEARS)))))


@dataclass(frozen=True, slots=True)
class Row:
    """What was there in the end. arena_share: of the slot pool's bytes that adapters occupy.

    fill_s: of loading, without making the adapters up; took_s: with that.
    """

    adapters: int
    arena_bytes: int
    arena_share: float
    kv_bytes: int
    kv_tokens: int
    fill_s: float
    took_s: float
    tokens_per_s: float
    shortfall: float

    @property
    def loads_per_s(self) -> float:
        """While the slot pool was filled."""
        return self.adapters / self.fill_s


def measure(
    folder: Path,
    kinds: Sequence[Kind] = KINDS,
    config: Mapping[str, Any] = LLAMA_3_1_8B,
    settings: EngineSettings = SETTINGS,
    host_bytes: int = HOST_BYTES,
    work: Work = WORK,
) -> Row:
    """Fill, check, time. Raises AssertionError where an adapter or a token is not as it should be.

    folder: for the engine's files. settings: all but folders, KV cache and adapters.
    """
    shape = BaseShape.from_config(config)
    layouts = [random_layout(shape, kind.rank, kind.linears) for kind in kinds]
    elements = [kind.count * layout.elements for kind, layout in zip(kinds, layouts, strict=True)]
    settings = replace(
        settings,
        model=write_config(folder / "model", config),
        cache_dir=folder / "cache",
        kv_bytes=Share(0.9),
        max_batch_adapters=work.requests,
        adapter_gpu_bytes=sum(elements) * settings.torch_adapter_dtype.itemsize,
        adapter_host_bytes=host_bytes,
    )
    engine = Engine(settings, Nowhere(), random_model)
    refs = random_refs(sum(kind.count for kind in kinds))
    began_s, fill_s, first = time.perf_counter(), 0.0, 0
    for kind, layout in zip(kinds, layouts, strict=True):
        fill_s += fill_device(engine._tiers, layout, refs[first : first + kind.count])
        first += kind.count
    took_s = time.perf_counter() - began_s
    shortfall = plain.check(engine, plain.some(_run(engine, work, 0, refs).answers))
    tokens_per_s = _run(engine, work, 1, refs).tokens_per_s
    report = engine.report()
    there = [a.ref for a in report.adapters if a.residency is Residency.GPU]
    assert sorted(there) == sorted(refs), f"{len(there)} of {len(refs)} adapters are on the device"
    engine.close()
    return Row(
        len(there),
        report.arena_bytes_total,
        report.arena_bytes_used / report.arena_bytes_total,
        engine._runner._kv.nbytes,
        report.kv_pages_total * settings.page_size,
        fill_s,
        took_s,
        tokens_per_s,
        shortfall,
    )


def show(row: Row, work: Work = WORK) -> None:
    """Print a row."""
    print(
        f"{row.adapters:,} adapters on the device: {gib(row.arena_bytes)}, {row.arena_share:.1%} "
        f"of it in use\n"
        f"KV cache: {gib(row.kv_bytes)} ({row.kv_bytes / 1e9:.1f} GB), {row.kv_tokens:,} tokens\n"
        f"filled in {row.fill_s:.2f} s, {row.loads_per_s:,.0f} loads/s "
        f"({row.took_s:.1f} s with making them up)\n"
        f"{work.label}: {row.tokens_per_s:,.0f} tokens/s, shortfall {row.shortfall:.4f}",
        flush=True,
    )


def main() -> None:
    """Measure on one engine."""
    options = results.arguments(__doc__).parse_args()
    facts = results.facts(options.commit)
    with tempfile.TemporaryDirectory() as folder:
        row = measure(Path(folder))
    show(row)
    results.write(options.json, facts, residents=asdict(row))


def _run(engine: Engine, work: Work, run: int, refs: Sequence[AdapterRef]) -> Run:
    """Every request of `work` with an adapter of its own, drawn at random; the same every time."""
    chosen = np.random.default_rng(1).permutation(len(refs))[: work.requests]
    requests = work.draw(engine.config.vocab_size, run)
    return generate(
        engine, [replace(r, adapter=refs[i]) for r, i in zip(requests, chosen, strict=True)]
    )


if __name__ == "__main__":
    main()
