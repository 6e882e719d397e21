"""The plain path that an engine's greedy tokens are held against: whole sequences in one pass.

Torch's attention, no graphs, no chunks, no shared pages. Each token is judged given the tokens
that the engine itself made before it, so one early difference does not make all the later ones.

Where ranks share the model, none of which could compute it alone, all compute the plain path: no
graphs and no shared pages, but the engine's attention, and prompts in its chunks.
"""

import time
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Series
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise

import numpy as np
import torch

from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.adapter_format import Quantization
from lorikeet_engine.engine import Engine
from lorikeet_engine.execution.batch_builder import (
    build_step_input,
    group_by_adapter,
    head_segments,
)
from lorikeet_engine.execution.steps import ModelRunner
from lorikeet_engine.kernels import fp8
from lorikeet_engine.kernels.attention.sdpa import SdpaAttention
from lorikeet_engine.models.llama import LlamaModel
from lorikeet_engine.request import Request
from lorikeet_engine.residency.tiers import Tiers
from lorikeet_engine.scheduling.kv_cache import PageKeys
from lorikeet_engine.scheduling.sequence import AdapterLease, Chunk, Sequence

PAGE = 16
# Rows of logits at a time: 2 GB at a vocabulary of 128,256.
_ROWS = 4096
_LOADED_WITHIN_S = 60.0
# Where the engine's KV cache is FP8, whose numbers are up to 6% off: the plain path's is not.
_FP8_TOLERANCE = 0.125
# Where two experts are nearly as likely, a rounding chooses the other.
_MOE_TOLERANCES = 2


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine made, greedily, of a request of one prompt and one choice."""

    request: Request
    tokens: list[int]


def tolerance(dtype: torch.dtype, rounding: Quantization | None = None) -> float:
    """How far a good token's logit may be under the plain path's best, as a share of the largest.

    Eight roundings of the dtype: 6.25% for bfloat16, where the worst of an 8B model's tokens seen
    on an H200 fell 1.5% short. At least 1e-4, for float32 sums in another order. Two roundings of
    weights in FP8, 25%: on CUDA a single token's products are not rounded, the plain path's are.
    """
    if rounding is Quantization.FP8:
        return 2 * torch.finfo(fp8.DTYPE).eps
    return max(8 * torch.finfo(dtype).eps, 1e-4)


def some(answers: Series[Answer], count: int = 8) -> Series[Answer]:
    """A few from all over; in odd strides, or all could have the same of adapters dealt round."""
    return answers[:: len(answers) // count | 1][:count]


def check(engine: Engine, answers: Series[Answer]) -> float:
    """The worst shortfall; raises AssertionError, with the request's id, where it is too large.

    The engine is idle, and this is its thread.
    """
    model = engine._runner.model
    if engine._settings.tensor_parallel > 1:
        found = [_shortfall(answer, _logits_of_ranks(engine, answer)) for answer in answers]
    else:
        found = shortfalls(model, engine._tiers, answers)
    rounding, stored = engine._settings.rounding, model.config.quantized_linears
    if stored is not None:
        rounding = stored.format
    most = tolerance(model.dtype, rounding)
    if model.config.experts_per_token:
        most *= _MOE_TOLERANCES
    if engine._settings.kv_dtype == "fp8":
        most = max(most, _FP8_TOLERANCE)
    for answer, shortfall in zip(answers, found, strict=True):
        assert shortfall <= most, (
            f"request {answer.request.request_id}: a token's logit is {shortfall:.4f} under the "
            f"plain path's best, and {most:.4f} is allowed"
        )
    return max(found)


def shortfalls(model: LlamaModel, tiers: Tiers, answers: Series[Answer]) -> list[float]:
    """For each answer, how far its worst token's logit is under the plain path's best.

    As a share of the row's largest absolute logit; NaN where a logit is. One adapter at a time.
    """
    found: dict[int, float] = {}
    for group in _groups(answers):
        chosen = [answers[i] for i in group]
        logits = plain_logits(model, tiers, chosen)
        found |= zip(group, map(_shortfall, chosen, logits), strict=True)
    return [found[i] for i in range(len(answers))]


def plain_logits(model: LlamaModel, tiers: Tiers, answers: Series[Answer]) -> list[torch.Tensor]:
    """For each answer, logits [tokens, vocab] float32 from which its tokens were to be drawn.

    All at once: their rows must fit into memory. Their adapters, which must fit too, it loads.
    """
    shape = model.config.shape
    sequences = sequences_of(answers, len(model.config.kv_groups.windows))
    for sequence in sequences:
        if sequence.adapter is not None:
            sequence.lease = lease_of(tiers, sequence.adapter)
    groups = model.config.kv_groups
    pages = sum(len(of_group) for sequence in sequences for of_group in sequence.kv.pages)
    kv = torch.zeros(
        (groups.page_layers, 2, pages, PAGE, shape.kv_heads, shape.head_dim),
        dtype=model.dtype,
        device=model.device,
    )
    chunks = group_by_adapter([Chunk.of(sequence, sequence.length) for sequence in sequences])
    step = build_step_input(chunks, PAGE, groups.windows)
    rows = [
        np.arange(start + chunk.sequence.prompt_length - 1, end)
        for chunk, (start, end) in zip(chunks, pairwise(step.query_starts), strict=True)
    ]
    heads = head_segments(chunks, np.array([len(part) for part in rows]))
    step = replace(step, logit_rows=np.concatenate(rows), head_segments=heads)
    runner = ModelRunner(model, SdpaAttention(model.config.attention_soft_cap), tiers.weights, kv)
    logits = runner.forward(step.upload(model.device))
    for sequence in sequences:
        if sequence.lease is not None:
            sequence.lease.release()
    parts = logits.float().split([len(part) for part in rows])
    of = {chunk.sequence: part for chunk, part in zip(chunks, parts, strict=True)}
    return [of[sequence] for sequence in sequences]


def _logits_of_ranks(engine: Engine, answer: Answer) -> torch.Tensor:
    """What plain_logits gives, computed by all ranks in free pages of the engine's."""
    settings, cache, runner = engine._settings, engine._cache, engine._runner
    windows = runner.model.config.kv_groups.windows
    (sequence,) = sequences_of([answer], len(windows))
    if sequence.adapter is not None:
        sequence.lease = lease_of(engine._tiers, sequence.adapter)
    each = cache.pages_for(sequence.length)
    pages = [cache.take(each) for _ in windows]
    sequence.kv.pages = [array("i", of_group) for of_group in pages]
    logits = []
    while sequence.kv.computed < sequence.length:
        # tokens whose logits nobody wants, then as many as steps have room for
        unwanted = max(0, sequence.prompt_length - 1 - sequence.kv.computed)
        chunk = Chunk.of(sequence, min(settings.max_batch_tokens, unwanted or settings.max_running))
        rows = np.arange(0 if unwanted else chunk.length)
        step = build_step_input([chunk], settings.page_size, windows)
        heads = head_segments([chunk], np.array([len(rows)]))
        step = replace(step, logit_rows=rows, head_segments=heads)
        runner.share(step, graphs=False)
        logits.append(runner.forward_eager(step.upload(runner.model.device)).float())
        sequence.kv.computed = chunk.end
    cache.release(list(chain.from_iterable(pages)))
    if sequence.lease is not None:
        sequence.lease.release()
    return torch.cat(logits)


