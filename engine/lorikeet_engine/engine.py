"""The engine: requests of token ids in, tokens out, one batch for all adapters at every step."""

import itertools
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.errors import EngineClosed, EngineError, StepFailed
from lorikeet_engine.execution.assembly import LoadModel, assemble
from lorikeet_engine.execution.batch_builder import build_step_input, group_by_adapter
from lorikeet_engine.execution.model_runner import raise_if_lost
from lorikeet_engine.execution.sampling_step import PendingSample, SampledTokens, sample_sequences
from lorikeet_engine.models import load_model
from lorikeet_engine.request import Failed, Output, Request, Tokens
from lorikeet_engine.residency.disk.cache import AdapterSource
from lorikeet_engine.sampling.grammar import Grammars
from lorikeet_engine.sampling.sampler import Sampler
from lorikeet_engine.scheduling.deadlines import Deadlines
from lorikeet_engine.scheduling.input_processor import InputProcessor
from lorikeet_engine.scheduling.kv_cache import KVCache
from lorikeet_engine.scheduling.request_queue import RequestQueue
from lorikeet_engine.scheduling.scheduler import Scheduler, SchedulerLimits
from lorikeet_engine.scheduling.sequence import Chunk, Sequence
from lorikeet_engine.scheduling.step_counters import StepCounters, StepLaunch
from lorikeet_engine.settings import EngineSettings
from lorikeet_engine.status_reader import read_status
from lorikeet_engine.telemetry.status import AdapterStatus, EngineInfo, EngineStatus, SlotUse

