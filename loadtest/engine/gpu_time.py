"""Times of work on a device, and a GPU's busy time and kernels from torch.profiler's trace."""

import json
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

# The first pattern that matches a kernel's name gives its kind.
_KINDS = (
    ("copies", r"^Mem(cpy|set)"),
    ("shrink", r"shrink"),
    ("expand", r"^_expand"),
    ("LoRA's lists and rows", r"^_(list_owners|list_tiles|gather|replace_logits)"),
    (
        "delta nets",
        r"^_((decode|prefill)_convolution|decode_(delta_rule|with_ring)|(solve|scan)_chunks)",
    ),
    ("Mamba 2", r"^_(decode|prefill)_scan"),
    ("latents", r"^_(store_latents|turn_queries|add_low_rank)"),
    (
        "norms, rotary, KV write, SiLU",
        r"^_((add_)?rms_norm|add_delta|add_weighed|mean_squares|rotary|act_and_mul|gate(_group)?$|quantize"
        r"|squared_relu)",
    ),
    (
        "experts",
        r"^(_products|_gate_up|_down|gate_clamped|choose|sort_by_expert|sum_weighed)|[gG]rouped",
    ),
    ("attention", r"^_(decode|prefill|merge|add_sinks)$|flashinfer|fmha"),
    ("products", r"gemm|nvjet|cutlass|cublas|splitK|gemv|^_(multiply|decode_weight)"),
    (
        "sampling",
        r"^_(sum_chunks|draw|penalise|forbid|find_likeliest|set_given|set_rank)"
        r"|ArgMax|argmax|softmax|[sS]ort|scan|Philox",
    ),
    ("torch's pointwise", r"at::native"),
)
_UNKNOWN = "unknown"
# Shorter gaps occur between kernels of a graph; longer ones are waits for the host.
_WAIT_US = 10.0


@dataclass(frozen=True, slots=True)
class Span:
    """One kernel or copy. Times in microseconds of the trace's clock."""

    name: str
    begin_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class GpuTime:
    """Mean time of a step on the GPU over several equal steps, from the begin of the first span to
    the end of the last.

    A span is a kernel or a copy.
    total_ms: milliseconds from begin to end.
    busy_ms: milliseconds in which at least one span ran.
    idle: share of the time in which no span ran.
    waiting_ms: milliseconds in gaps of 10 µs and more, too long for gaps inside a graph.
    by_kind: milliseconds by kind of kernel, added up; concurrent spans count twice.
    unknown: milliseconds by name of kernels without a kind.
    """

    total_ms: float
    busy_ms: float
    idle: float
    waiting_ms: float
    by_kind: dict[str, float]
    unknown: dict[str, float]


def medians_ms(runs: Sequence[Callable[[], object]], times: int) -> list[float]:
    """Return the median milliseconds of each function, by the GPU's clock if there is one.

    The functions take turns, so that all see the GPU equally warm.

    times: number of runs of each function.
    """
    for _ in range(3):
        for run in runs:
            run()
    took_ms = [[_timed(run) for run in runs] for _ in range(times)]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return [median(ms() for ms in of_run) for of_run in zip(*took_ms, strict=True)]


def watch(work: Callable[[], object]) -> list[Span]:
    """Run some work; return the kernels and copies that the GPU ran for it, as spans.

    The GPU is idle before and after. Only the GPU is recorded: recording torch's calls too would
    slow down the host's part.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        return read_trace(path)


def read_trace(path: Path) -> list[Span]:
    """Read the GPU's spans of a Chrome trace, sorted by begin."""
    spans = [
        Span(event["name"], event["ts"], event["ts"] + event["dur"])
        for event in json.loads(path.read_text())["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return sorted(spans, key=lambda span: span.begin_us)


def gpu_time(spans: list[Span], steps: int) -> GpuTime:
    """Return the GPU's time of one step, from the sorted spans of `steps` steps.

    Raises ValueError without spans.
    """
    if not spans:
        raise ValueError("no kernel in the trace: the profiler has no access to the GPU")
    gaps_us, end_us = [], spans[0].end_us
    for span in spans:
        gaps_us.append(max(0.0, span.begin_us - end_us))
        end_us = max(end_us, span.end_us)
    total_us = end_us - spans[0].begin_us
    per_step = 1e-3 / steps
    by_kind: defaultdict[str, float] = defaultdict(float)
    unknown: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        took = (span.end_us - span.begin_us) * per_step
        by_kind[kind := _kind(span.name)] += took
        if kind == _UNKNOWN:
            unknown[span.name] += took
    return GpuTime(
        total_ms=total_us * per_step,
        busy_ms=(total_us - sum(gaps_us)) * per_step,
        idle=sum(gaps_us) / total_us,
        waiting_ms=sum(gap for gap in gaps_us if gap >= _WAIT_US) * per_step,
        by_kind=dict(by_kind),
        unknown=dict(unknown),
    )


def _timed(run: Callable[[], object]) -> Callable[[], float]:
    """Run a function; return a function that returns the milliseconds of that run.

    Synchronise with the GPU before calling the returned function.
    """
    if not torch.cuda.is_available():
        began_s = time.perf_counter()
        run()
        took_ms = 1e3 * (time.perf_counter() - began_s)
        return lambda: took_ms
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    return lambda: begin.elapsed_time(end)


def _kind(name: str) -> str:
    return next((kind for kind, names in _KINDS if re.search(names, name)), _UNKNOWN)
