"""Whether this process runs Triton's kernels in Triton's interpreter, on a CPU.

The interpreter must be chosen before Triton is first imported, so it gets a process of its own:
kernels/test_in_interpreter.py starts it.
"""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = (
    [("cpu", torch.float32), ("cpu", torch.float16)]
    if INTERPRETED
    else [
        pytest.param(("cuda", dtype), marks=pytest.mark.gpu)
        for dtype in (torch.bfloat16, torch.float32)
    ]
)


def random(kind: tuple[str, torch.dtype], *shape: int) -> torch.Tensor:
    """Numbers that follow from the shape, on a device and of a dtype."""
    device, dtype = kind
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)
