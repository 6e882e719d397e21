"""Kernels that are launched before those ahead of them have ended (Hopper's dependent launch).

Behind another a kernel begins some microseconds after its end, and a product then waits for the
first of its weights: each of a step's 260 kernels would. Launched early, its programs are there
already, and fetch weights, which no kernel writes, into the cache meanwhile. Whatever else they
read or write comes after `wait`.

Each kernel that is launched so must call `wait` in every program: else it could end before those
ahead of it, and the next would take them for done. A kernel behind a stream that joins its own is
launched as ever, but lets the next one be launched early.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


@cache
def can_launch_early(device: torch.device) -> bool:
    """Whether this GPU can: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device, *, joined: bool = False) -> dict[str, Any]:
    """What a launch is told, the kernel's own `early` too; joined: another stream's work is read.

    That stream's last kernel may still run once those ahead on the kernel's own have ended.
    """
    early = can_launch_early(device)
    return {"early": early, **({"launch_pdl": True} if early and not joined else {})}


@triton.jit  # type: ignore[untyped-decorator]
def wait(early: tl.constexpr) -> None:
    """Wait until all kernels ahead have ended, and let the next one be launched meanwhile."""
    if early:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit  # type: ignore[untyped-decorator]
def prefetch(places: tl.tensor) -> None:
    """Fetch the 128 bytes around each of these pointers into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [places.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
