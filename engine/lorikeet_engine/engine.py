"""The engine: requests of token ids in, tokens out, one batch for all adapters at every step."""

import itertools
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.errors import (
    DeviceLost,
    EngineClosed,
    EngineError,
    StepFailed,
)
from lorikeet_engine.execution.assembly import LoadModel, assemble
from lorikeet_engine.execution.batch_builder import by_adapter, step_input
from lorikeet_engine.execution.sampling_step import Draws, SampledTokens, draw
from lorikeet_engine.models import load_model
from lorikeet_engine.request import Failed, Output, Request, Tokens
from lorikeet_engine.residency.disk.cache import AdapterSource
from lorikeet_engine.sampling.grammar import Grammars
from lorikeet_engine.sampling.sampler import Sampler
from lorikeet_engine.scheduling.deadlines import Deadlines
from lorikeet_engine.scheduling.input_processor import EngineConfig, InputProcessor
from lorikeet_engine.scheduling.kv_cache import KVCache
from lorikeet_engine.scheduling.request_queue import RequestQueue
from lorikeet_engine.scheduling.scheduler import Bounds, Scheduler
from lorikeet_engine.scheduling.sequence import Chunk, Sequence
from lorikeet_engine.scheduling.step_counters import Launch, StepCounters
from lorikeet_engine.settings import EngineSettings
from lorikeet_engine.status_reader import read_status
from lorikeet_engine.telemetry.status import AdapterStatus, EngineStatus, SlotUse

