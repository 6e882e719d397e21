"""Measures at start what steps cost on this engine."""

import logging
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch

from lorikeet_engine.adapter_format import BaseShape, aligned
from lorikeet_engine.costs import StepCosts
from lorikeet_engine.errors import SettingsError
from lorikeet_engine.execution.batch_builder import build_step_input
from lorikeet_engine.execution.model_runner import ModelRunner
from lorikeet_engine.execution.warm_up import DummyLease, dummy_chunk
from lorikeet_engine.kernels.lora.types import LoraWeights
from lorikeet_engine.scheduling.sequence import Chunk
from lorikeet_engine.settings import EngineSettings

log = logging.getLogger(__name__)

_RANK = 16
_CONTEXT = 256  # tokens that each decode sees
_REPEATS = 2
_LONG_STEP_S = 0.05  # a longer step is timed once: noise is small beside it
# Noise can hide what ranks cost a tiny model; no device reads one faster than this.
_MIN_RANK_S = 1e-9


def measure_step_costs(
    runner: ModelRunner,
    kv_pages: int,
    weights: LoraWeights,
    shape: BaseShape,
    settings: EngineSettings,
) -> StepCosts:
    """Time a few dummy steps, which run as real ones do.

    kv_pages, weights: the runner's; the weights hold no adapter yet, and none afterwards. The costs
    of adapters keep their defaults where there is no room for rank 1 on all linears. Raises
    SettingsError if inter_token_goal_s is set then, which needs them.
    """
    steps = _StepTimer(runner, kv_pages, settings)
    one_s, all_s = steps.decodes_s(1), steps.decodes_s(settings.max_running)
    # More work is never faster: where it seems so, here and below, it is noise.
    sequence_s = max(0.0, all_s - one_s) / max(1, settings.max_running - 1)
    costs = StepCosts(
        base_s=max(0.0, one_s - sequence_s),
        sequence_s=sequence_s,
        prompt_token_s=steps.prompts_s() / settings.max_batch_tokens,
        step_tokens=settings.max_batch_tokens,
        max_running=settings.max_running,
    )
    dummies = _DummyAdapters.that_fit(weights, shape, settings)
    if dummies.count:
        with dummies.in_place(weights):
            costs = _with_lora(costs, steps, dummies)
    elif settings.inter_token_goal_s is not None:
        raise SettingsError(
            f"adapter_gpu_bytes={settings.adapter_gpu_bytes}: too small to measure what ranks "
            "cost, which inter_token_goal_s needs: raise the one or do without the other"
        )
    log.info("step_costs_measured", extra=asdict(costs))
    return costs


def _with_lora(costs: StepCosts, steps: "_StepTimer", dummies: "_DummyAdapters") -> StepCosts:
    """The costs with those of adapters, whose share of a step is a line over Σ rank."""
    rank, many = dummies.rank, dummies.count
    few = 1 if many > 1 else 0  # with a single point, the line goes through none
    plain_s, few_s, many_s = (steps.decodes_s(many, count, rank) for count in (0, few, many))
    rank_s = max(_MIN_RANK_S, (many_s - few_s) / ((many - few) * rank))
    prompt_token_s = steps.prompts_s(rank) / costs.step_tokens
    return replace(
        costs,
        lora_s=max(0.0, few_s - plain_s - rank_s * few * rank),
        rank_s=rank_s,
        lora_token_s=max(0.0, prompt_token_s - costs.prompt_token_s),
    )


class _StepTimer:
    """Times steps of dummy sequences."""

    def __init__(self, runner: ModelRunner, kv_pages: int, settings: EngineSettings) -> None:
        self._runner, self._kv_pages, self._settings = runner, kv_pages, settings
        self._longest = min(runner.model.config.max_context, kv_pages * settings.page_size)

    def decodes_s(self, sequences: int, adapters: int = 0, rank: int = 0) -> float:
        """Time a step of this many decodes, of which the first `adapters` have one each."""
        leases = [DummyLease(i, rank) for i in range(adapters)]
        chunks = [self._decode(i, lease) for i, lease in enumerate(leases)]
        chunks += [self._decode(i, None) for i in range(adapters, sequences)]
        return self._shortest_s(chunks)

    def prompts_s(self, rank: int = 0) -> float:
        """Time a step full of prompts' tokens; with one adapter if `rank` is not 0."""
        whole, rest = divmod(self._settings.max_batch_tokens, self._longest)
        lengths = [self._longest] * whole + [rest] * (rest > 0)
        lease = DummyLease(0, rank) if rank else None
        return self._shortest_s([dummy_chunk(n, self._settings.page_size, lease) for n in lengths])

    def _decode(self, index: int, lease: DummyLease | None) -> Chunk:
        """The last token of a sequence, on pages of its own if there are enough."""
        context = min(_CONTEXT, self._longest)
        sequence = dummy_chunk(context, self._settings.page_size, lease).sequence
        kv = sequence.kv
        pages = len(kv.pages)
        kv.pages = array("i", [(index * pages + i) % self._kv_pages for i in range(pages)])
        kv.computed = context - 1
        return Chunk.of(sequence, 1)

    def _shortest_s(self, chunks: list[Chunk]) -> float:
        """The shortest of a few times: what else the machine does only makes a step longer."""
        device = self._runner.model.device
        batch = build_step_input(chunks, self._settings.page_size).upload(device)
        taken_s = list[float]()
        while len(taken_s) < _REPEATS and sum(taken_s) < _LONG_STEP_S:
            began_s = time.perf_counter()
            self._runner.forward(batch)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken_s.append(time.perf_counter() - began_s)
        return min(taken_s)


@dataclass(frozen=True, slots=True)
class _DummyAdapters:
    """Adapters of one rank on all linears, side by side at the front of the arena.

    They share no weights, so each is read from memory. rows [count, layers, linears, 3]: their
    rows of the table.
    """

    rows: torch.Tensor
    rank: int

    @classmethod
    def that_fit(
        cls, weights: LoraWeights, shape: BaseShape, settings: EngineSettings
    ) -> "_DummyAdapters":
        """Make as many as a step may have and fit into the arena, if need be of lower rank."""
        arena = weights.arena.numel()
        rank = min(_RANK, settings.max_rank, arena // _image(shape, 1)[1])
        rows, elements = _image(shape, rank)
        room = arena // elements if rank else 0
        count = min(room, settings.max_batch_adapters, settings.max_running)
        places = elements * torch.arange(count)[:, None, None, None]
        return cls(rows + places * torch.tensor([1, 1, 0]), rank)

    @property
    def count(self) -> int:
        """How many adapters there are."""
        return len(self.rows)

    @contextmanager
    def in_place(self, weights: LoraWeights) -> Iterator[None]:
        """Put the adapters into the first slots of the table, and take them out afterwards."""
        weights.table[: self.count] = self.rows.to(weights.table.device)
        try:
            yield
        finally:
            weights.table[: self.count] = 0


def _image(shape: BaseShape, rank: int) -> tuple[torch.Tensor, int]:
    """An adapter's row of the table, [layers, linears, 3], with its weights at 0; its elements."""
    sizes = [
        [aligned(rank * d) for d in shape.dims(linear)] for linear in range(len(shape.linears))
    ]
    sizes_ = torch.tensor(sizes).repeat(shape.layers, 1, 1)  # [layers, linears, 2]
    ends = sizes_.flatten().cumsum(0).view_as(sizes_)
    ranks = torch.full_like(ends[..., :1], rank)
    return torch.cat((ends - sizes_, ranks), -1), int(ends[-1, -1, -1])
