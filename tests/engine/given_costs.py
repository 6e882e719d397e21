"""Engines that are given the costs of steps, where no test is about measuring them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from lorikeet_engine.costs import RowsTime, StepCosts
from lorikeet_engine.execution import assembly
from lorikeet_engine.execution.step_timer import StepTimer
from lorikeet_engine.settings import EngineSettings

_COSTS = StepCosts(  # about those of a model of two layers and 64 columns
    rows=(RowsTime(1, 1e-3), RowsTime(32, 2e-3), RowsTime(256, 6e-3)),
    seen_token_s=0.0,
    prompt_seen_s=0.0,
    pieces_s=0.0,
    lora_s=5e-4,
    rank_s=1e-5,
    lora_token_s=1e-6,
)


@contextmanager
def given_costs() -> Iterator[None]:
    """Give engines that start in the block the costs of steps, which take 0.1 s to measure."""

    def costs(runner: Any, kv_pages: int, *parts: Any) -> StepCosts:
        of: EngineSettings = parts[-1]
        steps, tokens = StepTimer(runner, kv_pages, of), of.max_batch_tokens
        windows = {"window": steps.window, "windowed": steps.windowed}
        return replace(_COSTS, step_tokens=tokens, max_running=of.max_running, **windows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "measure_step_costs", costs)
        yield
