"""Follower: runs the leader's steps on its own GPU and its part of the model."""

import gc
import logging
import os
from collections.abc import Callable
from functools import partial

import torch

from lorikeet_engine.device.border_memory import MoveUnit
from lorikeet_engine.device.memory import free_bytes, resolve
from lorikeet_engine.execution.assembly import load_weights, rank_border
from lorikeet_engine.execution.batch_builder import LogitsInput
from lorikeet_engine.execution.leading_runner import RunStep
from lorikeet_engine.execution.memory_plan import count_slots, count_states_and_pages
from lorikeet_engine.execution.page_copies import (
    AllocateHostPages,
    FetchPages,
    RankMemory,
    StorePages,
    WritePages,
    allocate_rank_memory,
)
from lorikeet_engine.execution.rank_rows import RowAnswer, RowQuestion
from lorikeet_engine.execution.ranks import BuildRunner, CountPages, StartFollower, rank_device
from lorikeet_engine.execution.runner_parts import RunnerParts
from lorikeet_engine.execution.steps import ModelRunner
from lorikeet_engine.kernels.lora.types import Segments
from lorikeet_engine.models.served_rows import ServedRows
from lorikeet_engine.parallel.followers import CopyReport
from lorikeet_engine.parallel.rank_group import RankGroup
from lorikeet_engine.parallel.ring import SharedMemory
from lorikeet_engine.parallel.shard import Shard
from lorikeet_engine.residency.gpu.arena import allocate_weights
from lorikeet_engine.residency.gpu.image_copies import CopyEvent
from lorikeet_engine.residency.gpu.rank_arenas import CopyImage, FollowingArena
from lorikeet_engine.residency.host_arena import host_memory
from lorikeet_engine.residency.workers import Workers
from lorikeet_engine.telemetry.start_up import StartUpStages

log = logging.getLogger(__name__)


