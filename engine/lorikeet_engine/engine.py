"""Engine: requests of token ids in, tokens out; each step is one batch for all adapters."""

import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import torch

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.costs import MeasuredCosts, StepCosts, seen_tokens
from lorikeet_engine.errors import (
    AdapterDamaged,
    DeviceLost,
    EngineClosed,
    EngineError,
    NotFinite,
    StepFailed,
)
from lorikeet_engine.execution import steps
from lorikeet_engine.execution.assembly import LoadModel, assemble
from lorikeet_engine.models.llama import load_model
from lorikeet_engine.request import Output, Request, Tokens
from lorikeet_engine.residency.disk.cache import AdapterSource
from lorikeet_engine.residency.tiers import Tiers
from lorikeet_engine.sampling.grammar import Grammars, grammar_error
from lorikeet_engine.scheduling.deadlines import Deadlines
from lorikeet_engine.scheduling.host_pages import HostPageCounts, HostPages, PageSlots
from lorikeet_engine.scheduling.kv_cache import KVCache
from lorikeet_engine.scheduling.request_queue import InputProcessor, RequestQueue
from lorikeet_engine.scheduling.scheduler import Scheduler, SchedulerLimits, StepPlan
from lorikeet_engine.scheduling.sequence import Chunk, Sequence, SequenceStatus
from lorikeet_engine.scheduling.state_pool import StatePool
from lorikeet_engine.scheduling.step_counters import StepCounters
from lorikeet_engine.settings import EngineSettings
from lorikeet_engine.telemetry.status import (
    AdapterStatus,
    EngineInfo,
    EngineStatus,
    HostPageUsage,
    LiveStats,
    SlotUse,
    StateUsage,
    TierStatus,
)

__all__ = ["Engine", "EngineInfo", "EngineSettings"]

log = logging.getLogger(__name__)