__all__ = ["Engine", "EngineConfig", "EngineSettings"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that was launched and not read: its chunks as laid out, the tokens it draws."""

    chunks: list[Chunk]
    draws: Draws
    launch: Launch


class Engine:
    """One base model, its adapters, and the requests in flight.

    submit, abort, wake, residency, pin, unpin, prefetch, status, adapters and take_use may be
    called from any thread; wait, step, fail_all and close from one alone, for instance
    EngineLoop's; changed_status from another, for instance Reporter's. changed: set when that may
    have something to say.
    """

    def __init__(
        self,
        settings: EngineSettings,
        source: AdapterSource,
        load: LoadModel = load_model,
        grammars: Grammars | None = None,
    ) -> None:
        """Load the model and allocate all the memory that serving needs.

        load: reads the base model, as load_model does. grammars: for requests that have one.
        Raises ModelError, and SettingsError where something does not fit into the device's memory.
        On CUDA no kernel is compiled afterwards.
        """
        self._settings = settings
        self._device = torch.device(settings.device)
        self._wake = threading.Event()
        parts = assemble(settings, source, load, self.wake)
        self._runner, self._tiers, self._kv_pages = parts.runner, parts.tiers, parts.kv_pages
        self.changed = self._tiers.noted
        self._reported: EngineStatus | None = None
        model = self._runner.model
        self.config = EngineConfig(
            model.config.vocab_size,
            min(model.config.max_context, self._kv_pages * settings.page_size),
            model.config.eos_token_ids,
            parts.step_costs,
        )
        self._grammars = grammars
        self._intake = InputProcessor(self.config, settings.page_size, grammars)
        self._sampler = Sampler()
        self._flight: _Flight | None = None
        self._budget = parts.rank_budget
        self._counts = StepCounters()
        self._begin()
        self._idle = True
        self._again_s: float | None = None  # after which adapters want a step
        self._inbox = RequestQueue()
        self._deadlines = Deadlines(lambda t: self._scheduler.wait_s(t), self._tiers.load_s)

    def submit(self, request: Request) -> Residency | None:
        """Take a request; its tokens come out of the steps that follow.

        Returns where its adapter is now, if it has one. max_tokens is cut to what the context
        leaves after each prompt. The context always fits into the KV cache, so whatever is taken
        can run. A grammar is compiled here, which may take a second; no step waits for it.

        Raises InvalidRequest, EngineClosed, and EngineOverloaded where the request could not
        begin in nearly the time that it may wait.
        """
        self._deadlines.check(request.terms)
        choices = self._intake.sequences(request)
        found = self._tiers.residency(request.adapter) if request.adapter else None
        for choice in choices:
            choice.progress.found = found
        self._inbox.submit(request.request_id, choices)
        if found is not None:
            self._counts.lookups.add(found)
        self._deadlines.add(choices)
        self.wake()
        return found

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one of its choices, without an output; what has ended is left alone."""
        self._inbox.abort(request_id, choice)
        self.wake()

    def wake(self) -> None:
        """Let `wait` return."""
        self._wake.set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return as soon as a step may have something to do, or after timeout_s."""
        if self._idle:
            bounds_s = [s for s in (timeout_s, self._again_s) if s is not None]
            self._wake.wait(self._deadlines.within_s(min(bounds_s, default=None)))
            self._wake.clear()

    def step(self) -> list[Output]:
        """Launch one batch and say what became of the one before: at most one Tokens a choice.

        Without overlap, of this one. Raises DeviceLost.
        """
        self._take_in()
        self._again_s = self._tiers.advance()
        outputs = self._fail(self._deadlines.missed())
        plan = self._scheduler.plan(self._budget)
        outputs += self._fail({s.request.request_id: error for s, error in plan.failed})
        before, self._flight = self._flight, None
        if plan.chunks:
            outputs += self._launch(by_adapter(plan.chunks), before)
        if before is not None:
            outputs += self._read(before)
        if self._flight is not None and not self._settings.overlap:
            flight, self._flight = self._flight, None
            outputs += self._read(flight)
        self._idle = not plan.chunks and before is None
        self.changed.set()
        return outputs

    def fail_all(self, error: EngineError) -> list[Output]:
        """End every request with `error` and begin anew, whatever state the scheduler was in."""
        for sequence in (*self._scheduler.waiting, *self._scheduler.running):
            if sequence.lease is not None:
                sequence.lease.release()
        self._flight = None
        self._begin()
        self._idle = True
        return [Failed(request_id, error) for request_id in self._inbox.clear()]

    def residency(self, ref: AdapterRef) -> Residency:
        """The fastest place that holds an adapter now."""
        return self._tiers.residency(ref)

    def pin(self, ref: AdapterRef, tier: Residency = Residency.GPU) -> None:
        """Load an adapter up to `tier` and keep it there until `unpin`."""
        self._tiers.pin(ref, tier)
        self.wake()

    def unpin(self, digest: str) -> None:
        """Let an adapter be evicted again."""
        self._tiers.unpin(digest)
        self.wake()

    def prefetch(self, ref: AdapterRef, tier: Residency = Residency.GPU, uses: float = 0.0) -> None:
        """Bring an adapter up to `tier` if that costs nobody anything; else forget it.

        uses: of late by other replicas, as far as this one could serve them: what is used less may
        be evicted for it.
        """
        self._tiers.prefetch(ref, tier, uses)

    def status(self) -> EngineStatus:
        """What the engine does and holds now, and has counted since it was started."""
        return read_status(
            self._inbox.submitted,
            self._scheduler,
            self._cache,
            self._tiers,
            self._counts,
            self.config.step_costs,
        )

    def changed_status(self) -> EngineStatus | None:
        """The status if it is another than at the last call, with what has moved; else None."""
        moved, status = self._tiers.moved(), self.status()
        if not moved and status == self._reported:
            return None
        self._reported = status
        return replace(status, moved=moved)

    def adapters(self, tier: Residency = Residency.DISK) -> list[AdapterStatus]:
        """What lies in the GPU's arena, and what else of the engine's is at `tier` or nearer.

        A few milliseconds for thousands, in which steps go on.
        """
        return self._tiers.adapters(tier)

    def take_use(self) -> list[SlotUse]:
        """Who used adapters' slots since the call before, which one reader makes."""
        return self._tiers.take_use()

    def close(self) -> list[Output]:
        """Take no more requests, end those in flight with EngineClosed, stop loading adapters."""
        if not self._inbox.close():
            return []
        outputs = self.fail_all(EngineClosed("the engine was closed: send the request again"))
        self._tiers.close()
        return outputs

    def _begin(self) -> None:
        settings = self._settings
        bounds = Bounds(
            settings.max_batch_tokens, settings.max_running, settings.max_batch_adapters
        )
        self._cache = KVCache(self._kv_pages, settings.page_size)
        self._scheduler = Scheduler(
            bounds, self._cache, self._tiers, self.config.step_costs, self._counts
        )

    def _take_in(self) -> None:
        submitted, aborted = self._inbox.take()
        for sequence in submitted:
            self._scheduler.add(sequence)
        if aborted:
            dropped = self._scheduler.drop(
                lambda s: (
                    (s.request.request_id, None) in aborted
                    or (s.request.request_id, s.choice) in aborted
                )
            )
            for sequence in dropped:
                self._inbox.ended(sequence.request.request_id)

    def _launch(self, chunks: list[Chunk], before: "_Flight | None") -> list[Output]:
        drawn = before.draws.drawn if before else None
        ranks = self._budget.ranks_of(chunks) if self._budget else None
        launched_s = time.perf_counter()
        try:
            batch = step_input(chunks, self._settings.page_size).upload(self._device, drawn)
            logits = self._runner.forward(batch)
            sequences = [chunk.sequence for chunk in chunks if chunk.completes]
            draws = draw(self._sampler, logits, sequences, self._grammars, drawn)
            launch = Launch(launched_s, len(chunks), len(batch.segments or ()), ranks)
            self._flight = _Flight(chunks, draws, launch)
        except Exception as error:
            return self._step_failed(chunks, error)
        self._scheduler.launched(chunks)
        return []

    def _read(self, flight: "_Flight") -> list[Output]:
        try:
            drawn = flight.draws.wait()
        except Exception as error:
            return self._step_failed(flight.chunks, error)
        took_s, ranks = self._counts.read(flight.launch), flight.launch.ranks
        if self._budget and ranks is not None:
            self._budget.took(took_s, ranks)
        outputs: list[Output] = []
        rows = itertools.count()
        for chunk in flight.chunks:
            row = next(rows) if chunk.completes else None
            if chunk.sequence.ended:
                continue
            self._scheduler.written(chunk)
            if row is not None:
                outputs += self._accept(chunk.sequence, row, drawn)
        return outputs

    def _accept(self, sequence: Sequence, row: int, drawn: SampledTokens) -> list[Output]:
        request_id, token = sequence.request.request_id, drawn.tokens[row]
        try:
            if error := drawn.errors.get(row):
                raise error
            finish = sequence.accept(token)
        except EngineError as error:
            return self._fail({request_id: error})
        if finish is not None:
            self._scheduler.finish(sequence)
            self._inbox.ended(request_id)
        progress = sequence.progress
        course = progress.course() if finish or progress.first_s is None else None
        if token in sequence.stop_ids:
            return [Tokens(request_id, sequence.choice, (), finish, course=course)]
        self._counts.told(sequence)
        told = (drawn.logprobs[row],) if row in drawn.logprobs else ()
        return [Tokens(request_id, sequence.choice, (token,), finish, told, course)]

    def _step_failed(self, chunks: list[Chunk], error: Exception) -> list[Output]:
        ids = {c.sequence.request.request_id for c in chunks if not c.sequence.ended}
        log.error("step_failed", exc_info=error, extra={"requests": sorted(ids)})
        self._check_device(error)
        failure = StepFailed(f"the step of this request failed: {type(error).__name__}")
        return self._fail(dict.fromkeys(ids, failure))

    def _check_device(self, error: Exception) -> None:
        if self._device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as lost:  # an error of the device stays; any other is over by now
            raise DeviceLost(f"{self._device} failed and stays so: {error}") from lost

    def _fail(self, errors: Mapping[str, EngineError]) -> list[Output]:
        if errors:
            self._scheduler.drop(lambda s: s.request.request_id in errors)
            for request_id in errors:
                self._inbox.failed(request_id)
        return [Failed(request_id, error) for request_id, error in errors.items()]
