"""Cases of kernel tests that `make test` compiles or interprets, and the interpreter's casts."""

from collections import defaultdict
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.interpreter import INTERPRETED

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "fp8e4nv": torch.float8_e4m3fn}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
Values = tuple[tuple[str, str], ...]  # names and values of a case's parameters


@pytest.hookimpl(tryfirst=True)  # before -m reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as soak all cases of this folder but a few that cover the parameters' values.

    In Triton's interpreter the few cover every pair of values, each in one dtype, by turns: a test
    with one or two parameters beside the dtype runs with all combinations. Tests that compile
    kernels need a second or more for each case: the few have every value once.
    """
    tests: dict[str, dict[Values, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        compiles = item.path.name == "test_kernels_compile.py"
        if not (INTERPRETED or compiles):
            continue
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            others = {k: repr(v) for k, v in item.callspec.params.items() if k != "kind"}
            if item.get_closest_marker("soak") is None:
                tests[item.nodeid.partition("[")[0]][tuple(others.items())].append(item)
    for cases in tests.values():
        chosen = _covering(list(cases), 2 if INTERPRETED else 1)
        for others, kinds in cases.items():
            turn = chosen.index(others) if others in chosen else None
            for number, item in enumerate(kinds):
                if turn is None or number != turn % len(kinds):
                    item.add_marker(pytest.mark.soak)


def _covering(cases: list[Values], size: int) -> list[Values]:
    """Choose few cases that have every value, or with a size of 2 every pair of values.

    Chooses greedily, so not always the fewest.
    """
    covered = {case: set(combinations(case, size)) or {case} for case in cases}
    left, chosen = set().union(*covered.values()), []
    while left:
        best = max(cases, key=lambda case: len(covered[case] & left))
        chosen.append(best)
        left -= covered[best]
    return chosen


@pytest.fixture
def exact_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter, if this process runs it, cast FP8 as a GPU does.

    By itself it halves numbers that round up to some powers of two, does not saturate, and knows no
    NaN of E4M3 (findings/triton_interpreter_casts.sh): torch casts instead.
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