class Engine:
    """One base model, its adapters, and the requests in flight.

    Threads: wait, step, fail_all and close may be called on one thread only (EngineLoop's), and
    report on one other thread only (StatusReporter's). All other methods and incoming_blobs
    may be used on any thread.

    info: maximum context, step costs and other facts that are fixed when the engine has started.
    changed: event that is set when the next report may differ from the last one.
    incoming_blobs: packs adapters' files (blobs) into host memory while they are still written.
    """

    def __init__(
        self,
        settings: EngineSettings,
        source: AdapterSource,
        load: LoadModel = load_model,
        grammars: Grammars | None = None,
    ) -> None:
        """Load the model and allocate all the memory that serving needs.

        source: store from which adapters are downloaded.
        load: reads the base model from its folder onto the device.
        grammars: compiles grammars of requests; None to refuse requests with a grammar.

        Raises ModelError if the base model cannot be loaded, and SettingsError if something does
        not fit into the device's memory. On CUDA no kernel is compiled after the constructor.
        """
        self._settings = settings
        self._device = torch.device(settings.device)
        self._wake = threading.Event()
        parts = self._parts = assemble(settings, source, load, self.wake)
        self._runner, self._tiers, self._kv_pages = parts.runner, parts.tiers, parts.kv_pages
        self._state_bytes, self._page_copies = parts.runner.state_bytes, parts.page_copies
        self.changed, self.incoming_blobs = self._tiers.changed, self._tiers.incoming_blobs
        self.info = parts.info
        self._grammars = grammars
        self._input_processor = InputProcessor(self.info, settings.page_size, grammars)
        self._sampler, self._step_budget = parts.sampler, parts.step_budget
        self._in_flight: steps.InFlightStep | None = None
        self._drafts: tuple[AdapterRef, ...] = ()  # pinned draft LoRAs, the last pinned one last
        self._leased_draft: str | None = None  # digest of the draft LoRA that the engine leases
        self._counters = StepCounters()
        self._border = parts.border
        self._kept_names: Collection[str] | None = None  # since the last step, if any came
        self._reset()
        self._next_step_s: float | None = None  # seconds until adapters need a step
        self._requests = RequestQueue()
        self._deadlines = Deadlines(lambda p: self._scheduler.wait_s(p), self._tiers.load_s)

    def submit(self, request: Request) -> Residency | None:
        """Accept a request, whose tokens come out of later steps.

        Returns the tier that holds the adapter now; None without an adapter.

        max_tokens is cut to what the context leaves after each prompt. The context always fits into
        the KV cache, so every accepted request can run. If the grammar is bad, the request fails
        later.

        Raises InvalidRequest if the request can never run, EngineClosed after `close`, and
        EngineOverloaded if the estimated wait is far beyond max_queue_s, or if too many of the
        tenant's grammars are in use or wait to be compiled.
        """
        self._deadlines.check(request.scheduling)
        choices = self._input_processor.process(request)
        residency = self._tiers.residency(request.adapter) if request.adapter else None
        for choice in choices:
            choice.timings.residency = residency if choice.adapter else None
        self._requests.submit(request.request_id, choices)
        if residency is not None:
            self._counters.lookups.add(residency)
        self._deadlines.add(choices)
        if (compiled := choices[0].compiled) is not None:
            compiled.add_done_callback(lambda _: self.wake())
        self.wake()
        return residency

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request or one of its choices, without an output; do nothing if it has ended.

        choice: index of the choice; None for all choices.
        """
        self._requests.abort(request_id, choice)
        self.wake()

    def wake(self) -> None:
        """Make `wait` return if a thread waits there, else the next time that it is called."""
        self._wake.set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until a step may have work to do, or until timeout_s has passed.

        timeout_s: None for no limit.
        """
        if self._idle:
            bounds_s = [s for s in (timeout_s, self._next_step_s) if s is not None]
            self._wake.wait(self._deadlines.next_within_s(min(bounds_s, default=None)))
            self._wake.clear()

    def step(self) -> list[Output]:
        """Launch a batch; return the previous batch's outputs, at most one Tokens for each choice.

        If EngineSettings.overlap is off, return the outputs of this batch instead. Raises
        DeviceLost if the device has become unusable.
        """
        self._take_requests()
        self._next_step_s = self._tiers.advance()
        self._drop_damaged(self._tiers.take_damaged())
        self._fail(self._deadlines.take_missed())
        self._lease_draft()
        if self._page_copies is not None:
            self._drop_prompts()
            self._pages_arrive()  # if the last step did not need them after all
            self._page_copies.before_plan(self._cache)
        plan = self._scheduler.plan(self._step_budget)
        if self._border is not None:
            self._border.after_plan(self._cache, self._scheduler.lacks_pages)
        if self._page_copies is not None:
            self._page_copies.after_plan(self._cache)
        self._fail({s.request.request_id: error for s, error in plan.failed.items()})
        previous, self._in_flight = self._in_flight, None
        forward = self._compute(plan, previous) if plan.chunks else None
        if forward is not None and not forward.has_grammar:
            self._sample(forward)
        if previous is not None:
            self._read(previous)
        if forward is not None and forward.has_grammar:  # grammars know the tokens before by now
            self._sample(forward)
        if self._in_flight is not None and not self._settings.overlap:
            step, self._in_flight = self._in_flight, None
            self._read(step)
        self._idle = not plan.chunks and previous is None
        self.changed.set()
        return self._requests.take_outputs()

    def fail_all(self, error: EngineError) -> list[Output]:
        """End every request with `error` and empty the scheduler, whatever state it is in.

        Returns the outputs, including outputs of a step that an error has interrupted.
        """
        for sequence in (*self._scheduler.waiting, *self._scheduler.running):
            sequence.release()
            sequence.status = SequenceStatus.FINISHED
        self._sampler.penalties.release_all()
        self._reset()
        self._requests.fail_all(error)
        return self._requests.take_outputs()

    def residency(self, ref: AdapterRef) -> Residency:
        """Return the nearest tier that holds an adapter now."""
        return self._tiers.residency(ref)

    def pin(
        self,
        ref: AdapterRef,
        tier: Residency = Residency.GPU,
        passing: bool = False,
        draft: bool = False,
    ) -> None:
        """Load an adapter up to `tier` and keep it there until `unpin`.

        passing: whether the pin is temporary, so that the adapter's image, its packed weights, is
            not written to the disk.
        draft: whether the adapter drafts tokens of all answers, if the settings say
            speculation=draft. Of several such adapters, the last pinned one drafts.
        """
        self._tiers.pin(ref, tier, passing)
        others = tuple(each for each in self._drafts if each.digest != ref.digest)
        self._drafts = (*others, ref) if draft else others
        self.wake()

    def unpin(self, digest: str) -> None:
        """Remove an adapter's pin, so that the adapter may be evicted."""
        self._tiers.unpin(digest)
        self._drafts = tuple(each for each in self._drafts if each.digest != digest)
        self.wake()

    def keep_prompts(self, names: Collection[str]) -> Collection[str] | None:
        """Keep in host memory the pages of the prompts with these names (Request.keeps) alone.

        Returns the names of prompts that were computed and have lost no page since, whether there
        was room for their pages or not; None without host memory for pages.
        """
        self._kept_names = names
        self.wake()
        host, states = self._cache.host, self._cache.host_states
        if host is None:
            return None
        return tuple(name for name in host.kept if states is None or name in states.kept)

    def prefetch(self, ref: AdapterRef, tier: Residency = Residency.GPU, uses: float = 0.0) -> None:
        """Load an adapter up to `tier` if there is memory for it.

        Memory is not taken from requests, from pins or from adapters that are used more.

        uses: the adapter's recent uses on other replicas that this replica could serve instead, a
            count that decays with time. Adapters with fewer uses may be evicted for this adapter.
        """
        self._tiers.prefetch(ref, tier, uses)

    def forget(self, digest: str) -> None:
        """Drop a transient adapter from the GPU and the host once no request uses it.

        Does nothing for an adapter that is pinned or not transient (AdapterRef).
        """
        self._tiers.forget(digest)

    def status(self) -> EngineStatus:
        """Return the engine's current state and its counts since the start.

        `moved`, the adapters whose tier has changed, is empty; `report` returns it.

        Takes about 150 µs with a full batch, however many adapters there are.
        """
        submitted, scheduler, cache = self._requests.submitted, self._scheduler, self._cache
        tiers, counters, costs = self._tiers, self._counters, self.info.step_costs
        tier_status = tiers.status()
        return EngineStatus(
            live=_live_stats(submitted, scheduler, cache, tiers, tier_status[Residency.GPU], costs),
            tiers=tier_status,
            costs=MeasuredCosts(costs, tiers.load_costs()),
            lookups=counters.lookups.read(),
            loads=tiers.loads(),
            load_failures=tiers.load_failures,
            preemptions=counters.preemptions,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            output_tokens=counters.output_tokens,
            drafts=tuple(counters.drafts.values()),
            step_s=counters.seconds.read(),
            step_sequences=counters.sequences.read(),
            step_adapters=counters.adapters.read(),
            inter_token_s={tier: gaps.read() for tier, gaps in counters.inter_token_s.items()},
            tensor_parallel=self.info.tensor_parallel,
            states=_state_usage(cache.states, self._state_bytes),
            host_pages=_host_usage(cache, counters),
            border=None if self._border is None else self._border.status,
        )

    def report(self) -> EngineStatus:
        """Return the status, with the adapters whose tier has changed since the last report.

        Its field `moved` has the new tier of each of them, by digest.
        """
        moved = self._tiers.moved()
        return replace(self.status(), moved=moved)

    def adapters(self, tier: Residency = Residency.DISK) -> list[AdapterStatus]:
        """List the adapters on the GPU, and the remembered adapters at `tier` or nearer to the GPU.

        Remembered adapters are those last requested, pinned or prefetched. Takes a few milliseconds
        for thousands of adapters; steps go on meanwhile.
        """
        return self._tiers.adapters(tier)

    def take_use(self) -> list[SlotUse]:
        """Return each tenant's use of adapters since the last call: loads to the GPU, and seconds
        for which the tenant's requests held adapters there.

        To be called from one place only.
        """
        return self._tiers.take_use()

    def close(self) -> list[Output]:
        """Refuse new requests, end those in flight with EngineClosed, and stop loading adapters.

        Returns the last outputs.
        """
        if not self._requests.close():
            return []
        outputs = self.fail_all(EngineClosed("the engine was closed: send the request again"))
        self._input_processor.close()
        self._parts.close()
        return outputs

    def _reset(self) -> None:
        s, windows = self._settings, self._runner.kv_windows
        adapters = s.max_batch_adapters - (s.speculation == "draft")
        limits = SchedulerLimits(s.max_batch_tokens, s.max_running, adapters)
        slots, counts = self._runner.state_slots, self._counters.states
        states = StatePool(slots, s.max_running, counts) if slots else None
        host = self._host_pages(len(windows))
        self._cache = KVCache(
            self._kv_pages, s.page_size, windows, s.max_batch_tokens, states, *host
        )
        if self._border is not None:
            self._border.reset(self._cache)
        costs, counters = self.info.step_costs, self._counters
        drafts = self._parts.draft_budget
        self._scheduler = Scheduler(limits, self._cache, self._tiers, costs, counters, drafts)
        self._in_flight, self._idle = None, True

    def _host_pages(self, groups: int) -> tuple[HostPages | None, HostPages | None]:
        """Return new, empty slots of host memory: those for KV pages, and those for states of delta
        nets.

        Both are None if the engine has no host memory for pages; the latter is None, too, if the
        model has no delta nets. Copies to the pages of an earlier cache are abandoned first; raises
        DeviceLost if they do not end.

        groups: number of groups of layers, each of which has its own KV pages.
        """
        copies, costs = self._page_copies, self.info.step_costs
        if copies is None:
            return None, None
        if not copies.abandon() and not self._requests.closed:
            raise DeviceLost("copies of KV pages have not ended within 10 s")

        def fetch_s(size: int) -> float:
            return self._tiers.load_costs().load_s(Residency.HOST, size)

        counters, memory = self._counters, copies.memory

        def slots(
            number: int, size: int, groups: int, counts: HostPageCounts, places: int
        ) -> HostPages:
            disk = PageSlots(places, groups, counters.disk_pages) if places else None
            return HostPages(number, size, groups, counts, fetch_s, costs, disk, copies.read_s)

        counts = counters.host_pages
        pages = slots(memory.slots, copies.page_bytes, groups, counts, memory.places)
        if memory.states is None:
            return pages, None
        of_states = memory.state_slots, copies.state_bytes, 1, HostPageCounts()
        return pages, slots(*of_states, memory.state_places)

    def _drop_prompts(self) -> None:
        names, self._kept_names = self._kept_names, None
        for kept in (self._cache.host, self._cache.host_states):
            if names is not None and kept is not None:
                kept.keep_only(names)

    def _take_requests(self) -> None:
        taken = self._requests.take()
        for sequence in taken.submitted:
            self._scheduler.add(sequence)
        for sequence in taken.compiling:
            self._scheduler.request_adapter(sequence)
        if taken.aborts:
            for sequence in self._scheduler.drop(taken.is_aborted):
                self._requests.end_choice(sequence.request.request_id)

    def _drop_damaged(self, damaged: Mapping[str, AdapterDamaged]) -> None:
        """Stop using damaged adapters, and fail the requests that used them.

        damaged: by digest, the error for these requests.

        Damage is found some time after it happened (residency/image_checks.py). Clients have read
        tokens that may be wrong, so their requests fail; requests that have no token yet wait until
        the adapter is loaded again. Keys and values computed with the adapter leave the prefix
        cache. When this method returns, no sequence uses the damaged copy.
        """
        failed = dict[str, EngineError]()
        for digest, error in damaged.items():
            self._cache.forget_adapter(digest)
            if self._parts.draft_budget is not None:
                self._parts.draft_budget.answers.forget_adapter(digest)
            if digest == self._leased_draft:  # changed no token: drafts are verified
                self._release_draft()
            for sequence in (*self._scheduler.running, *self._scheduler.waiting):
                used = sequence.adapter.members if sequence.adapter else ()
                if digest not in [member.digest for member in used]:
                    continue
                runs = sequence.status is SequenceStatus.RUNNING
                if runs or sequence.has_own_output or sequence.kv.score_from:
                    failed[sequence.request.request_id] = error
                else:
                    sequence.release()
        self._fail(failed)

    def _lease_draft(self) -> None:
        """Draft with the pinned draft LoRA once it is on the GPU, and no longer with another."""
        budget, drafts = self._parts.draft_budget, self._drafts
        ref = drafts[-1] if drafts else None
        wanted = None if ref is None else ref.digest
        if budget is None or self._settings.speculation != "draft" or wanted == self._leased_draft:
            return
        self._release_draft()
        if ref is not None and self._tiers.residency(ref) is Residency.GPU:
            budget.adapter = self._tiers.lease(ref)
            self._leased_draft = None if budget.adapter is None else wanted

    def _release_draft(self) -> None:
        budget = self._parts.draft_budget
        if budget is not None and budget.adapter is not None:
            budget.adapter.release()
            budget.adapter = self._leased_draft = None

    def _compute(
        self, plan: StepPlan, previous: steps.InFlightStep | None
    ) -> steps.ForwardPass | None:
        expected = self._step_budget.expected(plan.chunks)
        if self._page_copies is not None and self._page_copies.in_step:
            expected = None  # the step waits for pages
        of_step = self._runner, plan, self._settings, previous, expected
        try:
            return steps.compute(*of_step, self._pages_arrive)
        except Exception as error:
            self._step_failed(plan.chunks, error)
            return None

    def _pages_arrive(self) -> bool:
        """Wait for pages from the host that sequences share already; return whether they came
        undamaged. If not, the sequences wait again.
        """
        if self._page_copies is None:
            return True
        damaged = self._page_copies.end_in_step(self._cache)
        if damaged:
            self._scheduler.withdraw(damaged)
        return not damaged

    def _sample(self, forward: steps.ForwardPass) -> None:
        try:
            step = steps.sample(self._sampler, forward, self._parts.forced_budget, self._grammars)
        except Exception as error:
            self._step_failed(forward.chunks, error)
        else:
            self._in_flight = step
            self._scheduler.launched(step.chunks, step.forced)

    def _read(self, step: steps.InFlightStep) -> None:
        try:
            sampled = step.sample.wait()
            scores = [reader.wait() for reader in (step.scores, step.pooled) if reader]
        except Exception as error:
            self._step_failed(step.chunks, error)
            return
        step_s, expected = self._counters.step_read(step.launch), step.launch.expected
        if expected is not None:
            self._step_budget.record(step_s, expected)
        for each in scores:
            self._fail(each.errors)
            self._requests.add_scores(each.outputs)
        row = 0
        for chunk in step.chunks:
            if chunk.sequence.status is not SequenceStatus.FINISHED:
                if chunk.completes:
                    self._accept(chunk, row, sampled, step)
                else:
                    self._scheduler.written(chunk)
            row += chunk.rows

    def _accept(
        self, chunk: Chunk, row: int, sampled: steps.SampledTokens, step: steps.InFlightStep
    ) -> None:
        sequence, request_id = chunk.sequence, chunk.sequence.request.request_id
        try:
            accepted = sampled.accepted(row, chunk.drafted[: step.followed.get(row)])
            if chunk.drafted:
                forced = step.forced.get(row + accepted, ())
                chunk = self._scheduler.verified(chunk, accepted, forced)
            tokens, logprobs = sampled.delivered(row, sequence, accepted)
            self._scheduler.written(chunk)
            predicted = sampled.predicted.get(row + accepted, ())
            finish = sequence.accept(sampled.tokens[row + accepted], predicted)
        except BaseException as error:  # of the grammar, perhaps a panic in Rust: others go on
            if isinstance(error, NotFinite):
                self._cache.forget_keys(sequence.kv.full_keys())
            self._fail({request_id: grammar_error(error, request_id)})
            return
        if finish is not None:
            self._scheduler.finish(sequence)
        is_first = sequence.timings.first_token_s is None
        timings = sequence.timings.engine_timings() if finish or is_first else None
        self._counters.tokens_delivered(sequence, len(tokens))
        output = Tokens(request_id, sequence.choice, tokens, finish, logprobs, timings)
        self._requests.add_output(output)

    def _step_failed(self, chunks: list[Chunk], error: BaseException) -> None:
        live = [c.sequence for c in chunks if c.sequence.status is not SequenceStatus.FINISHED]
        ids = {sequence.request.request_id for sequence in live}
        log.error("step_failed", exc_info=error, extra={"requests": sorted(ids)})
        steps.raise_if_lost(self._device, error)
        failure = StepFailed(f"the step of this request failed: {type(error).__name__}")
        self._fail(dict.fromkeys(ids, failure))

    def _fail(self, errors: Mapping[str, EngineError]) -> None:
        if errors:
            self._scheduler.drop(lambda s: s.request.request_id in errors)
        for request_id, error in errors.items():
            self._requests.fail(request_id, error)


