"""An engine that has made the plain path's tokens; picklable, for EngineHost to build."""

from typing import Any

from engine.benchmarks import plain
from engine.benchmarks.offline import Work, generate
from engine.benchmarks.random_engine import random_engine
from lorikeet_engine.engine import Engine


def checked_engine(work: Work, **arguments: Any) -> Engine:
    """random_engine's, with `work` done. Raises AssertionError where its tokens are wrong."""
    engine = random_engine(**arguments)
    answers = generate(engine, work.draw(engine.config.vocab_size, 0)).answers
    plain.check(engine, plain.some(answers))
    return engine
