"""Steps that a starting engine runs to no end but these: kernels are compiled, memory is taken.

They are built as any step is. All their keys and values go to KV page 0, and their adapters have
rank 0 in the table, so a step computes nothing for them but launches all that it would launch.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from lorikeet_engine.execution.batch_builder import step_input
from lorikeet_engine.execution.model_runner import ModelRunner
from lorikeet_engine.request import MAX_LOGPROBS, Request, SamplingParams
from lorikeet_engine.sampling.logprobs import Logprobs
from lorikeet_engine.sampling.sampler import Sampler, SamplingRow
from lorikeet_engine.scheduling.sequence import Chunk, Sequence
from lorikeet_engine.settings import EngineSettings

# How much one adapter has to do in a step: from a decode's one token to a long prompt.
_TOKENS_OF_ADAPTER = (1, 8, 64, 512)
_WAYS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(top_p=0.9, presence_penalty=1.0, logit_bias=((0, 1.0),), logprobs=MAX_LOGPROBS),
)


def largest_step(runner: ModelRunner, settings: EngineSettings) -> None:
    """The step that takes the most memory: all tokens, all sequences, all adapters, all ways."""
    sequences, context = settings.max_running, runner.model.config.max_context
    most, longer = divmod(settings.max_batch_tokens, sequences)
    lengths = [min(context, most + (i < longer)) for i in range(sequences)]
    adapters = min(settings.max_batch_adapters, sequences)
    _run(runner, settings, lengths, adapters, settings.max_rank, _WAYS[-1:])


def every_kind_of_step(runner: ModelRunner, settings: EngineSettings) -> None:
    """Steps over all that kernels are compiled for: tokens, adapters and their rank."""
    longest = min(settings.max_batch_tokens, runner.model.config.max_context)
    for sequences in _doubling(1, settings.max_running):
        _run(runner, settings, [1] * sequences)
    for tokens in _doubling(2, longest):
        _run(runner, settings, [tokens], graphs=False)
    for adapters in _doubling(1, min(settings.max_batch_adapters, settings.max_running)):
        _run(runner, settings, [1] * adapters, adapters, settings.max_rank)
        for tokens in _TOKENS_OF_ADAPTER:
            lengths = [min(tokens, longest)] * adapters + [2]  # a prompt: this is no decode
            if sum(lengths) <= settings.max_batch_tokens:
                for rank in (1, *_doubling(16, settings.max_rank)):
                    _run(runner, settings, lengths, adapters, rank, graphs=False)


@dataclass(frozen=True, slots=True)
class DummyLease:
    """Of a row of the table that nobody else uses."""

    slot: int
    rank: int

    def release(self) -> None:
        """Nothing is held."""


def _run(
    runner: ModelRunner,
    settings: EngineSettings,
    lengths: list[int],
    adapters: int = 0,
    rank: int = 0,
    ways: tuple[SamplingParams, ...] = _WAYS,
    *,
    graphs: bool = True,
) -> None:
    """One step of sequences of these lengths; the first `adapters` have one of `rank` each.

    graphs: whether one may be used. A step that sees too much for one needs its kernels as well.
    """
    chunks = [
        dummy_chunk(length, settings.page_size, DummyLease(i, rank) if i < adapters else None)
        for i, length in enumerate(lengths)
    ]
    forward = runner.forward if graphs else runner.without_graph
    logits = forward(step_input(chunks, settings.page_size).upload(runner.model.device))
    _sample(logits, [ways[i % len(ways)] for i in range(len(chunks))])


def _sample(logits: torch.Tensor, ways: list[SamplingParams]) -> None:
    """Draw from each row in its way; those with penalties under a grammar that allows anything."""
    anything = np.full(-(-logits.shape[-1] // 8), 255, np.uint8)
    rows = [
        SamplingRow(way, 0, 0, banned=(0,), made=(0,), allowed=anything)
        if way.penalises
        else SamplingRow(way, 0, 0, banned=(0,))
        for way in ways
    ]
    wanted = {i: way.logprobs for i, way in enumerate(ways) if way.logprobs is not None}
    logprobs = Logprobs(logits, wanted) if wanted else None
    tokens = Sampler().sample(logits, rows)
    if logprobs is not None:
        logprobs.send(logits, tokens)


def dummy_chunk(length: int, page_size: int, lease: DummyLease | None) -> Chunk:
    """All the tokens of a sequence of this length, on KV page 0."""
    sequence = Sequence(
        Request("warm-up", ((0,) * length,)),
        0,
        arrival=0,
        max_tokens=1,
        stop_ids=frozenset(),
        seed=0,
        page_size=page_size,
    )
    sequence.kv.pages = array("i", [0] * -(-length // page_size))
    sequence.lease = lease
    return Chunk.of(sequence, length)


def _doubling(first: int, most: int) -> Iterator[int]:
    """First, twice that, and so on below `most`, then `most`."""
    while first < most:
        yield first
        first *= 2
    yield most
