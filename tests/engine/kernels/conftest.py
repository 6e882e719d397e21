"""Cases and casts of kernel tests that Triton's interpreter runs."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.interpreter import INTERPRETED

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "fp8e4nv": torch.float8_e4m3fn}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@pytest.hookimpl(tryfirst=True)  # before -m reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run each interpreted case in one dtype, by turns, and leave the other to the soak tests."""
    if not INTERPRETED:
        return
    cases: dict[str, dict[str, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        if isinstance(item, pytest.Function) and "kind" in getattr(item, "fixturenames", ()):
            others = item.name.replace("kind0", "").replace("kind1", "")
            cases[item.nodeid.partition("[")[0]][others].append(item)
    for of_one_test in cases.values():
        for turn, kinds in enumerate(of_one_test.values()):
            for number, item in enumerate(kinds):
                if number != turn % len(kinds):
                    item.add_marker(pytest.mark.soak)


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