__all__ = ["Engine", "EngineInfo", "EngineSettings"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _InFlightStep:
    """A step that was launched and not read: its chunks as laid out, and the tokens it samples."""

    chunks: list[Chunk]
    sample: PendingSample
    launch: StepLaunch


class Engine:
    """One base model, its adapters, and the requests in flight.

    submit, abort, wake, residency, pin, unpin, prefetch, status, adapters and take_use may be
    called from any thread; wait, step, fail_all and close from one alone, for instance
    EngineLoop's; changed_status from another, for instance StatusReporter's.
    info: what callers must know. changed: set when changed_status may have something to report.
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
        self.changed = self._tiers.changed
        self._reported: EngineStatus | None = None
        self.info = parts.info
        self._grammars = grammars
        self._input_processor = InputProcessor(self.info, settings.page_size, grammars)
        self._sampler = Sampler()
        self._in_flight: _InFlightStep | None = None
        self._step_budget = parts.step_budget
        self._counters = StepCounters()
        self._reset()
        self._next_step_s: float | None = None  # until then adapters need no step
        self._requests = RequestQueue()
        self._deadlines = Deadlines(lambda p: self._scheduler.wait_s(p), self._tiers.load_s)

    def submit(self, request: Request) -> Residency | None:
        """Accept a request; its tokens come out of the steps that follow.

        Returns where its adapter is now, if it has one. max_tokens is cut to what the context
        leaves after each prompt. The context always fits into the KV cache, so every accepted
        request can run. A grammar is compiled here, which may take a second; no step waits for it.

        Raises InvalidRequest, EngineClosed, and EngineOverloaded where the request could not
        begin in nearly the time that it may wait.
        """
        self._deadlines.check(request.scheduling)
        choices = self._input_processor.process(request)
        residency = self._tiers.residency(request.adapter) if request.adapter else None
        for choice in choices:
            choice.timings.residency = residency
        self._requests.submit(request.request_id, choices)
        if residency is not None:
            self._counters.lookups.add(residency)
        self._deadlines.add(choices)
        self.wake()
        return residency

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one of its choices, without an output; what has ended is left alone."""
        self._requests.abort(request_id, choice)
        self.wake()

    def wake(self) -> None:
        """Let `wait` return."""
        self._wake.set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return as soon as a step may have something to do, or after timeout_s."""
        if self._idle:
            bounds_s = [s for s in (timeout_s, self._next_step_s) if s is not None]
            self._wake.wait(self._deadlines.next_within_s(min(bounds_s, default=None)))
            self._wake.clear()

    def step(self) -> list[Output]:
        """Launch a batch and return what the batch before it brought: at most one Tokens a choice.

        Without overlap, what this batch brought. Raises DeviceLost.
        """
        self._take_requests()
        self._next_step_s = self._tiers.advance()
        outputs = self._fail(self._deadlines.take_missed())
        plan = self._scheduler.plan(self._step_budget)
        outputs += self._fail({s.request.request_id: error for s, error in plan.failed.items()})
        previous, self._in_flight = self._in_flight, None
        if plan.chunks:
            outputs += self._launch(group_by_adapter(plan.chunks), previous)
        if previous is not None:
            outputs += self._read(previous)
        if self._in_flight is not None and not self._settings.overlap:
            step, self._in_flight = self._in_flight, None
            outputs += self._read(step)
        self._idle = not plan.chunks and previous is None
        self.changed.set()
        return outputs

    def fail_all(self, error: EngineError) -> list[Output]:
        """End every request with `error` and begin anew, whatever state the scheduler was in."""
        for sequence in (*self._scheduler.waiting, *self._scheduler.running):
            if sequence.lease is not None:
                sequence.lease.release()
        self._reset()
        return [Failed(request_id, error) for request_id in self._requests.clear()]

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
        """Load an adapter up to `tier` if no request, pin or more used adapter loses by it.

        uses: its recent uses on other replicas, as far as this one could serve them; adapters that
        are used less may be evicted for it.
        """
        self._tiers.prefetch(ref, tier, uses)

    def status(self) -> EngineStatus:
        """What the engine does and holds now, and has counted since it was started."""
        return read_status(
            self._requests, self._scheduler, self._cache, self._tiers, self._counters, self.info
        )

    def changed_status(self) -> EngineStatus | None:
        """The status and what moved, if either differs from the last call's; else None."""
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
        """Each tenant's use of adapters' slots since the call before, which one reader makes."""
        return self._tiers.take_use()

    def close(self) -> list[Output]:
        """Take no more requests, end those in flight with EngineClosed, stop loading adapters."""
        if not self._requests.close():
            return []
        outputs = self.fail_all(EngineClosed("the engine was closed: send the request again"))
        self._tiers.close()
        return outputs

    def _reset(self) -> None:
        s = self._settings
        limits = SchedulerLimits(s.max_batch_tokens, s.max_running, s.max_batch_adapters)
        self._cache = KVCache(self._kv_pages, s.page_size)
        self._scheduler = Scheduler(
            limits, self._cache, self._tiers, self.info.step_costs, self._counters
        )
        self._in_flight = None
        self._idle = True

    def _take_requests(self) -> None:
        taken = self._requests.take()
        for sequence in taken.submitted:
            self._scheduler.add(sequence)
        if taken.aborts:
            for sequence in self._scheduler.drop(taken.is_aborted):
                self._requests.choice_ended(sequence.request.request_id)

    def _launch(self, chunks: list[Chunk], previous: _InFlightStep | None) -> list[Output]:
        sampled = previous.sample.tokens if previous else None
        ranks = self._step_budget.decode_ranks(chunks) if self._step_budget else None
        launched_s = time.perf_counter()
        try:
            step_input = build_step_input(chunks, self._settings.page_size)
            batch = step_input.upload(self._device, sampled)
            logits = self._runner.forward(batch)
            sequences = [chunk.sequence for chunk in chunks if chunk.completes]
            sample = sample_sequences(self._sampler, logits, sequences, self._grammars, sampled)
            launch = StepLaunch(launched_s, len(chunks), len(batch.segments or ()), ranks)
            self._in_flight = _InFlightStep(chunks, sample, launch)
        except Exception as error:
            return self._step_failed(chunks, error)
        self._scheduler.launched(chunks)
        return []

    def _read(self, step: _InFlightStep) -> list[Output]:
        try:
            sampled = step.sample.wait()
        except Exception as error:
            return self._step_failed(step.chunks, error)
        step_s, ranks = self._counters.step_read(step.launch), step.launch.decode_ranks
        if self._step_budget and ranks is not None:
            self._step_budget.record(step_s, ranks)
        outputs: list[Output] = []
        rows = itertools.count()
        for chunk in step.chunks:
            row = next(rows) if chunk.completes else None
            if chunk.sequence.ended:
                continue
            self._scheduler.written(chunk)
            if row is not None:
                outputs += self._accept(chunk.sequence, row, sampled)
        return outputs

    def _accept(self, sequence: Sequence, row: int, sampled: SampledTokens) -> list[Output]:
        request_id, token = sequence.request.request_id, sampled.tokens[row]
        try:
            if error := sampled.errors.get(row):
                raise error
            finish = sequence.accept(token)
        except EngineError as error:
            return self._fail({request_id: error})
        if finish is not None:
            self._scheduler.finish(sequence)
            self._requests.choice_ended(request_id)
        is_first = sequence.timings.first_token_s is None
        timings = sequence.timings.engine_timings() if finish or is_first else None
        if token in sequence.stop_ids:
            return [Tokens(request_id, sequence.choice, (), finish, timings=timings)]
        self._counters.token_delivered(sequence)
        logprobs = (sampled.logprobs[row],) if row in sampled.logprobs else ()
        return [Tokens(request_id, sequence.choice, (token,), finish, logprobs, timings)]

    def _step_failed(self, chunks: list[Chunk], error: Exception) -> list[Output]:
        ids = {c.sequence.request.request_id for c in chunks if not c.sequence.ended}
        log.error("step_failed", exc_info=error, extra={"requests": sorted(ids)})
        raise_if_lost(self._device, error)
        failure = StepFailed(f"the step of this request failed: {type(error).__name__}")
        return self._fail(dict.fromkeys(ids, failure))

    def _fail(self, errors: Mapping[str, EngineError]) -> list[Output]:
        if errors:
            self._scheduler.drop(lambda s: s.request.request_id in errors)
            for request_id in errors:
                self._requests.request_failed(request_id)
        return [Failed(request_id, error) for request_id, error in errors.items()]
