"""What an engine counts about its requests and steps."""

import time
from typing import NamedTuple

from lorikeet_engine.adapter import Residency
from lorikeet_engine.scheduling.sequence import Sequence
from lorikeet_engine.scheduling.step_budget import ExpectedStep
from lorikeet_engine.telemetry.counters import SIZES, STEP_S, Histogram, TierCounter


class StepLaunch(NamedTuple):
    """When a step was launched, by perf_counter, with how many sequences and distinct adapters.

    expected: what the StepBudget learns from; None without one, or if it learns nothing.
    """

    launched_s: float
    sequences: int
    adapters: int
    expected: ExpectedStep | None


class StepCounters:
    """Counters that only grow. The engine's thread counts all but lookups; any thread may read.

    lookups: requests by where their adapter was. inter_token_s: time between two tokens of a
    choice that come apart, by where its adapter was when the request came; None without one.
    """

    def __init__(self) -> None:
        self.lookups = TierCounter(Residency)
        self.seconds, self.sequences, self.adapters = map(Histogram, (STEP_S, SIZES, SIZES))
        self.inter_token_s = {tier: Histogram(STEP_S) for tier in (None, *Residency)}
        self.preemptions = self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self._read_s = 0.0  # when the last step was read

    def sequence_begun(self, sequence: Sequence) -> None:
        """Count a choice that takes part in its first step."""
        self.prompt_tokens += sequence.prompt_length
        self.cached_tokens += sequence.timings.cached_tokens

    def step_read(self, launch: StepLaunch) -> float:
        """Count a step whose tokens have just been read; returns the seconds it took.

        They count from its launch, or from when the step before it was read if that was later.
        """
        now_s = time.perf_counter()
        took_s = now_s - max(launch.launched_s, self._read_s)
        self.seconds.add(took_s)
        self.sequences.add(launch.sequences)
        self.adapters.add(launch.adapters)
        self._read_s = now_s
        return took_s

    def tokens_delivered(self, sequence: Sequence, tokens: int) -> None:
        """Count the tokens, if any, of the step that was read last, which come to the caller."""
        if not tokens:
            return
        self.output_tokens += tokens
        timings = sequence.timings
        if timings.last_token_s is not None:
            self.inter_token_s[timings.residency].add(self._read_s - timings.last_token_s)
        timings.last_token_s = self._read_s
