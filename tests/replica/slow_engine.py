"""Slow engines in another process."""

import time

from lorikeet.replica.grammar_matcher import ModelGrammars
from lorikeet.settings import Settings
from lorikeet_engine.engine import Engine
from lorikeet_engine.scheduling.request_queue import InputProcessor
from tests.replica.quick_engine import quick_engine

SLOW_S = 0.15
"""Seconds that a slow step takes."""


def slow_to_submit(settings: Settings, base_model: str) -> Engine:
    """Build an engine that takes each request slowly, one after the other."""
    InputProcessor.process = _slowly(InputProcessor.process)  # type: ignore[method-assign]
    return quick_engine(settings, base_model)


def slow_to_compile(settings: Settings, base_model: str) -> Engine:
    """Build an engine that compiles each grammar slowly."""
    ModelGrammars.compile = _slowly(ModelGrammars.compile)  # type: ignore[method-assign]
    return quick_engine(settings, base_model)


def _slowly(method):
    def slow(*arguments):
        time.sleep(SLOW_S)
        return method(*arguments)

    return slow
