"""Whether this process runs Triton's kernels in Triton's interpreter, on a CPU.

The interpreter must be chosen before Triton is first imported, so it gets a process of its own:
kernels/test_in_interpreter.py starts it.
"""

import os
from typing import Any

import numpy as np
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
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "fp8e4nv": torch.float8_e4m3fn}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@pytest.fixture
def exact_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter, if this process runs it, cast FP8 as a GPU does.

    By itself it cuts digits off where a GPU rounds, and knows no NaN of E4M3: torch casts instead.
    """
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    own = interpreter._convert_float

    def cast(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if "fp8e4nv" not in (source.name, target.name):
            return own(data, source, target, rounding)
        given = torch.from_numpy(np.ascontiguousarray(data)).view(_DTYPES[source.name])
        made = given.to(_DTYPES[target.name])
        return made.view(_BITS[made.itemsize]).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", cast)


def random(kind: tuple[str, torch.dtype], *shape: int) -> torch.Tensor:
    """Numbers that follow from the shape, on a device and of a dtype."""
    device, dtype = kind
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)
