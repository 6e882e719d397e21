"""Measurement of the costs of steps on this engine, at its start."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import accumulate

import torch

from lorikeet_engine.adapter_format import BaseShape, aligned
from lorikeet_engine.costs import (
    SEEN_IN_PIECES,
    SEEN_TO_SPLIT,
    RowsTime,
    StepCosts,
    seen_tokens,
)
from lorikeet_engine.errors import SettingsError
from lorikeet_engine.execution.step_timer import StepTimer
from lorikeet_engine.execution.steps import ModelRunner
from lorikeet_engine.execution.warm_up import random_kv
from lorikeet_engine.residency.gpu.arena import ClearRow, DeviceArena, WriteRow
from lorikeet_engine.settings import EngineSettings

log = logging.getLogger(__name__)

_RANK = 16
# Numbers of decodes that are timed. A single decode has matrix kernels of its own on CUDA.
_DECODES = (1, 2, 32, 128, 256)
_PREDICTED = 32  # decodes of the step that gives head_s
_FEW = 2  # decodes: a step of no more is too small to tell how larger ones behave
_LONG_CONTEXT = 4096
# Tokens of the chunk, and its two depths, that give the cost of tokens a prompt attends to.
_CHUNK = 512
_SHALLOW, _DEEP = 1024, 1 << 16
_SLOW_CHUNK = 128  # tokens of the chunk where steps are slow
# Most tokens of the chunk that gives pieces_s: deep enough for piecewise graphs, else small.
_PIECES_CHUNK = 128
# Step that gives split_s: number of decodes, their context, tokens of the chunk, its depth.
_BESIDE, _BESIDE_CONTEXT, _BESIDE_CHUNK, _BESIDE_DEPTH = 64, 1024, 192, 8192
# Noise can hide the cost of ranks in a tiny model; no device reads a rank faster than this.
_MIN_RANK_S = 1e-9
# Noise can hide the cost of rows where attention seems to take all of a step.
_MIN_ROWS_S = 1e-6
# A step that takes longer, as on a CPU, is bound by its arithmetic: larger steps take no less for
# each token, and are not timed, as they would be most of such an engine's start.
_SLOW_S = 0.5


def measure_step_costs(
    runner: ModelRunner,
    kv_pages: int,
    arena: DeviceArena,
    elements: int,
    shape: BaseShape,
    settings: EngineSettings,
) -> StepCosts:
    """Time a few dummy steps, which run as real steps do, and return the costs fitted to the times.

    kv_pages: number of the runner's KV pages; they are empty before and after this call.
    arena: the runner's GPU memory of adapters; it is empty before and after this call.
    elements: number of the arena's elements that have memory, from its start.
    shape: part of the base model that this process computes.

    Where contexts are too short to measure the cost of attention, that cost keeps its default.
    Where an adapter of rank 1 on all linears does not fit into the arena, the costs of adapters
    keep their defaults.

    Raises SettingsError in the latter case if inter_token_goal_s is set.
    """
    steps = StepTimer(runner, kv_pages, settings)
    dummies = _DummyAdapters.that_fit(elements, shape, settings)
    with random_kv(runner.kv) if runner.model.device.type == "cuda" else nullcontext():
        costs, chunk = _of_base(steps, settings)
        if dummies.count:
            with dummies.in_place(arena):
                costs = _with_lora(costs, steps, dummies, chunk)
        if runner.model.config.mtp is not None:
            decodes = min(_PREDICTED, settings.max_running)
            if costs.rows_s(decodes) > _SLOW_S:
                decodes = min(_FEW, decodes)
            costs = replace(costs, head_s=steps.head_s(decodes))
    if not dummies.count and settings.inter_token_goal_s is not None:
        raise SettingsError(
            f"adapter_gpu_bytes={settings.adapter_gpu_bytes}: too small to measure what ranks "
            "cost, which inter_token_goal_s needs: raise the one or do without the other"
        )
    log.info("step_costs_measured", extra=asdict(costs))
    return costs


def _of_base(steps: StepTimer, settings: EngineSettings) -> tuple[StepCosts, int]:
    """Measure the costs of steps without adapters; return them and the tokens of a timed chunk."""
    most, full = settings.max_running, settings.max_batch_tokens
    decodes_s, chunk, deep = _decodes_s(steps, most), min(_CHUNK, full), _DEEP
    if max(decodes_s) < most:
        chunk, deep = min(_SLOW_CHUNK, full), 2 * _SHALLOW
    costs = StepCosts(
        window=steps.window, windowed=steps.windowed, step_tokens=full, max_running=most
    )
    costs = replace(costs, seen_token_s=_seen_token_s(steps, decodes_s, costs))
    sees_s = costs.seen_token_s * costs.decode_sees(steps.context)
    rows_s = {n: s - n * sees_s for n, s in decodes_s.items()}
    prompt_seen_s, chunk_s = _chunk(steps, chunk, deep, costs)
    costs = replace(costs, prompt_seen_s=prompt_seen_s)
    costs = replace(costs, pieces_s=_pieces_s(steps, rows_s, costs))
    if chunk > max(rows_s):
        rows_s[chunk] = chunk_s - costs.pieces_s
    if full > (last := max(rows_s)):
        seen_s = costs.prompts_seen_s(steps.seen(full), beside_decodes=False)
        is_slow = rows_s[last] > _SLOW_S
        rows_s[full] = rows_s[last] * full / last if is_slow else steps.prompts_s(full) - seen_s
    # More work is never faster: measurements that say so, here and below, are noise.
    rising = accumulate((max(_MIN_ROWS_S, s) for s in rows_s.values()), max)
    costs = replace(costs, rows=tuple(map(RowsTime, rows_s, rising)))
    return replace(costs, split_s=_split_s(steps, costs)), chunk


def _decodes_s(steps: StepTimer, most: int) -> dict[int, float]:
    """Time steps of 1 to `most` decodes; return the seconds by number of decodes.

    Stops after the first step of more than _FEW decodes that takes longer than _SLOW_S.
    """
    timed_s = dict[int, float]()
    for n in (*(n for n in _DECODES if n < most), most):
        timed_s[n] = steps.decodes_s(n)
        if n > _FEW and timed_s[n] > _SLOW_S:
            break
    return timed_s


def _seen_token_s(steps: StepTimer, decodes_s: dict[int, float], usual: StepCosts) -> float:
    """Measure StepCosts.seen_token_s, the seconds for each token that a decode attends to.

    Two steps are timed: one decode with the longest context, and as many decodes as fit with a long
    context. The result is fitted to both times, by the least squares of the relative errors.

    decodes_s: measured seconds of a step of N decodes with the default context, by N.
    usual: default costs; its seen_token_s is returned if contexts are too short to measure.
    """
    long = min(_LONG_CONTEXT, steps.longest)
    many = max(n for n in decodes_s if n * long <= steps.kv_tokens or n == min(decodes_s))
    up = down = 0.0
    for sequences, context in ((min(decodes_s), steps.longest), (many, long)):
        if more := sequences * (usual.decode_sees(context) - usual.decode_sees(steps.context)):
            took_s = steps.decodes_s(sequences, context)
            up += more * (took_s - decodes_s[sequences]) / took_s**2
            down += (more / took_s) ** 2
    return max(0.0, up / down) if down else usual.seen_token_s


def _chunk(steps: StepTimer, tokens: int, deep: int, usual: StepCosts) -> tuple[float, float]:
    """Time prompt chunks; return prompt_seen_s, the seconds for each token that a prompt token
    attends to, and a chunk's seconds without attention.

    tokens: number of tokens of a chunk.
    deep: depth of the deepest chunk, if contexts are long enough.
    usual: default costs; its prompt_seen_s is returned if contexts are too short to measure.
    """
    deep = min(deep, steps.longest - tokens)
    if deep < tokens:  # short contexts: chunks see too few tokens to measure their cost
        return usual.prompt_seen_s, steps.prompts_s(tokens)
    shallow = min(_SHALLOW, deep // 2)
    shallow_s = steps.shortest_s([steps.prompt(tokens, shallow)])
    deep_s = steps.sustained_s([steps.prompt(tokens, deep)])
    prompt_seen_s = max(0.0, (deep_s - shallow_s) / (tokens * (deep - shallow)))
    return prompt_seen_s, shallow_s - prompt_seen_s * seen_tokens(tokens, shallow)


def _pieces_s(steps: StepTimer, rows_s: dict[int, float], costs: StepCosts) -> float:
    """Measure StepCosts.pieces_s: the seconds that a step takes longer as several CUDA graphs, cut
    at attention, than as a single graph.

    rows_s: seconds of N tokens in a single graph without attention, by N.
    """
    if not steps.in_pieces:
        return 0.0
    tokens = max(n for n in rows_s if n <= _PIECES_CHUNK)
    depth = min(_SHALLOW, steps.longest - tokens)
    seen = seen_tokens(tokens, depth)
    if tokens == 1 or seen < SEEN_IN_PIECES:  # contexts are too short to tell
        return costs.pieces_s
    chunk_s = steps.shortest_s([steps.prompt(tokens, depth)])
    return max(0.0, chunk_s - rows_s[tokens] - costs.prompt_seen_s * seen)


def _split_s(steps: StepTimer, costs: StepCosts) -> float:
    """Measure StepCosts.split_s: the seconds added to a step whose decodes have attention kernels
    of their own.

    costs: all other costs of a step without adapters.
    """
    decodes = min(_BESIDE, costs.max_running)
    context = min(_BESIDE_CONTEXT, steps.longest)
    chunk = min(_BESIDE_CHUNK, costs.step_tokens - decodes, steps.longest)
    depth = min(_BESIDE_DEPTH, steps.longest - chunk)
    seen = seen_tokens(chunk, depth)
    if seen < SEEN_TO_SPLIT or costs.rows_s(decodes + chunk) > _SLOW_S:  # it hardly shows
        return costs.split_s
    both = [*steps.decodes(decodes, context), steps.prompt(chunk, depth)]
    sees = decodes * costs.decode_sees(context)
    apart_s = costs.step_s(decodes + chunk, 0, sees, seen=seen) - costs.split_s
    return max(0.0, steps.shortest_s(both) - apart_s)


def _with_lora(
    costs: StepCosts, steps: StepTimer, dummies: "_DummyAdapters", chunk: int
) -> StepCosts:
    """Measure the costs of adapters, and return `costs` with them: lora_s, rank_s and lora_token_s.

    costs: measured costs of steps without adapters.
    dummies: adapters to run the timed steps with, already in the arena.
    chunk: tokens of the step with adapters that is timed if the largest step takes too long.
    """
    rank, many, most = dummies.rank, dummies.count, costs.step_tokens
    chunk_s = costs.step_s(chunk, 0, 0, seen=steps.seen(chunk))
    tokens = chunk if chunk_s > _SLOW_S else most
    if costs.rows_s(many) > _SLOW_S:
        many = min(many, _FEW)
    few = 1 if many > 1 else 0  # with a single adapter, the line starts at no adapter
    plain_s, few_s, many_s = (
        steps.shortest_s(steps.decodes(many, steps.context, count, rank))
        for count in (0, few, many)
    )
    rank_s = max(_MIN_RANK_S, (many_s - few_s) / ((many - few) * rank))
    more_s = steps.prompts_s(tokens, rank) - costs.step_s(tokens, 0, 0, seen=steps.seen(tokens))
    return replace(
        costs,
        lora_s=max(0.0, few_s - plain_s - rank_s * few * rank),
        rank_s=rank_s,
        lora_token_s=max(0.0, more_s / tokens),
    )


@dataclass(frozen=True, slots=True)
class _DummyAdapters:
    """Dummy adapters of equal rank on all linears, one after the other from the arena's start.

    The adapters share no weights, so that a step reads each from memory.

    rows: [count, layers, linears, 3], each adapter's offsets of A and B in the arena, and its rank,
        for each linear but lm_head.
    rank: rank of each adapter on each linear.
    """

    rows: torch.Tensor
    rank: int

    @classmethod
    def that_fit(cls, arena: int, shape: BaseShape, settings: EngineSettings) -> "_DummyAdapters":
        """Make as many adapters as fit into both the arena and a step.

        Their rank is lowered if the arena has no room for one adapter of the usual rank.

        arena: elements of the arena, the adapters' memory on the device.
        shape: part of the base model that this process computes.
        """
        rank = min(_RANK, settings.max_rank, arena // _image(shape, 1)[1])
        rows, elements = _image(shape, rank)
        room = arena // elements if rank else 0
        count = min(room, settings.max_batch_adapters, settings.max_running)
        places = elements * torch.arange(count)[:, None, None, None]
        return cls(rows + places * torch.tensor([1, 1, 0]), rank)

    @property
    def count(self) -> int:
        """Number of adapters."""
        return len(self.rows)

    @contextmanager
    def in_place(self, arena: DeviceArena) -> Iterator[None]:
        """Write the adapters to the first slots of LoraWeights.table during a `with` block.

        Clears the slots afterwards.
        """
        _, layers, linears, _ = self.rows.shape
        whole = torch.zeros(self.count, *arena.weights.table.shape[1:], dtype=torch.int64)
        whole[:, :layers, :linears] = self.rows
        arena.run(*(WriteRow(slot, row) for slot, row in enumerate(whole.numpy())))
        try:
            yield
        finally:
            arena.run(*map(ClearRow, range(self.count)))


def _image(shape: BaseShape, rank: int) -> tuple[torch.Tensor, int]:
    """Return an adapter's entries in LoraWeights.table, and the number of elements of its weights.

    The entries, [layers, linears, 3], are offsets of A and B in the arena, from 0 on, and the rank.
    """
    sizes = [
        [aligned(shape.matrices(linear) * rank * d) for d in shape.dims(linear)]
        for linear in range(len(shape.linears))
    ]
    sizes_ = torch.tensor(sizes).repeat(shape.layers, 1, 1)  # [layers, linears, 2]
    ends = sizes_.flatten().cumsum(0).view_as(sizes_)
    ranks = torch.full_like(ends[..., :1], rank)
    return torch.cat((ends - sizes_, ranks), -1), int(ends[-1, -1, -1])
