"""What the scheduler plans, and within which limits."""

from dataclasses import dataclass

from lorikeet_engine.errors import AdapterError
from lorikeet_engine.scheduling.sequence import Chunk, ScoredRows, Sequence


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The most tokens, sequences and distinct adapters of one step."""

    tokens: int
    sequences: int
    adapters: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. failed: sequences without their adapter, dropped. scored: what chunks score."""

    chunks: list[Chunk]
    failed: dict[Sequence, AdapterError]
    scored: list[ScoredRows]
