"""The engine: requests of token ids in, tokens out, one batch for all adapters at every step."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.assembly import allocate_kv, build_runner, build_tiers
from lorikeet_engine.batch_builder import build_batch, by_adapter
from lorikeet_engine.engine_settings import EngineSettings
from lorikeet_engine.errors import EngineClosed, EngineError, InvalidRequest, StepFailed
from lorikeet_engine.intake import EngineConfig, Intake
from lorikeet_engine.kv_cache import KVCache
from lorikeet_engine.models import Model, load_model
from lorikeet_engine.request import EngineReport, Failed, Output, Request, Tokens
from lorikeet_engine.residency.disk import AdapterSource
from lorikeet_engine.sampling import Sampler, SamplingRow
from lorikeet_engine.scheduler import Bounds, Scheduler
from lorikeet_engine.sequence import Chunk, Sequence

__all__ = ["Engine", "EngineConfig", "EngineSettings"]

log = logging.getLogger(__name__)

LoadModel = Callable[[Path, torch.device, torch.dtype, int | None], Model]


class Engine:
    """One base model, its adapters, and the requests in flight.

    submit, abort, wake, residency, pin, unpin and report may be called from any thread; wait, step,
    fail_all and close from one alone, for instance EngineLoop's.
    """

    def __init__(
        self, settings: EngineSettings, source: AdapterSource, load: LoadModel = load_model
    ) -> None:
        """Load the model and allocate all the memory that serving needs.

        load: reads the base model, as load_model does. Raises ModelError, and SettingsError if
        kv_bytes has no room for one sequence.
        """
        self._settings = settings
        self._device = torch.device(settings.device)
        dtype = settings.torch_dtype
        model = load(settings.model, self._device, dtype, settings.max_context)
        kv = allocate_kv(model.config, settings, self._device)
        self._kv_pages = kv.shape[2]
        self.config = EngineConfig(
            model.config.vocab_size,
            min(model.config.max_context, self._kv_pages * settings.page_size),
            model.config.eos_token_ids,
        )
        self._intake = Intake(self.config, settings.page_size)
        self._wake = threading.Event()
        self._tiers = build_tiers(settings, source, self._device, self.wake)
        self._runner = build_runner(
            model, self._tiers.weights, kv, settings, self.config.max_context
        )
        self._sampler = Sampler()
        self._begin()
        self._idle = True
        self._lock = threading.Lock()  # guards the four below
        self._closed = False
        self._open: dict[str, int] = {}  # request id → choices that have not ended
        self._submitted: deque[Request] = deque()
        self._aborted: deque[tuple[str, int | None]] = deque()

    def submit(self, request: Request) -> None:
        """Take a request; its tokens come out of the steps that follow.

        max_tokens is cut to what the context leaves after each prompt. The context always fits
        into the KV cache, so whatever is taken can run. Raises InvalidRequest, EngineClosed.
        """
        self._intake.check(request)
        with self._lock:
            if self._closed:
                raise EngineClosed("the engine is closed: send the request to another replica")
            if request.request_id in self._open:
                raise InvalidRequest(
                    f"request_id={request.request_id!r} is in flight: want a new one",
                    param="request_id",
                )
            self._open[request.request_id] = len(request.prompts) * request.n
            self._submitted.append(request)
        self.wake()

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one of its choices, without an output; what has ended is left alone."""
        with self._lock:
            if request_id in self._open:
                self._aborted.append((request_id, choice))
        self.wake()

    def wake(self) -> None:
        """Let `wait` return."""
        self._wake.set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return as soon as a step may have something to do, or after timeout_s."""
        if self._idle:
            self._wake.wait(timeout_s)
            self._wake.clear()

    def step(self) -> list[Output]:
        """Compute one batch and say what became of it: at most one Tokens for each choice."""
        self._take_in()
        self._tiers.advance()
        plan = self._scheduler.plan()
        outputs = self._fail({s.request.request_id: error for s, error in plan.failed})
        chunks = by_adapter(plan.chunks)
        self._idle = not chunks
        if not chunks:
            return outputs
        try:
            drawn = self._compute(chunks)
        except Exception as error:
            ids = {chunk.sequence.request.request_id for chunk in chunks}
            log.exception("step_failed", extra={"requests": sorted(ids)})
            failure = StepFailed(f"the step of this request failed: {type(error).__name__}")
            return outputs + self._fail(dict.fromkeys(ids, failure))
        return outputs + self._advance(chunks, drawn)

    def fail_all(self, error: EngineError) -> list[Output]:
        """End every request with `error` and begin anew, whatever state the scheduler was in."""
        for sequence in (*self._scheduler.waiting, *self._scheduler.running):
            if sequence.lease is not None:
                sequence.lease.release()
        self._begin()
        self._idle = True
        with self._lock:
            ids = list(self._open)
            self._open.clear()
            self._submitted.clear()
        return [Failed(request_id, error) for request_id in ids]

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

    def report(self) -> EngineReport:
        """What the engine holds and does now."""
        return EngineReport(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting) + len(self._submitted),
            kv_pages_used=self._cache.used,
            kv_pages_total=self._cache.pages,
            arena_bytes_used=self._tiers.arena_bytes_used,
            arena_bytes_total=self._tiers.arena_bytes_total,
            adapters=self._tiers.report(),
        )

    def close(self) -> list[Output]:
        """Take no more requests, end those in flight with EngineClosed, stop loading adapters."""
        with self._lock:
            was_closed, self._closed = self._closed, True
        if was_closed:
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
        self._scheduler = Scheduler(bounds, self._cache, self._tiers)

    def _take_in(self) -> None:
        with self._lock:
            submitted, self._submitted = self._submitted, deque()
            aborted, self._aborted = set(self._aborted), deque()
        for request in submitted:
            for sequence in self._intake.sequences(request):
                self._scheduler.add(sequence)
        if aborted:
            dropped = self._scheduler.drop(
                lambda s: (
                    (s.request.request_id, None) in aborted
                    or (s.request.request_id, s.choice) in aborted
                )
            )
            for sequence in dropped:
                self._end(sequence)

    def _compute(self, chunks: list[Chunk]) -> list[int]:
        batch = build_batch(chunks, self._settings.page_size, self._device)
        logits = self._runner.forward(batch)
        rows = [_sampling_row(chunk.sequence) for chunk in chunks if chunk.completes]
        return self._sampler.sample(logits, rows) if rows else []

    def _advance(self, chunks: list[Chunk], drawn: list[int]) -> list[Output]:
        outputs: list[Output] = []
        tokens = iter(drawn)
        for chunk in chunks:
            sequence, completes = chunk.sequence, chunk.completes
            self._scheduler.computed(chunk)
            if not completes:
                continue
            token = next(tokens)
            finish = sequence.accept(token)
            kept = () if token in sequence.stop_ids else (token,)
            outputs.append(Tokens(sequence.request.request_id, sequence.choice, kept, finish))
            if finish is not None:
                self._scheduler.finish(sequence)
                self._end(sequence)
        return outputs

    def _end(self, sequence: Sequence) -> None:
        request_id = sequence.request.request_id
        with self._lock:
            self._open[request_id] -= 1
            if self._open[request_id] == 0:
                del self._open[request_id]

    def _fail(self, errors: Mapping[str, EngineError]) -> list[Output]:
        if errors:
            self._scheduler.drop(lambda s: s.request.request_id in errors)
            with self._lock:
                for request_id in errors:
                    self._open.pop(request_id, None)
        return [Failed(request_id, error) for request_id, error in errors.items()]


def _sampling_row(sequence: Sequence) -> SamplingRow:
    params = sequence.request.sampling
    banned = tuple(sequence.stop_ids) if sequence.made < params.min_tokens else ()
    return SamplingRow(params, sequence.seed, sequence.made, banned)
