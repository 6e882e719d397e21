"""Kernels that are launched before the ones ahead of them have ended (Hopper's dependent launch).

A kernel behind another begins some microseconds after its end, and one that reads weights then
waits for the first of them: of a step's 260 kernels each would cost that. Launched early, its
programs are there already, and fetch weights, which no kernel writes, into the cache meanwhile.
Whatever else it reads or writes comes after `wait`.

Every program must call `wait`: a kernel that ended before those ahead of it would let the next one
start too early as well.
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


def launch_options(early: bool) -> dict[str, Any]:
    """What a launch is told beside the kernel's `early`."""
    return {"early": early, **({"launch_pdl": True} if early else {})}


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
