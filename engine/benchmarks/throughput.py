"""Offline throughput: many greedy requests at once on Llama-3.1-8B's shapes with random weights.

python -m engine.benchmarks.throughput --json results.json

Every row is the second of two runs with other prompts, so nothing comes from the prefix cache.
Before a row is timed, tokens of its first run are held against a plain forward pass: one sequence,
no graphs, torch's attention. The engine has its LoRA path on in every row.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.benchmarks.plain import plain_logits
from engine.benchmarks.random_adapters import Shelf
from engine.benchmarks.random_model import LLAMA_3_1_8B, random_model, write_config
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.adapter_format import BaseShape
from lorikeet_engine.engine import Engine, EngineSettings
from lorikeet_engine.request import Failed, Request, SamplingParams

RANK = 16
CHECKED = 3
# A token may fall short of the plain path's best by this share of it: bfloat16 through 32 layers.
TOLERANCE = 16 * torch.finfo(torch.bfloat16).eps


@dataclass(frozen=True, slots=True)
class Work:
    """Requests at once; adapters: how many distinct ones they use, 0 for the base model."""

    name: str
    prompt_tokens: int
    output_tokens: int
    adapters: int = 0
    requests: int = 256


WORKS = (
    Work("base", 256, 128),
    Work("1 adapter", 256, 128, 1),
    Work("8 adapters", 256, 128, 8),
    Work("32 adapters", 256, 128, 32),
    Work("128 adapters", 256, 128, 128),
    Work("base", 16, 256),
    Work("128 adapters", 16, 256, 128),
)


@dataclass(frozen=True, slots=True)
class Row:
    """What one Work gave. gap: the worst shortfall of a checked token, as a share of the best."""

    work: Work
    tokens_per_s: float
    decode_step_ms: float
    gap: float


def measure(engine: Engine, work: Work, refs: list[AdapterRef]) -> Row:
    """Check, then time; raises AssertionError where the engine's tokens are wrong."""
    requests = _requests(work, refs, seed=1, vocab=engine.config.vocab_size)
    tokens, _ = _generate(engine, requests)
    gap = max(_gap(engine, request, tokens) for request in requests[:CHECKED])
    assert gap <= TOLERANCE, f"{work}: tokens fall {gap:.3f} short of the plain path's"
    tokens, steps_s = _generate(engine, _requests(work, refs, 2, engine.config.vocab_size))
    made = sum(map(len, tokens.values()))
    assert made == work.requests * work.output_tokens, f"{work}: {made} tokens"
    decode_s = statistics.median(steps_s[-work.output_tokens // 2 :])
    return Row(work, made / sum(steps_s), decode_s * 1e3, gap)


def _requests(work: Work, refs: list[AdapterRef], seed: int, vocab: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    sampling = SamplingParams(max_tokens=work.output_tokens, temperature=0.0, ignore_eos=True)
    return [
        Request(
            f"{seed}-{i}",
            (tuple(rng.integers(0, vocab, work.prompt_tokens).tolist()),),
            sampling,
            adapter=refs[i % work.adapters] if work.adapters else None,
        )
        for i in range(work.requests)
    ]


def _generate(engine: Engine, requests: list[Request]) -> tuple[dict[str, list[int]], list[float]]:
    """Every request's tokens, and how long each step took."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    steps_s = []
    for request in requests:
        engine.submit(request)
    left = len(requests)
    while left:
        began_s = time.perf_counter()
        engine.wait(1.0)
        for output in engine.step():
            if isinstance(output, Failed):
                raise output.error
            tokens[output.request_id] += output.token_ids
            left -= output.finish is not None
        steps_s.append(time.perf_counter() - began_s)
    return tokens, steps_s


def _gap(engine: Engine, request: Request, tokens: Mapping[str, list[int]]) -> float:
    """How far the made tokens' logits are under the plain path's best, given what came before."""
    made = tokens[request.request_id]
    logits = plain_logits(engine._runner.model, engine._tiers, request, made)
    best = logits.amax(-1)
    chosen = logits.gather(1, torch.tensor(made, device=logits.device)[:, None])[:, 0]
    return float(((best - chosen) / best).max())


def run(
    config: Mapping[str, Any], settings: EngineSettings, works: tuple[Work, ...], folder: Path
) -> list[Row]:
    """Measure `works` on one engine; prints each row as it comes."""
    shape = BaseShape.from_config(config)
    shelf = Shelf(folder / "blobs", shape, max(work.adapters for work in works), RANK)
    model = write_config(folder / "model", config)
    settings = replace(settings, model=model, cache_dir=folder / "cache")
    engine = Engine(settings, shelf, random_model)
    rows: list[Row] = []
    base: dict[int, float] = {}
    print("work           in/out    tok/s   of base  decode step   gap")
    for work in works:
        row = measure(engine, work, shelf.refs)
        base.setdefault(work.prompt_tokens, row.tokens_per_s)
        share = row.tokens_per_s / base[work.prompt_tokens]
        print(
            f"{work.name:<13}{work.prompt_tokens:>4}/{work.output_tokens:<4}"
            f"{row.tokens_per_s:>9.0f}{share:>9.0%}{row.decode_step_ms:>10.2f} ms{row.gap:>8.4f}",
            flush=True,
        )
        rows.append(row)
    engine.close()
    return rows


def _commit() -> str:
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return git.stdout.strip() or "unknown"


def main() -> None:
    """Measure on the first CUDA device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the numbers go")
    parser.add_argument("--commit", default=_commit(), help="what is measured")
    parser.add_argument("--rows", type=int, default=len(WORKS), help="only the first rows")
    options = parser.parse_args()
    settings = EngineSettings(
        model=Path(),
        cache_dir=Path(),
        device="cuda",
        dtype="bfloat16",
        adapter_dtype="bfloat16",
        kv_bytes=20 << 30,
        max_context=2048,
        max_batch_tokens=8192,
        adapter_gpu_bytes=11 << 30,
        adapter_host_bytes=11 << 30,
        adapter_disk_bytes=16 << 30,
        max_rank=RANK,
    )
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}, torch {torch.__version__}, commit {options.commit}")
    with tempfile.TemporaryDirectory() as folder:
        rows = run(LLAMA_3_1_8B, settings, WORKS[: options.rows], Path(folder))
    facts = {"gpu": gpu, "torch": torch.__version__, "commit": options.commit}
    options.json.write_text(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
