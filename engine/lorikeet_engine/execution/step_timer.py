"""Timing of steps of dummy sequences, for calibration at start and for benchmarks."""

import time
from array import array
from collections.abc import Iterator

import torch

from lorikeet_engine.costs import seen_tokens
from lorikeet_engine.execution.batch_builder import build_step_input
from lorikeet_engine.execution.memory_plan import page_needs
from lorikeet_engine.execution.steps import ModelRunner
from lorikeet_engine.execution.warm_up import DummyLease, dummy_chunk, with_states
from lorikeet_engine.scheduling.sequence import Chunk
from lorikeet_engine.settings import EngineSettings

_CONTEXT = 256
_REPEATS = 2
_LONG_STEP_S = 0.05  # a longer step is timed once: noise is small beside it
_SUSTAINED_S = 0.25


class StepTimer:
    """Timer of steps of dummy sequences.

    window: maximum number of tokens that a decode attends to in layers with a sliding window; None
        if there are no such layers.
    windowed: share of the layers that have a sliding window.
    kv_tokens: tokens that the KV pages hold, in sequences of the longest context.
    longest: tokens of the longest context.
    context: default context of decodes, in tokens.
    in_pieces: whether steps whose prompts attend to many tokens run as several CUDA graphs.
    """

    def __init__(self, runner: ModelRunner, kv_pages: int, settings: EngineSettings) -> None:
        self._runner, self._kv_pages, self._page_size = runner, kv_pages, settings.page_size
        config = runner.model.config
        self._windows = config.kv_groups.windows
        windows = [window for window in config.windows if window is not None]
        self.window, self.windowed = max(windows, default=None), len(windows) / len(config.windows)
        self.kv_tokens = page_needs(config, settings).tokens(kv_pages, config.max_context)
        self.longest = min(config.max_context, self.kv_tokens)
        self.context = min(_CONTEXT, self.longest)
        self.in_pieces = bool(runner.prompt_sizes)

    def decodes_s(self, sequences: int, context: int | None = None) -> float:
        """Return the seconds of a step of this many decodes.

        context: tokens that each decode attends to; None for the default.
        """
        return self.shortest_s(self.decodes(sequences, context or self.context))

    def head_s(self, sequences: int) -> float:
        """Return the seconds by which a step of this many decodes is longer if the head for
        multi-token prediction predicts a token for each.
        """
        chunks = self.decodes(sequences, self.context)
        return max(0.0, self.shortest_s(chunks, predicts=True) - self.shortest_s(chunks))

    def prompts_s(self, tokens: int, rank: int = 0) -> float:
        """Return the seconds of a step of whole prompts.

        tokens: tokens of the prompts together.
        rank: rank of the adapter that all prompts use; 0 for none.
        """
        lease = DummyLease(0, rank) if rank else None
        return self.shortest_s([self.prompt(n, 0, lease) for n in self._lengths(tokens)])

    def seen(self, tokens: int) -> int:
        """Return the number of (token, token that it attends to) pairs in a step of prompts.

        tokens: tokens of the prompts together, as in `prompts_s`.
        """
        return sum(map(seen_tokens, self._lengths(tokens)))

    def decodes(
        self, sequences: int, context: int, adapters: int = 0, rank: int = 0
    ) -> list[Chunk]:
        """Make the chunks of a step of decodes: the last token of each of `sequences` sequences.

        context: number of tokens of each sequence.
        adapters: number of sequences with an adapter: the first sequences, each with another.
        rank: rank of these adapters.

        Each sequence has KV pages of its own if there are enough.
        """
        leases = [DummyLease(i, rank) if i < adapters else None for i in range(sequences)]
        return [self._chunk(context - 1, 1, at, lease) for at, lease in enumerate(leases)]

    def prompt(self, tokens: int, depth: int, lease: DummyLease | None = None) -> Chunk:
        """Make a chunk of `tokens` tokens that follow the first `depth` tokens of a prompt.

        lease: the prompt's adapter; None for none.
        """
        return self._chunk(depth, tokens, 0, lease)

    def shortest_s(self, chunks: list[Chunk], *, predicts: bool = False) -> float:
        """Return the seconds of the fastest of a few runs of a step with these chunks.

        predicts: whether the head for multi-token prediction predicts in the step.
        """
        taken_s = list[float]()
        for step_s in self._times_s(chunks, predicts=predicts):
            taken_s.append(step_s)
            if len(taken_s) == _REPEATS or sum(taken_s) >= _LONG_STEP_S:
                break
        return min(taken_s)

    def sustained_s(self, chunks: list[Chunk]) -> float:
        """Return the seconds of a step with these chunks after equal steps have run for a while.

        A GPU that attends to many tokens soon lowers its clocks. On a CPU the result is that of
        shortest_s.
        """
        if self._runner.model.device.type != "cuda":
            return self.shortest_s(chunks)
        busy_s = 0.0
        for step_s in self._times_s(chunks):
            busy_s += step_s
            if busy_s >= _SUSTAINED_S:
                break
        return step_s

    def _times_s(self, chunks: list[Chunk], *, predicts: bool = False) -> Iterator[float]:
        """Run a step with these chunks endlessly; yield the seconds of each run."""
        device = self._runner.model.device
        chunks = with_states(chunks, self._runner.state_slots)
        step = build_step_input(chunks, self._page_size, self._windows)
        batch = step.upload(device)
        while True:
            began_s = time.perf_counter()
            self._runner.share(step)
            self._runner.forward(batch)
            if predicts:
                self._runner.predict(batch, batch.token_ids, predicts=True)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            yield time.perf_counter() - began_s

    def _lengths(self, tokens: int) -> list[int]:
        """Split `tokens` tokens into prompts as long as possible; return their lengths."""
        whole, rest = divmod(tokens, self.longest)
        return [self.longest] * whole + [rest] * (rest > 0)

    def _chunk(self, depth: int, tokens: int, index: int, lease: DummyLease | None) -> Chunk:
        """Make a chunk of the last `tokens` tokens of a sequence.

        The token ids vary, as with one id a mixture of experts would use only a few experts.

        depth: tokens of the sequence before the chunk.
        index: number of the sequence; sequences have different KV pages while there are enough
            pages.
        """
        vocabulary = self._runner.model.config.vocab_size
        sequence = dummy_chunk(
            depth + tokens, self._page_size, lease, vocabulary, first=index
        ).sequence
        groups, pages = len(self._windows), -(-(depth + tokens) // self._page_size)
        begins = (at * pages for at in range(groups * index, groups * (index + 1)))
        sequence.kv.pages = [
            array("i", [page % self._kv_pages for page in range(begin, begin + pages)])
            for begin in begins
        ]
        sequence.kv.computed = depth
        return Chunk.of(sequence, tokens)