def _state_usage(states: StatePool | None, slot_bytes: int) -> StateUsage | None:
    if states is None:
        return None
    counts = states.counts
    used = states.owned, states.cached, states.slots, slot_bytes
    return StateUsage(*used, counts.restored, counts.saved, counts.evicted)


def _host_usage(cache: KVCache, counters: StepCounters) -> HostPageUsage | None:
    host, states, disk = cache.host, cache.host_states, counters.disk_pages
    if host is None:
        return None
    counts = host.counts
    return HostPageUsage(
        host.used,
        host.slots,
        host.page_bytes,
        counts.stored,
        counts.fetched,
        counts.evicted,
        counts.damaged,
        counters.host_tokens,
        host.used_by_prompts,
        0 if states is None else states.used,
        0 if states is None else states.slots,
        *((host.disk.used, host.disk.slots) if host.disk is not None else (0, 0)),
        disk.stored,
        disk.fetched,
    )


def _live_stats(
    submitted: Iterable[Sequence],
    scheduler: Scheduler,
    cache: KVCache,
    tiers: Tiers,
    gpu: TierStatus,
    costs: StepCosts,
) -> LiveStats:
    running, waiting = list(scheduler.running), [*scheduler.waiting, *submitted]
    decoding = [s for s in running if s.decodes and not s.complete]
    prefilling = [s for s in running if not s.decodes]
    pending = waiting + prefilling
    leases = (sequence.lease for sequence in decoding)
    now_s = time.monotonic()
    background = [s for s in (*running, *waiting) if s.background]
    unanswered = (s for s in pending if not (s.output_length or s.background))
    oldest_s = min((s.timings.arrived_s for s in unanswered), default=now_s)
    return LiveStats(
        running=len(running),
        decoding=len(decoding),
        prefilling=len(prefilling),
        waiting=len(waiting),
        pending_tokens=sum(s.remaining for s in pending),
        pending_seen=sum(seen_tokens(s.remaining, s.kv.computed) for s in pending),
        ranks=sum({lease.slot: lease.rank for lease in leases if lease is not None}.values()),
        context=round(sum(costs.decode_sees(s.length) for s in decoding)),
        oldest_wait_s=now_s - oldest_s,
        background=len(background),
        background_pages=sum(sum(map(len, s.kv.pages)) for s in background),
        kv_pages_used=cache.used,
        kv_pages_total=cache.pages,
        loading_bytes=tiers.loading_bytes,
        free_bytes=gpu.capacity_bytes - gpu.used_bytes,
        room_bytes=tiers.available_bytes,
        victim=tiers.victim,
    )
