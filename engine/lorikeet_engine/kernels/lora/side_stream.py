"""A product of the base model with LoRA beside it: two streams, joined when both are done.

    main  ── x ──┬── product, on some of the multiprocessors ──┬── y and the delta are read
    side         └── shrink ── expand ─────────── delta ───────┘

LoRA's kernels wait for memory more than they use it, and a large product leaves memory idle. cuBLAS
would take every multiprocessor for itself from start to end, so that LoRA could only run before or
after: it is told to leave some free (Cut.left_to_lora). What side allocates is safe in main's
hands: whatever side does next, it first waits for main.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from lorikeet_engine.kernels.lora.expand import expand
from lorikeet_engine.kernels.lora.shrink import shrink
from lorikeet_engine.kernels.lora.types import LoraGroup, LoraShare, LoraStep
from lorikeet_engine.kernels.product import linear


def linear_beside_lora(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    step: LoraStep,
    layer: int,
    group: LoraGroup,
    delta: torch.Tensor | None = None,
) -> tuple[torch.Tensor, LoraShare]:
    """The product, and the adapters' share of it, which is expanded into delta if there is one.

    All three may be used on the current stream.
    """
    main, side = torch.cuda.current_stream(x.device), _side_stream(x.device)
    tiles = step.tiles
    # A single row is multiplied by many small programs, which LoRA's can run among.
    left = 0 if len(x) == 1 else tiles.cut.left_to_lora(tiles.segments * tiles.max_rank)
    side.wait_stream(main)
    if left:
        with _leave_free(left, x.device):
            y = linear(x, weight, bias)
    with torch.cuda.stream(side):
        share = shrink(x, step.weights, tiles, layer, group)
        if delta is not None:
            expand(share, delta)
    if not left:
        y = linear(x, weight, bias)
    main.wait_stream(side)
    return y, share


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _leave_free(multiprocessors: int, device: torch.device) -> Iterator[None]:
    """CuBLAS uses so many less than all while this lasts; only this thread's products know it."""
    library = _cublas()
    if library is None:
        yield
        return
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())  # type: ignore[no-untyped-call]
    count = torch.cuda.get_device_properties(device).multi_processor_count
    library.cublasSetSmCountTarget(handle, ctypes.c_int(count - multiprocessors))
    try:
        yield
    finally:
        library.cublasSetSmCountTarget(handle, ctypes.c_int(0))


@cache
def _cublas() -> ctypes.CDLL | None:
    """The library that torch has loaded; where it has another, products are not bounded."""
    try:
        return ctypes.CDLL(f"libcublas.so.{str(torch.version.cuda).partition('.')[0]}")
    except OSError:
        return None
