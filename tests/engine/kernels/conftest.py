"""Cases and casts of kernel tests that Triton's interpreter runs."""

from collections import defaultdict
from itertools import combinations
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
    """Mark as soak all cases but a few that cover every pair of parameters' values.

    Each of the few runs in one dtype, by turns. A test with one or two parameters beside the dtype
    runs with all combinations of their values. Does nothing outside Triton's interpreter.
    """
    if not INTERPRETED:
        return
    tests: dict[str, dict[Values, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            others = {k: repr(v) for k, v in item.callspec.params.items() if k != "kind"}
            if item.get_closest_marker("soak") is None:
                tests[item.nodeid.partition("[")[0]][tuple(others.items())].append(item)
    for cases in tests.values():
        chosen = _pairwise(list(cases))
        for others, kinds in cases.items():
            turn = chosen.index(others) if others in chosen else None
            for number, item in enumerate(kinds):
                if turn is None or number != turn % len(kinds):
                    item.add_marker(pytest.mark.soak)


def _pairwise(cases: list[Values]) -> list[Values]:
    """Choose few cases that have every pair of values; greedily, so not always the fewest."""
    pairs = {case: set(combinations(case, 2)) or {case} for case in cases}
    left, chosen = set().union(*pairs.values()), []
    while left:
        best = max(cases, key=lambda case: len(pairs[case] & left))
        chosen.append(best)
        left -= pairs[best]
    return chosen


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
