"""Pairs of values of two kinds, such as families and storages, for parametrised tests."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def pairs(many: Iterable[Any], few: Sequence[Any]) -> list[Any]:
    """Pair each value of `many` with each of `few`.

    `make test` takes each of `many` once, with those of `few` in turn; `make soak` takes the other
    pairs.
    """
    return [
        pytest.param(one, other, marks=[] if i % len(few) == j else [pytest.mark.soak])
        for i, one in enumerate(many)
        for j, other in enumerate(few)
    ]