class Follower:
    """Model, adapter memory and KV pages of one rank; carries out commands of the leader, rank 0.

    The leader's assembly (assembly.py) allocates the same parts in the same order.
    """

    def __init__(
        self,
        start: StartFollower,
        shard: Shard,
        host: SharedMemory,
        report: Callable[[CopyReport], None],
    ) -> None:
        """Join the other ranks, load this rank's part of the model, allocate its adapter memory.

        start: the leader's first command.
        shard: this rank's index and the number of ranks.
        host: memory shared by all ranks, in which the host tier's adapter images, their packed
            weights, are.
        report: called on another thread when a copy of an adapter image has finished.
        """
        settings = self._settings = start.settings
        device = self._device = rank_device(torch.device(settings.device), shard)
        self._stages, self._shard, self._report = StartUpStages(device), shard, report
        self._group = RankGroup(shard, start.rendezvous, device)
        self._model = load_weights(start.load, settings, device, self._group, self._stages)
        self._rows = ServedRows(self._model)
        with self._stages.stage("slot pool"):
            least = partial(_least, self._group)
            self._border = rank_border(self._model, settings, device, self._stages.free, least)
            self._arena = self._allocate_arena(host)
        self._parts = RunnerParts.of(self._model, self._arena.weights, settings, self._border)
        self._runner: ModelRunner | None = None
        self._copies = Workers(1, "copies")
        self._steps = Workers(1, "steps")
        moves = self._border is not None and device.type == "cuda"
        self._moves = Workers(1, "border") if moves else None
        self._host_pages: RankMemory | None = None
        self._fetches: Workers | None = None  # with host memory for KV pages
        self._writes: Workers | None = None

    def do(self, message: object) -> None:
        """Carry out a command of the leader. Commands must come in the order they were sent.

        message: a RunStep, CopyImage, BuildRunner, CountPages, MoveUnit, a command of
            page_copies.py or of the arena.
        """
        match message:
            case RunStep():
                self._run(message)
            case CopyImage():
                self._copy(message)
            case BuildRunner(pages, slots, trial):
                self._runner = None
                self._runner = self._parts.build(pages, slots, trial=trial)
            case CountPages():
                self._count_pages()
            case AllocateHostPages():
                self._allocate_host_pages()
            case MoveUnit():
                self._move_unit(message)
            case StorePages(copies, states):
                assert self._host_pages is not None, "pages without host memory for them"
                self._host_pages.store(copies, states)
            case FetchPages():
                self._copy_pages(message, self._fetches)
            case WritePages():
                self._copy_pages(message, self._writes)
            case command:
                self._arena.run(command)  # type: ignore[arg-type]

    def answer(self, question: RowQuestion) -> RowAnswer:
        """Answer a question of the leader, about this rank's rows of a linear. For any thread."""
        return question.answer(self._rows)

    def _allocate_arena(self, host: SharedMemory) -> FollowingArena:
        settings, shape = self._settings, self._model.config.shape
        if self._border is None:
            memory = None
            gpu_bytes = _least(self._group, resolve(settings.adapter_gpu_bytes, self._stages.free))
        else:
            memory, gpu_bytes = self._border.arena, self._border.most_bytes
        dtype = settings.torch_adapter_dtype
        slots = count_slots(gpu_bytes // dtype.itemsize, shape, settings.max_batch_adapters)
        weights = allocate_weights(shape, gpu_bytes, slots, dtype, self._device, memory)
        elements = settings.adapter_host_bytes // dtype.itemsize
        images = host_memory(elements, dtype, self._device.type == "cuda", host)
        return FollowingArena(weights, self._device, images, self._shard.index)

    def _count_pages(self) -> None:
        if self._device.type == "cuda":
            taken = self._stages.free - free_bytes(self._device)
            self._stages.take("steps and graphs", taken)
            self._runner = None
            gc.collect()
            torch.cuda.empty_cache()
        model, settings = self._model, self._settings
        count_states_and_pages(
            model.config,
            model.shape,
            settings,
            self._stages,
            partial(_least, self._group),
        )

    def _allocate_host_pages(self) -> None:
        assert self._runner is not None, "host memory before there are KV pages"
        runner, settings = self._runner, self._settings
        allocated = allocate_rank_memory(
            runner.kv,
            runner.state_tensors,
            settings,
            len(runner.kv_windows),
            partial(_least, self._group),
        )
        if allocated is not None:
            self._host_pages = allocated
            self._fetches, self._writes = Workers(1, "kv-pages"), Workers(1, "kv-disk")

    def _copy_pages(self, message: FetchPages | WritePages, worker: Workers | None) -> None:
        assert self._host_pages is not None, "pages without host memory for them"
        assert worker is not None, "pages without a thread that copies them"
        run = message.prepare(self._host_pages)

        def report() -> None:
            try:
                damaged = run()
            except Exception:
                log.exception("kv_pages_not_copied")
                damaged = max(1, len(message.copies))
            self._report(CopyReport(message.number, damaged))

        if self._host_pages.waits:
            worker.submit(report, urgent=True)
        else:
            report()

    def _move_unit(self, message: MoveUnit) -> None:
        assert self._border is not None, "memory that moves without a border"
        move = self._border.memory.move(message)

        def report() -> None:
            failed = 0
            try:
                move()
            except Exception:
                log.exception("memory_not_moved")
                failed = 1
            self._report(CopyReport(message.number, failed))

        if self._moves is not None:
            self._moves.submit(report, urgent=True)
        else:
            report()

    def _run(self, message: RunStep) -> None:
        runner, step = self._runner, message.step
        assert runner is not None, "a step before there are KV pages"
        tokens = None
        if message.previous_rows:
            tokens = torch.empty(message.previous_rows, dtype=torch.int64, device=self._device)
            self._group.broadcast_tokens(tokens)
        batch = step.upload(self._device, tokens)
        scores = _MoreLogits(message.logits) if message.logits else None
        (runner.forward if message.graphs else runner.forward_eager)(batch, scores)
        if self._device.type == "cuda":
            # blocking=True: the thread sleeps and leaves its core to others
            over = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            over.record()
            self._steps.submit(partial(_wait, over), urgent=True)

    def _copy(self, message: CopyImage) -> None:
        total, event = self._arena.copy_own(message)

        def report() -> None:
            if event is not None:
                _wait(event)
            self._report(CopyReport(message.copy, int(total.wait())))

        if event is None:
            report()
        else:
            self._copies.submit(report, urgent=True)


class _MoreLogits:
    """LogitsReader that computes a follower's part of the logits, which only the leader reads."""

    def __init__(self, inputs: tuple[LogitsInput, ...]) -> None:
        self._inputs = inputs

    def compute(
        self,
        hidden: torch.Tensor,
        logits_of: Callable[[torch.Tensor, Segments | None], torch.Tensor],
    ) -> None:
        for each in self._inputs:
            rows, heads = each.upload(hidden.device)
            logits_of(hidden[rows], heads)


def _least(group: RankGroup, number: int) -> int:
    return group.minimum((number,))[0]


def _wait(event: CopyEvent) -> None:
    """Wait until the device has reached an event.

    If the device fails, end the process, because no later call may report the failure.
    """
    try:
        event.synchronize()
    except RuntimeError as error:
        log.critical("device_lost", extra={"error": str(error)})
        os._exit(1)
