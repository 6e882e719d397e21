"""Settings with which suites run an engine: all at once, in chunks, preempted, on two ranks."""

from collections.abc import Collection
from typing import Any

import pytest

IN_CHUNKS: dict[str, Any] = {"max_batch_tokens": 13, "max_running": 13}


def modes(
    kv_pages: int,
    max_context: int,
    often: Collection[str] = ("in chunks", "on two ranks"),
    **in_chunks: Any,
) -> list[Any]:
    """Return a parameter of each mode: settings of an engine.

    kv_pages, max_context: sizes that make an engine preempt.
    often: modes of `make test`; the others run in `make soak`.
    in_chunks: further settings of the mode "in chunks".
    """
    settings = {
        "at once": {},
        "in chunks": {"max_batch_tokens": 16, **in_chunks},
        "preempted": {"kv_pages": kv_pages, "max_context": max_context},
        "on two ranks": {"tensor_parallel": 2},
    }
    return [
        pytest.param(each, id=name, marks=[] if name in often else pytest.mark.soak)
        for name, each in settings.items()
    ]


def in_worlds(worlds: Collection[str], modes: Collection[Any], on_ranks: str) -> list[Any]:
    """Return a parameter of each world in each mode, for the arguments "world" and "settings".

    on_ranks: the only world that runs on two ranks in `make test`, as ranks cost three times as
        much; `tests/engine/parallel` compares every family's ranks with one process.
    """
    rare = {(world, "on two ranks") for world in worlds if world != on_ranks}
    return [
        pytest.param(
            world,
            *mode.values,
            id=f"{world}-{mode.id}",
            marks=pytest.mark.soak if (world, mode.id) in rare else mode.marks,
        )
        for world in worlds
        for mode in modes
    ]
