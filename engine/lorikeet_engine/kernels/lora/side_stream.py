"""A product of the base model and, on a side stream, LoRA: joined when both are done.

    main  ── x ──┬── product, on some of the multiprocessors ──┬── y and the delta are read
    side         └── shrink ── expand ─────────── delta ───────┘

LoRA's kernels wait for memory more than they use it, and a large product leaves memory idle. cuBLAS
would take every multiprocessor for itself from start to end, so that LoRA could only run before or
after: it is told to leave some free (LaunchConfig.sms_for_lora). What the side stream allocates is
safe in main's hands: whatever it does next, it first waits for main.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from lorikeet_engine.kernels.lora.expand import expand
from lorikeet_engine.kernels.lora.shrink import shrink
from lorikeet_engine.kernels.lora.types import LoraGroup, LoraStep, UnexpandedDelta
from lorikeet_engine.kernels.matmul import linear


def linear_and_lora(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    step: LoraStep,
    layer: int,
    group: LoraGroup,
    delta: torch.Tensor | None = None,
) -> tuple[torch.Tensor, UnexpandedDelta]:
    """Compute the product and the adapters' delta, which is expanded into `delta` if that is given.

    The results may be used on the current stream.
    """
    main, side = torch.cuda.current_stream(x.device), _side_stream(x.device)
    tiles = step.tiles
    # A single row is multiplied by many small programs, which LoRA's can run among.
    sms = 0 if len(x) == 1 else tiles.config.sms_for_lora(tiles.segments * tiles.max_rank)
    side.wait_stream(main)
    if sms:
        with _reserve_sms(sms, x.device):
            y = linear(x, weight, bias)
    with torch.cuda.stream(side):
        shrunk = shrink(x, step.weights, tiles, layer, group)
        if delta is not None:
            expand(shrunk, delta)
    if not sms:
        y = linear(x, weight, bias)
    main.wait_stream(side)
    return y, shrunk


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _reserve_sms(count: int, device: torch.device) -> Iterator[None]:
    """CuBLAS leaves `count` multiprocessors free meanwhile, in this thread's products alone."""
    library = _cublas()
    if library is None:
        yield
        return
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())  # type: ignore[no-untyped-call]
    total = torch.cuda.get_device_properties(device).multi_processor_count
    library.cublasSetSmCountTarget(handle, ctypes.c_int(total - count))
    try:
        yield
    finally:
        library.cublasSetSmCountTarget(handle, ctypes.c_int(0))


@cache
def _cublas() -> ctypes.CDLL | None:
    """Return the cuBLAS that torch has loaded; None, and products are not bounded, with another."""
    try:
        return ctypes.CDLL(f"libcublas.so.{str(torch.version.cuda).partition('.')[0]}")
    except OSError:
        return None
