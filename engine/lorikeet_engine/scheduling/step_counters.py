"""What an engine counts of the requests that come and of the steps that it makes."""

import time
from typing import NamedTuple

from lorikeet_engine.adapter import Residency
from lorikeet_engine.scheduling.sequence import Sequence
from lorikeet_engine.telemetry.counters import SIZES, STEP_S, Histogram, Tally


class Launch(NamedTuple):
    """A step that was launched then, by perf_counter: its sequences and distinct adapters.

    ranks: Σ rank of those, where a StepBudget wants to know.
    """

    at_s: float
    sequences: int
    adapters: int
    ranks: int | None


class StepCounters:
    """Counted by the engine's thread, lookups by any; any may read the fields, which only grow."""

    def __init__(self) -> None:
        self.lookups = Tally(Residency)
        self.seconds, self.sequences, self.adapters = map(Histogram, (STEP_S, SIZES, SIZES))
        self.gaps = {found: Histogram(STEP_S) for found in (None, *Residency)}
        self.preemptions = self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self._read_s = 0.0  # when the last step was

    def begun(self, sequence: Sequence) -> None:
        """A choice takes part in its first step."""
        self.prompt_tokens += sequence.prompt_length
        self.cached_tokens += sequence.progress.cached_tokens

    def read(self, launch: Launch) -> float:
        """A step's tokens are there; returns the seconds it took.

        It began when it was launched or the step before it was read.
        """
        now_s = time.perf_counter()
        took_s = now_s - max(launch.at_s, self._read_s)
        self.seconds.add(took_s)
        self.sequences.add(launch.sequences)
        self.adapters.add(launch.adapters)
        self._read_s = now_s
        return took_s

    def told(self, sequence: Sequence) -> None:
        """A token of the step that was read last goes to its caller."""
        self.output_tokens += 1
        progress = sequence.progress
        if progress.told_s is not None:
            self.gaps[progress.found].add(self._read_s - progress.told_s)
        progress.told_s = self._read_s