def _groups(answers: Series[Answer]) -> Iterator[list[int]]:
    """Indices of answers that share an adapter, and of no more than _ROWS tokens."""
    by_adapter = sorted(range(len(answers)), key=lambda i: _digest(answers[i]))
    for _, same in groupby(by_adapter, key=lambda i: _digest(answers[i])):
        group, rows = list[int](), 0
        for i in same:
            if group and rows + len(answers[i].tokens) > _ROWS:
                yield group
                group, rows = [], 0
            group.append(i)
            rows += len(answers[i].tokens)
        yield group


def _digest(answer: Answer) -> str:
    return answer.request.adapter.digest if answer.request.adapter else ""


def _shortfall(answer: Answer, logits: torch.Tensor) -> float:
    chosen = logits.gather(1, torch.tensor(answer.tokens, device=logits.device)[:, None])
    short = logits.amax(-1) - chosen[:, 0]
    return float((short / logits.abs().amax(-1)).max())


def sequences_of(answers: Series[Answer], groups: int) -> list[Sequence]:
    """One for each answer, all its tokens but the last uncomputed, in pages of its own.

    groups: of layers, each of which has pages.
    """
    sequences, taken = [], 0
    for answer in answers:
        sequence = Sequence(
            answer.request,
            0,
            arrival=0,
            max_tokens=len(answer.tokens),
            stop_ids=frozenset(),
            seed=0,
            prompt_keys=PageKeys((), PAGE),
        )
        for token in answer.tokens[:-1]:
            sequence.add_pending(row=0)
            sequence.accept(token)
        pages = -(-sequence.length // PAGE)
        for _ in range(groups):
            sequence.kv.pages.append(array("i", range(taken, taken + pages)))
            taken += pages
        sequences.append(sequence)
    return sequences


def lease_of(tiers: Tiers, ref: AdapterRef) -> AdapterLease:
    """Bring an adapter to the device, and lease it."""
    deadline = time.monotonic() + _LOADED_WITHIN_S
    while (lease := tiers.lease(ref)) is None:
        assert time.monotonic() < deadline, f"{ref} did not reach the device"
        tiers.request(ref)
        tiers.advance()
        time.sleep(0.001)
    return lease
