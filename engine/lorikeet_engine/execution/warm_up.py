"""Dummy steps at an engine's start, which compile kernels and show the memory that steps take.

All keys and values go to KV page 0. The adapters' entries in the table say rank 0, so a step
launches every LoRA kernel but computes nothing in it.
"""

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from lorikeet_engine.device.async_copies import upload
from lorikeet_engine.execution.batch_builder import build_step_input
from lorikeet_engine.execution.steps import ModelRunner
from lorikeet_engine.kernels.lora.tuning import FEW_TOKENS, PREFILL_TOKENS
from lorikeet_engine.kernels.masks import forbid_others
from lorikeet_engine.request import MAX_LOGPROBS, Request, SamplingParams
from lorikeet_engine.sampling.draws import SamplingRow
from lorikeet_engine.sampling.grammar import octets_of
from lorikeet_engine.sampling.logprob_readback import LogprobReadback
from lorikeet_engine.sampling.processed_logprobs import ProcessedLogprobs
from lorikeet_engine.sampling.sampler import Sampler
from lorikeet_engine.scheduling.kv_cache import PageKeys, StateUse
from lorikeet_engine.scheduling.sequence import Chunk, Sequence
from lorikeet_engine.settings import EngineSettings

# Tokens of one adapter in a step, from a decode's one to a long prompt's.
_TOKENS_PER_ADAPTER = (1, 8, 64, 512)
# Chunks of a few tokens and of a full step, this deep in a prompt, may have attention kernels of
# their own; the few tokens see enough to be split (kernels/attention/hopper_prefill.py).
_FEW, _DEPTH = 384, 12_288
_RANDOM_PAGES = 512  # pages of random numbers; the others repeat them
# Together they use all features of sampling; the last takes the most memory.
_SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_k=50, top_p=0.9),
    SamplingParams(
        top_p=0.9,
        presence_penalty=1.0,
        repetition_penalty=1.1,
        logit_bias=((0, 1.0),),
        logprobs=MAX_LOGPROBS,
    ),
)


def run_largest_step(runner: ModelRunner, sampler: Sampler, settings: EngineSettings) -> None:
    """Run the step that takes the most memory: all tokens, sequences, adapters and sampling."""
    sequences, context = settings.max_running, runner.model.config.max_context
    each, rest = divmod(settings.max_batch_tokens, sequences)
    lengths = [min(context, each + (i < rest)) for i in range(sequences)]
    adapters = min(settings.max_batch_adapters, sequences)
    _run(runner, sampler, settings, lengths, adapters, settings.max_rank, _SAMPLINGS[-1:])


def run_every_kind_of_step(runner: ModelRunner, sampler: Sampler, settings: EngineSettings) -> None:
    """Run steps of all token counts, adapter counts and ranks that kernels are compiled for."""
    longest = min(settings.max_batch_tokens, runner.model.config.max_context)
    ranks = (1, *_doubling(16, settings.max_rank))
    _run(runner, sampler, settings, [1], samplings=_SAMPLINGS[1:2])
    for sequences in _doubling(1, settings.max_running):
        _run(runner, sampler, settings, [1] * sequences)
    for tokens in _doubling(2, longest):
        _run(runner, sampler, settings, [tokens], graphs=False)
    for tokens in sorted({min(_FEW, longest), longest}):
        if depth := min(_DEPTH, runner.model.config.max_context - tokens):
            _run(runner, sampler, settings, [tokens], depth=depth, graphs=False)
    for adapters in _doubling(1, min(settings.max_batch_adapters, settings.max_running)):
        _run(runner, sampler, settings, [1] * adapters, adapters, settings.max_rank)
        for tokens in _TOKENS_PER_ADAPTER:
            lengths = [min(tokens, longest)] * adapters + [2]  # 2: a prompt, so not only decodes
            if sum(lengths) <= settings.max_batch_tokens:
                # one adapter suffices for compositions' kernels, which differ by ranks and regimes
                compositions = (False, True) if adapters == 1 else (False,)
                for rank, vectors, composed in product(ranks, (False, True), compositions):
                    _run(
                        runner,
                        sampler,
                        settings,
                        *(lengths, adapters, rank),
                        graphs=False,
                        vectors=vectors,
                        composed=composed,
                    )
    for rows in (FEW_TOKENS + 1, PREFILL_TOKENS + 1):  # larger numbers of lm_head's rows
        if rows <= settings.max_running:
            for rank, composed in product(ranks, (False, True)):
                _run(
                    runner,
                    sampler,
                    settings,
                    *([1] * rows, 1, rank),
                    graphs=not composed,
                    composed=composed,
                )


@dataclass(frozen=True, slots=True)
class DummyLease:
    """Lease of a slot in the adapters' table that no adapter uses."""

    slot: int
    rank: int
    head_rank: int = 0
    head_rows: int = 0
    changes_experts: bool = True
    has_vectors: bool = False
    composed: bool = False

    def release(self) -> None:
        """Do nothing: nothing is held."""


