"""What the ranks of adapters cost a step of decodes, measured on the engine that will run it."""

import logging
import time
from statistics import median

import torch

from lorikeet_engine.adapter_format import LINEARS, BaseShape, aligned
from lorikeet_engine.batch import Batch
from lorikeet_engine.batch_builder import build_batch
from lorikeet_engine.engine_settings import EngineSettings
from lorikeet_engine.errors import SettingsError
from lorikeet_engine.kernels.lora.types import LoraWeights
from lorikeet_engine.rank_budget import RankCost
from lorikeet_engine.runner import Runner
from lorikeet_engine.warm_up import DummyLease, dummy_chunk

log = logging.getLogger(__name__)

_RANK = 16
_REPEATS = 9
# Noise can hide what ranks cost a tiny model; no device reads one faster than this.
_LEAST_SLOPE_S = 1e-9


def measure_rank_cost(
    runner: Runner, weights: LoraWeights, shape: BaseShape, settings: EngineSettings
) -> RankCost:
    """Time the largest step of decodes without adapters, then with as many as there may be.

    weights: the runner's, in which no adapter is yet; they are left so. Raises SettingsError where
    they have no room for rank 1 on all linears.
    """
    rank = min(_RANK, settings.max_rank, weights.arena.numel() // _image(shape, 1)[1])
    if rank == 0:
        raise SettingsError(
            f"adapter_gpu_bytes={settings.adapter_gpu_bytes}: too small to measure what ranks "
            "cost, which inter_token_goal_s needs: raise the one or do without the other"
        )
    rows, elements = _image(shape, rank)
    room = weights.arena.numel() // elements
    adapters = min(room, settings.max_batch_adapters, settings.max_running)
    places = elements * torch.arange(adapters)[:, None, None, None]
    rows = rows + places * torch.tensor([1, 1, 0])  # [adapters, layers, linears, 3]
    base, mixed = (_decodes(runner, settings, count, rank) for count in (0, adapters))
    weights.table[:adapters] = rows.to(weights.table.device)
    try:
        base_s, mixed_s = _durations_s(runner, base, mixed)
    finally:
        weights.table[:adapters] = 0
    cost = RankCost(base_s, max(_LEAST_SLOPE_S, (mixed_s - base_s) / (adapters * rank)))
    log.info("rank_cost_measured", extra=cost._asdict() | {"ranks": adapters * rank})
    return cost


def _image(shape: BaseShape, rank: int) -> tuple[torch.Tensor, int]:
    """An adapter of this rank on all linears, as the table has it, and its elements.

    [layers, linears, 3], at the front of the arena. Adapters side by side share no weights, so
    each is read from memory.
    """
    sizes = [[aligned(rank * d) for d in shape.dims(linear)] for linear in range(len(LINEARS))]
    sizes_ = torch.tensor(sizes).repeat(shape.layers, 1, 1)  # [layers, linears, 2]
    ends = sizes_.flatten().cumsum(0).view_as(sizes_)
    ranks = torch.full_like(ends[..., :1], rank)
    return torch.cat((ends - sizes_, ranks), -1), int(ends[-1, -1, -1])


def _decodes(runner: Runner, settings: EngineSettings, adapters: int, rank: int) -> Batch:
    """All sequences decode; the first `adapters` have one each."""
    chunks = [
        dummy_chunk(1, settings.page_size, DummyLease(i, rank) if i < adapters else None)
        for i in range(settings.max_running)
    ]
    return build_batch(chunks, settings.page_size, runner.model.device)


def _durations_s(runner: Runner, *batches: Batch) -> list[float]:
    """The median of each, measured in turn."""
    device = runner.model.device
    taken_s = list[list[float]]()
    for _ in range(1 + _REPEATS):
        taken_s.append([])
        for batch in batches:
            began_s = time.perf_counter()
            runner.forward(batch)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken_s[-1].append(time.perf_counter() - began_s)
    return [median(column) for column in zip(*taken_s[1:], strict=True)]  # the first warms up
