"""Find the best way to multiply few tokens by FP8 weights on this GPU, and write it into products.json.

python -m engine.benchmarks.tune_fp8 --json tune.json [--config llama-3.1-8b]

For each linear of a model's layers and each number of tokens up to 256, every launch config of
kernels/fp8/few_rows.py is held against the reference, then timed beside cuBLASLt. Copies of a weight
take turns, more than the GPU's cache holds: a step finds none of its weights there either. The table
keeps the fastest config, or none where cuBLASLt is as fast.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import torch

from lorikeet_engine.kernels.early_launch import launch_options
from lorikeet_engine.kernels.fp8 import Fp8Rows, fused, reference
from lorikeet_engine.kernels.fp8.few_rows import ProductConfig, multiply_few
from lorikeet_engine.kernels.gemv import _gemv, gemv

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
}
TOKENS = (16, 32, 64, 128, 256)
_BLOCKS = (
    # block_out, block_in, warps, stages
    (64, 128, 4, 3),
    (64, 128, 4, 4),
    (64, 128, 4, 8),
    (64, 256, 4, 3),
    (64, 256, 4, 5),
    (128, 128, 4, 4),
    (128, 128, 8, 3),
    (128, 128, 8, 4),
    (128, 128, 8, 6),
    (128, 256, 8, 3),
)
_SHARED = 226 << 10
_APART = 1 << 28  # bytes of a weight's copies, several times an H200's cache


def candidates(tokens: int) -> Iterator[tuple[int, int, int, int, bool]]:
    for block_out, block_in, warps, stages in _BLOCKS:
        if (block_out + tokens) * block_in * stages > _SHARED:
            continue
        if block_out * tokens > 128 * 32 * warps:  # of sums, more than registers hold
            continue
        for tma in (False, True):
            yield block_out, block_in, warps, stages, tma


EARLY = os.environ.get("EARLY", "1") == "1"
ROW_CONFIGS = tuple(
    (rows, columns, warps)
    for rows, columns in ((2, 4096), (4, 2048), (4, 4096), (8, 1024), (8, 2048), (8, 4096), (16, 1024))
    for warps in (4, 8)
)


def one_row(x: torch.Tensor, weight: Fp8Rows, rows: int, columns: int, warps: int) -> torch.Tensor:
    d_out, d_in = weight.rows.shape
    y = x.new_empty((1, d_out))
    _gemv[(-(-d_out // rows),)](
        x, weight.rows, None, weight.scales, y, d_out, d_in, False, rows, columns, num_warps=warps, **launch_options(EARLY)
    )
    return y


def compile_row(case) -> str | None:
    (d_out, d_in), config = case
    row = torch.randn(1, d_in, device="cuda").to(torch.bfloat16)
    weight = Fp8Rows(torch.empty(d_out, d_in, device="cuda", dtype=torch.float8_e4m3fn), torch.empty(d_out, device="cuda"))
    try:
        one_row(row, weight, *config)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{case}: {type(error).__name__}: {str(error)[:200]}"
    return None


def measure_row(name: str) -> None:
    d_out, d_in = SHAPES[name]
    weights = [_numbers(d_out, d_in, seed) for seed in range(max(2, min(32, _APART // (d_out * d_in))))]
    row = torch.randn(1, d_in, device="cuda").to(torch.bfloat16)
    want, found = gemv(row, weights[0].rows, None, weights[0].scales), []
    for config in ROW_CONFIGS:
        try:
            off = (one_row(row, weights[0], *config) - want).abs().max().item()
            found.append((per_call_us(lambda w, c=config: one_row(row, w, *c), weights), config, off))
        except Exception as error:
            print(config, type(error).__name__)
    print(f"one row, {name}:", *(f"{c} {us:.1f} us {d_out * d_in / us / 1e6:.2f} TB/s off {off:.3g};" for us, c, off in sorted(found)[:5]), flush=True)


def programs(tiles: int, sms: int) -> list[int]:
    counts = [sms, 2 * sms, 3 * sms, 4 * sms, tiles]
    counts += [tiles * n for n in (2, 4, 8) if tiles * n <= 5 * sms]
    return sorted(set(counts))


def compile_one(case) -> str | None:
    tokens, (block_out, block_in, warps, stages, tma) = case
    x, weight = _numbers(tokens, 1024, 0), _numbers(256, 1024, 1)
    for count in (256 // block_out, 8):
        config = ProductConfig(block_out, block_in, count, warps, stages, tma)
        try:
            multiply_few(x, weight, None, torch.bfloat16, config)
            torch.cuda.synchronize()
        except Exception as error:
            return f"{case}: {type(error).__name__}: {str(error)[:200]}"
    return None


def _numbers(rows: int, width: int, seed: int) -> Fp8Rows:
    random = torch.Generator("cuda").manual_seed(seed)
    return fused.quantize_rows(
        torch.randn(rows, width, device="cuda", generator=random).to(torch.bfloat16)
    )


def per_call_us(call: Callable[[Fp8Rows], object], weights: list[Fp8Rows]) -> float:
    """A call's microseconds in a graph of calls, each with the next of the weights."""
    call(weights[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call(weight) for weight in weights]
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    del kept
    return 1e3 * statistics.median(times) / len(weights)


def main() -> None:
    out = Path(sys.argv[sys.argv.index("--json") + 1])
    began = time.monotonic()
    until = began + float(os.environ.get("TUNE_S", "150"))
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    cases = [(tokens, case) for tokens in TOKENS for case in candidates(tokens)]
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        shapes = [(shape, config) for shape in SHAPES.values() for config in ROW_CONFIGS]
        rows_failed = pool.map(compile_row, shapes, chunksize=4)
        failed = [error for error in pool.map(compile_one, cases, chunksize=4) if error]
        failed += [error for error in rows_failed if error]
    print(f"{len(cases)} compiled in {time.monotonic() - began:.0f} s; failed: {len(failed)}")
    for error in failed:
        print(error, flush=True)
    for name in SHAPES:
        measure_row(name)
    rows = []
    for tokens in (32, 128, 16, 64, 256):
        for name, (d_out, d_in) in SHAPES.items():
            rows.append(measure(name, d_out, d_in, tokens, sms, until))
            out.write_text(json.dumps(rows, indent=1))


def measure(name, d_out, d_in, tokens, sms, until):
    copies = max(2, min(32, _APART // (d_out * d_in)))
    weights = [_numbers(d_out, d_in, seed) for seed in range(copies)]
    x = _numbers(tokens, d_in, 100)
    row = torch.randn(1, d_in, device="cuda").to(torch.bfloat16)
    want = (x.rows.float() * x.scales[:, None]) @ (weights[0].rows.float() * weights[0].scales[:, None]).T
    rough = torch.randn(tokens, d_in, device="cuda").to(torch.bfloat16)

    def lt(weight):
        return fused.linear(rough, weight, None, x)

    lt_us = per_call_us(lt, weights)
    found = []
    for block_out, block_in, warps, stages, tma in candidates(tokens):
        for count in programs(-(-d_out // block_out), sms):
            if time.monotonic() > until:
                break
            config = ProductConfig(block_out, block_in, count, warps, stages, tma)

            def few(weight, config=config):
                return multiply_few(x, weight, None, torch.bfloat16, config)

            try:
                got = few(weights[0])
                off = ((got.float() - want).norm() / want.norm()).item()
                same = torch.equal(got, few(weights[0]))
                us = per_call_us(few, weights)
            except Exception as error:
                found.append({**asdict(config), "error": f"{type(error).__name__}: {str(error)[:150]}"})
                continue
            found.append({**asdict(config), "us": us, "off": off, "same": same})
    good = sorted((f for f in found if "us" in f and f["off"] < 0.02 and f["same"]), key=lambda f: f["us"])
    bad = [f for f in found if "error" in f or f["off"] >= 0.02 or not f["same"]]
    gemv_us = per_call_us(lambda w: gemv(row, w.rows, None, w.scales), weights)
    nbytes = d_out * d_in
    print(
        f"{name} {tokens}: lt {lt_us:.1f} us ({nbytes / lt_us / 1e6:.2f} TB/s), one row {gemv_us:.1f} "
        f"({nbytes / gemv_us / 1e6:.2f}), {len(good)} good {len(bad)} bad"
    )
    for f in good[:6]:
        print(f"   {f['us']:.1f} us {nbytes / f['us'] / 1e6:.2f} TB/s", {k: v for k, v in f.items() if k != "us"})
    for f in bad[:3]:
        print("   BAD", f)
    sys.stdout.flush()
    return {"linear": name, "tokens": tokens, "lt_us": lt_us, "gemv_us": gemv_us, "found": found}


if __name__ == "__main__":
    main()
