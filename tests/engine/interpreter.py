"""Devices and dtypes of kernel tests: a GPU's, or those of Triton's interpreter on a CPU.

The interpreter must be chosen before Triton is first imported, so it runs in a process of its own,
which kernels/test_in_interpreter.py starts.
"""

import os
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)]


def kinds(*dtypes: torch.dtype) -> list[Any]:
    """Pair the device with dtypes: with these on a GPU, else with those that the interpreter has.

    The interpreter cuts digits of bfloat16 off where a GPU rounds
    (findings/triton_interpreter_casts.sh).
    """
    if INTERPRETED:
        return [("cpu", torch.float32), ("cpu", torch.float16)]
    return [pytest.param(("cuda", dtype), marks=pytest.mark.gpu) for dtype in dtypes]


KINDS = kinds(torch.bfloat16, torch.float32)


def slow(*cases: object) -> list[Any]:
    """Mark cases as soak: they take the interpreter long, and a GPU no longer than others.

    A case that is a tuple has a value for each of several parameters.
    """
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*value, marks=pytest.mark.soak) for value in values]


def random(kind: tuple[str, torch.dtype], *shape: int) -> torch.Tensor:
    """Draw numbers with a seed made of the shape. kind: device and dtype."""
    device, dtype = kind
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)
