"""Plain path: whole sequences in one pass, with which the engine's greedy tokens are compared.

Torch's attention, no graphs, no chunks, no shared pages. Each token is judged given the engine's
own earlier tokens, so one early difference does not cause later ones.

If ranks share a model that none could hold alone, all ranks compute the plain path together:
without graphs and shared pages, but with the engine's attention, and prompts in its chunks.
"""

import time
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Series
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise

import numpy as np
import torch

from lorikeet_engine.adapter import Adapter
from lorikeet_engine.adapter_format import Quantization
from lorikeet_engine.engine import Engine
from lorikeet_engine.execution.batch_builder import (
    build_step_input,
    group_by_adapter,
    head_segments,
)
from lorikeet_engine.execution.kv_tensors import allocate_states, kv_shape
from lorikeet_engine.execution.steps import ModelRunner
from lorikeet_engine.execution.warm_up import with_states
from lorikeet_engine.kernels import fp8
from lorikeet_engine.kernels.attention.sdpa import SdpaAttention
from lorikeet_engine.models.llama import LlamaModel
from lorikeet_engine.request import Request
from lorikeet_engine.residency.tiers import Tiers
from lorikeet_engine.scheduling.kv_cache import PageKeys
from lorikeet_engine.scheduling.sequence import AdapterLease, Chunk, Sequence

PAGE = 16
# Most rows of logits at a time: 2 GB at a vocabulary of 128,256.
_ROWS = 4096
_LOADED_WITHIN_S = 60.0
# For an engine with an FP8 KV cache, whose numbers are up to 6% off; the plain path's is not FP8.
_FP8_TOLERANCE = 0.125


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy tokens of an engine for a request of one prompt and one choice."""

    request: Request
    tokens: list[int]


def tolerance(dtype: torch.dtype, rounding: Quantization | None = None) -> float:
    """Return the largest allowed shortfall of a token's logit, as a share of the largest logit.

    Eight roundings of the dtype: 6.25% for bfloat16, where the worst token of an 8B model seen on
    an H200 fell 1.5% short. At least 1e-4, for float32 sums in another order. Two roundings of FP8
    weights, 25%: on CUDA the products of a single token are not rounded, but the products of the
    plain path are.
    """
    if rounding is Quantization.FP8:
        return 2 * torch.finfo(fp8.DTYPE).eps
    return max(8 * torch.finfo(dtype).eps, 1e-4)


def some(answers: Series[Answer], count: int = 8) -> Series[Answer]:
    """Choose `count` answers or fewer, in odd strides, to cover adapters that are dealt round over
    them.
    """
    return answers[:: len(answers) // count | 1][:count]


def check(engine: Engine, answers: Series[Answer]) -> float:
    """Compare the tokens of some answers with the plain path; return the worst token's shortfall
    (see `shortfalls`).

    Raises AssertionError, with the request's id, if it is too large. Engine thread only; the engine
    must be idle.
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
    if engine._settings.kv_dtype == "fp8":
        most = max(most, _FP8_TOLERANCE)
    for answer, shortfall in zip(answers, found, strict=True):
        assert shortfall <= most, (
            f"request {answer.request.request_id}: a token's logit is {shortfall:.4f} under the "
            f"plain path's best, and {most:.4f} is allowed"
        )
    return max(found)


def shortfalls(model: LlamaModel, tiers: Tiers, answers: Series[Answer]) -> list[float]:
    """Return for each answer the largest amount by which a token's logit is below the plain path's
    best.

    The amounts are shares of the position's largest absolute logit; NaN if a logit is NaN. Answers
    of one adapter are computed at a time.
    tiers: adapters, which are loaded as needed.
    """
    found: dict[int, float] = {}
    for group in _groups(answers):
        chosen = [answers[i] for i in group]
        logits = plain_logits(model, tiers, chosen)
        found |= zip(group, map(_shortfall, chosen, logits), strict=True)
    return [found[i] for i in range(len(answers))]


def plain_logits(model: LlamaModel, tiers: Tiers, answers: Series[Answer]) -> list[torch.Tensor]:
    """Compute for each answer the logits [tokens, vocab] float32 of its tokens.

    All answers are computed in one pass: their rows and their adapters, which are loaded, must fit
    into memory.
    """
    sequences = sequences_of(answers, len(model.config.kv_groups.windows))
    for sequence in sequences:
        if sequence.adapter is not None:
            sequence.lease = lease_of(tiers, sequence.adapter)
    groups = model.config.kv_groups
    pages = sum(len(of_group) for sequence in sequences for of_group in sequence.kv.pages)
    size = kv_shape(model.config, model.shape, pages, PAGE, model.device.type)
    kv = torch.zeros(size, dtype=model.dtype, device=model.device)
    states = allocate_states(model.shape, len(sequences), model.dtype, model.device)
    chunks = group_by_adapter([Chunk.of(sequence, sequence.length) for sequence in sequences])
    chunks = with_states(chunks, 0 if states is None else states.slots)
    step = build_step_input(chunks, PAGE, groups.windows)
    rows = [
        np.arange(start + chunk.sequence.prompt_length - 1, end)
        for chunk, (start, end) in zip(chunks, pairwise(step.query_starts), strict=True)
    ]
    heads = head_segments(chunks, np.array([len(part) for part in rows]))
    step = replace(step, logit_rows=np.concatenate(rows), head_segments=heads)
    latents = model.config.shape.latents
    attention = SdpaAttention(
        model.config.attention_soft_cap,
        model.config.attention_scale,
        0 if latents is None else latents.kv_rank,
    )
    runner = ModelRunner(model, attention, tiers.weights, kv, states=states)
    logits = runner.forward(step.upload(model.device))
    for sequence in sequences:
        if sequence.lease is not None:
            sequence.lease.release()
    parts = logits.float().split([len(part) for part in rows])
    of = {chunk.sequence: part for chunk, part in zip(chunks, parts, strict=True)}
    return [of[sequence] for sequence in sequences]


def _logits_of_ranks(engine: Engine, answer: Answer) -> torch.Tensor:
    """Compute `plain_logits` of one answer on all ranks, in free KV pages of the engine."""
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
        # first tokens whose logits are not needed, then as many as a step has room for
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
    """Yield indices of answers that share an adapter, with at most _ROWS tokens a group."""
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
    """Return a sequence for each answer: all tokens but the last, uncomputed, in its own pages.

    groups: number of layer groups, each with pages of its own.
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
            prompt_keys=PageKeys((), PAGE, adapter_digest=_digest(answer) or None),
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


def lease_of(tiers: Tiers, ref: Adapter) -> AdapterLease:
    """Bring an adapter to the device, and lease it."""
    deadline = time.monotonic() + _LOADED_WITHIN_S
    while (lease := tiers.lease(ref)) is None:
        assert time.monotonic() < deadline, f"{ref} did not reach the device"
        tiers.request(ref)
        tiers.advance()
        time.sleep(0.001)
    return lease