def _run(
    runner: ModelRunner,
    sampler: Sampler,
    settings: EngineSettings,
    lengths: list[int],
    adapters: int = 0,
    rank: int = 0,
    samplings: tuple[SamplingParams, ...] = _SAMPLINGS,
    *,
    depth: int = 0,
    graphs: bool = True,
    vectors: bool = False,
    composed: bool = False,
) -> None:
    """Run a dummy step.

    lengths: tokens of each sequence in the step.
    adapters: number of sequences with an adapter: the first sequences, each with another. These
        adapters also change lm_head, and if `rank` is above 0 may replace one of lm_head's rows.
    rank: rank of each adapter, also on lm_head.
    samplings: sampling parameters, which the sequences use in turn.
    depth: tokens of each sequence before those in the step.
    graphs: whether CUDA graphs may be used; False compiles the kernels of steps that are too large
        for graphs.
    vectors: whether the adapters may have DoRA's gains or biases.
    composed: whether the slots may be those of compositions, several adapters added up.
    """
    each = (rank, rank, min(rank, 1))
    leases = [
        DummyLease(i, *each, has_vectors=vectors, composed=composed) if i < adapters else None
        for i in range(len(lengths))
    ]
    windows = runner.kv_windows
    chunks = [
        dummy_chunk(length, settings.page_size, lease, groups=len(windows), depth=depth)
        for length, lease in zip(lengths, leases, strict=True)
    ]
    chunks = with_states(chunks, runner.state_slots)
    step = build_step_input(chunks, settings.page_size, windows)
    batch = step.upload(runner.model.device)
    runner.share(step, graphs=graphs)
    logits = (runner.forward if graphs else runner.forward_eager)(batch)
    _sample(sampler, logits, [samplings[i % len(samplings)] for i in range(len(chunks))])


@torch.inference_mode()
def _sample(sampler: Sampler, logits: torch.Tensor, params: list[SamplingParams]) -> None:
    """Sample a token for each row of the logits, after masking them as a grammar would.

    The mask allows all tokens.
    """
    all_tokens = np.full((len(params), octets_of(logits.shape[-1])), 255, np.uint8)
    every = np.arange(len(params))
    forbid_others(logits, upload(every, logits.device), upload(all_tokens, logits.device))
    rows = [SamplingRow(p, 0, 0, banned=(0,)) for p in params]
    for i, p in enumerate(params):
        if p.changes_logits:
            slot = sampler.penalties.begin(p, prompt=(0,), output=(0,))
            rows[i] = rows[i]._replace(slot=slot)
    counts = {i: p.logprobs for i, p in enumerate(params) if p.logprobs is not None}
    logprobs = LogprobReadback(logits, counts) if counts else None
    tokens = sampler.sample(logits, rows, ProcessedLogprobs(counts) if counts else None)
    if logprobs is not None:
        logprobs.download(logits, tokens, ranked=True)
    for row in rows:
        if row.slot is not None:
            row.slot.release()


def dummy_chunk(
    length: int,
    page_size: int,
    lease: DummyLease | None,
    vocabulary: int = 1,
    first: int = 0,
    groups: int = 1,
    depth: int = 0,
) -> Chunk:
    """Make a chunk of `length` tokens of a dummy sequence, whose keys and values go to KV page 0.

    page_size: tokens of a KV page.
    lease: the sequence's adapter; None for none.
    vocabulary: number of token ids to use, from 0 on.
    first: id of the chunk's first token; ids ascend from token to token.
    groups: number of groups of layers.
    depth: tokens of the sequence before the chunk.
    """
    prompt = tuple((first + at) % vocabulary for at in range(-depth, length))
    sequence = Sequence(
        Request("warm-up", (prompt,)),
        0,
        arrival=0,
        max_tokens=1,
        stop_ids=frozenset(),
        seed=0,
        prompt_keys=PageKeys((), page_size),
    )
    sequence.kv.pages = [array("i", [0] * -(-len(prompt) // page_size))] * groups
    sequence.kv.computed = depth
    sequence.lease = lease
    return Chunk.of(sequence, length)


def with_states(chunks: list[Chunk], slots: int) -> list[Chunk]:
    """Give each dummy chunk a slot for its state of delta nets, if the model has delta nets.

    slots: number of slots; if there are more chunks, several share a slot. 0 for a model without
        delta nets.
    """
    if not slots:
        return chunks
    return [chunk._replace(state=StateUse(i % slots, None, ())) for i, chunk in enumerate(chunks)]


@contextmanager
def random_kv(kv: torch.Tensor) -> Iterator[None]:
    """Hold random numbers in all KV pages during a `with` block; the pages are zero afterwards.

    With zeros in the pages, a GPU takes less power, and steps may seem faster than real steps.

    kv: KV pages, [pieces of a page, keys and values, pages, …].
    """
    drawn = torch.randn(min(_RANDOM_PAGES, kv.shape[2]), *kv.shape[3:], device=kv.device)
    drawn = drawn.to(kv.dtype)
    for pages in kv.flatten(0, 1):
        for some in pages.split(len(drawn)):
            some.copy_(drawn[: len(some)])
    try:
        yield
    finally:
        kv.zero_()


def _doubling(first: int, most: int) -> Iterator[int]:
    """Yield `first`, twice `first`, four times `first`, and so on below `most`; then `most`."""
    while first < most:
        yield first
        first *= 2
    yield most
