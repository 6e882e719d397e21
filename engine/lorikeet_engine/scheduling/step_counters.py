"""Counters of an engine's requests and steps."""

import time
from typing import NamedTuple

from lorikeet_engine.adapter import Residency
from lorikeet_engine.request import DraftCounts, DraftSource
from lorikeet_engine.scheduling.host_pages import HostPageCounts
from lorikeet_engine.scheduling.sequence import Sequence
from lorikeet_engine.scheduling.state_pool import StateCounts
from lorikeet_engine.scheduling.step_budget import ExpectedStep
from lorikeet_engine.telemetry.counters import SIZES, STEP_S, Histogram, TierCounter


class StepLaunch(NamedTuple):
    """Record of a step's launch.

    launched_s: time of the launch, by perf_counter.
    sequences: number of sequences in the step.
    adapters: number of distinct adapters in the step.
    expected: expected time, with which StepBudget.record compares the measured time; None without
        decodes, without an inter-token goal, or if the step is not recorded.
    """

    launched_s: float
    sequences: int
    adapters: int
    expected: ExpectedStep | None


class StepCounters:
    """Counters of requests and steps, which only grow.

    Any thread may read them. Any thread may count in `lookups`; only the engine's thread counts in
    the other counters.

    lookups: number of requests by the tier that held their adapter when they came.
    seconds: histogram of the time that a step took.
    sequences: histogram of the number of sequences in a step.
    adapters: histogram of the number of distinct adapters in a step.
    inter_token_s: histograms of the time between two outputs of a choice, by the tier that held its
        adapter when the request came; None without an adapter.
    states: counts of cached states of delta nets.
    host_pages: counts of KV pages in host memory.
    disk_pages: counts of KV pages and states in files on the disk.
    drafts: numbers of verified and of accepted drafted tokens, by the text in which they were
        found (the sequence itself or recent answers).
    """

    def __init__(self) -> None:
        self.lookups = TierCounter(Residency)
        self.seconds, self.sequences, self.adapters = map(Histogram, (STEP_S, SIZES, SIZES))
        self.inter_token_s = {tier: Histogram(STEP_S) for tier in (None, *Residency)}
        self.states, self.host_pages = StateCounts(), HostPageCounts()
        self.disk_pages = HostPageCounts()
        self.preemptions = self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.host_tokens = 0
        self.drafts = {source: DraftCounts(source, 0, 0) for source in DraftSource}
        self._read_s = 0.0  # time at which the last step was read

    def sequence_begun(self, sequence: Sequence) -> None:
        """Count the prompt tokens of a choice that begins, how many the KV cache had, and how many
        of these came from the host.
        """
        self.prompt_tokens += sequence.prompt_length
        self.cached_tokens += sequence.timings.cached_tokens
        self.host_tokens += sequence.timings.host_tokens

    def drafts_verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Count drafted tokens of a sequence that a step has verified.

        accepted: number of those that became tokens of the output.
        """
        source = sequence.drafted_from
        for counts in (self.drafts, sequence.timings.drafts):
            _, before, right = counts.get(source, (source, 0, 0))
            counts[source] = DraftCounts(source, before + drafted, right + accepted)

    def step_read(self, launch: StepLaunch) -> float:
        """Count a step whose tokens the host has just read; return the seconds that it took.

        The step's time begins at its launch, or when the previous step was read if that was later.
        """
        now_s = time.perf_counter()
        took_s = now_s - max(launch.launched_s, self._read_s)
        self.seconds.add(took_s)
        self.sequences.add(launch.sequences)
        self.adapters.add(launch.adapters)
        self._read_s = now_s
        return took_s

    def tokens_delivered(self, sequence: Sequence, tokens: int) -> None:
        """Count the tokens that a sequence gives to its request from the step that was read last.

        tokens: number of the tokens; may be 0.
        """
        if not tokens:
            return
        self.output_tokens += tokens
        timings = sequence.timings
        if timings.last_token_s is not None:
            self.inter_token_s[timings.residency].add(self._read_s - timings.last_token_s)
        timings.last_token_s = self._read_s
