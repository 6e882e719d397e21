"""Scheduler that plans steps: decodes first, then chunks of prompts in fair order, in one batch."""

import math
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from lorikeet_engine.adapter import Composition, Residency
from lorikeet_engine.costs import StepCosts
from lorikeet_engine.errors import AdapterError
from lorikeet_engine.request import SchedulingParams
from lorikeet_engine.scheduling.admission import AdapterProvider, Admission
from lorikeet_engine.scheduling.draft_budget import DraftBudget
from lorikeet_engine.scheduling.fairness import (
    OUTPUT_TOKEN,
    PROMPT_TOKEN,
    SequenceCost,
    VirtualCounter,
    VirtualCounters,
    prompt_cost,
)
from lorikeet_engine.scheduling.kv_cache import KVCache
from lorikeet_engine.scheduling.own_order import Turn
from lorikeet_engine.scheduling.preemption import (
    furthest_ahead_last,
    may_begin,
    sequences_to_preempt,
)
from lorikeet_engine.scheduling.sequence import (
    AdapterLease,
    Chunk,
    ScoredRows,
    Sequence,
    SequenceStatus,
)
from lorikeet_engine.scheduling.step_budget import PromptBudget, StepBudget
from lorikeet_engine.scheduling.step_counters import StepCounters
from lorikeet_engine.scheduling.waiting_queue import WaitingQueue, prefilling_in_fair_order

# A plan begins no more sequences once the begun ones have this many KV pages, cached ones included:
# allocating them takes some ms.
_PAGES_PER_PLAN = 8192
# Time in which the weight of past work falls by a factor e.
_DECAY_S = 5.0
# Assumed length of answers before any has ended.
_ANSWER_TOKENS = 128.0
# Answers over which the mean length is taken.
_ANSWERS = 100


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of one step.

    tokens: maximum number of tokens.
    sequences: maximum number of sequences.
    adapters: maximum number of distinct adapters.
    """

    tokens: int
    sequences: int
    adapters: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Plan of one step.

    chunks: tokens to compute, at most one chunk for each sequence.
    failed: sequences dropped because their adapter could not be loaded, with the error.
    scored: for prompt_logprobs, the prompt tokens of the chunks from whose logits the log
        probability of the next prompt token is computed.
    predicts: whether the MTP head or the draft LoRA predicts tokens after the sampled ones.
    draft: lease of the draft LoRA, for the noise of chunks; None without noise.
    """

    chunks: list[Chunk]
    failed: dict[Sequence, AdapterError]
    scored: list[ScoredRows]
    predicts: bool = False
    draft: AdapterLease | None = None


class Throughput:
    """Running means of an engine's throughput under load, and of the length of answers.

    The unit of work is the cost of a prompt token without attention (fairness.py). The throughput
    is the mean over the time in which the engine was saturated, recent time counting most; until
    there was such time, it is predicted from full batches of decodes.

    saturated: whether foreground sequences wait only because the last planned step has no capacity
        left.
    answer_tokens: mean length of answers, in tokens.
    """

    def __init__(self, costs: StepCosts) -> None:
        step_s = costs.step_s(costs.max_running, 0)
        self._cost, self._s = OUTPUT_TOKEN * costs.max_running / step_s, 1.0
        self._step_cost, self._planned_s = 0.0, time.monotonic()
        self.saturated = False
        self.answer_tokens = _ANSWER_TOKENS

    @property
    def cost_per_s(self) -> float:
        """Work that a saturated engine does per second; the unit is the cost of a prompt token
        without attention.
        """
        return self._cost / self._s

    def add(self, cost: float) -> None:
        """Record work that the device is given.

        cost: the work; the unit is the cost of a prompt token without attention.
        """
        self._step_cost += cost

    def step_planned(self, saturated: bool) -> None:
        """Record that a step is planned.

        If the engine was saturated since the previous plan, the time and the work since then are
        included in the mean.

        saturated: whether foreground sequences wait only because this step has no capacity left.
        """
        now_s = time.monotonic()
        elapsed_s = now_s - self._planned_s
        if self.saturated:
            decay = math.exp(-elapsed_s / _DECAY_S)
            self._cost = self._cost * decay + self._step_cost
            self._s = self._s * decay + elapsed_s
        self._step_cost, self._planned_s, self.saturated = 0.0, now_s, saturated

    def answer_ended(self, tokens: int) -> None:
        """Include the length of an answer that has ended in the mean length.

        tokens: length of the answer.
        """
        self.answer_tokens += (tokens - self.answer_tokens) / _ANSWERS


class Scheduler:
    """Waiting and running sequences of one engine. One thread only, except for `wait_s`.

    Only running sequences hold KV pages. A waiting sequence may already hold its adapter's lease if
    it lacks only a slot or KV pages.

    limits: limits of one step.
    cache: gives KV pages to sequences.
    adapters: loads and leases adapters.
    costs: predicts the time of steps, from which the cost of prompts is computed.
    counters: counts begun and preempted sequences, and drafted tokens.
    drafts: chooses the drafted tokens of steps; None for steps without.
    lacks_pages: whether in the last plan the next sequence lacked nothing but KV pages.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        cache: KVCache,
        adapters: AdapterProvider,
        costs: StepCosts,
        counters: StepCounters,
        drafts: DraftBudget | None = None,
    ) -> None:
        self._limits = limits
        self._cache = cache
        self._adapters = adapters
        self._costs = costs
        self._tenants = VirtualCounters()
        self._throughput = Throughput(costs)
        self._counters = counters
        self._drafts = drafts
        self.waiting = WaitingQueue(self._tenants)
        self.running: list[Sequence] = []  # in the order of arrival
        self._admitted = 0  # sequences with adapters that have begun since the start
        self._reserved_for: Sequence | None = None  # must begin before others with adapters
        # Next in fair order, if the last plan had no slot or too few KV pages for it.
        self._short_of_memory: Sequence | None = None
        self._lacks_room = False  # Admission.lacks_room of the last plan
        # Whether foreground sequences waited only because the last planned step was full.
        self._lacks_step = False
        self._drafted = 0  # drafted tokens of the planned step
        self.lacks_pages = False
        self._in_background = 0  # sequences that have not finished
        self._background_tokens = 0  # that the planned step may still compute

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence to its tenant's queue, and request the sequence's adapter."""
        params = sequence.request.scheduling
        answer = min(sequence.max_tokens, self._throughput.answer_tokens)
        counter = self._tenants.open_sequence(
            params.tenant, params.weight, background=params.background
        )
        self._in_background += params.background
        prompt = prompt_cost(self._costs, 0, sequence.prompt_length)
        sequence.cost = SequenceCost(counter, prompt + OUTPUT_TOKEN * answer)
        self._queue(sequence)
        self.request_adapter(sequence)
        counter.charge(PROMPT_TOKEN * sequence.copy_s / self._costs.prompt_token_s)

    def request_adapter(self, sequence: Sequence) -> None:
        """Begin to load a sequence's adapter, if it has one. Repeated calls change nothing.

        If a sequence's grammar must be compiled first, call this before `add`, so that the adapter
        is loaded meanwhile.
        """
        ref, timings = sequence.adapter, sequence.timings
        if ref is None:
            return
        if timings.requested_s is None and self._adapters.residency(ref) is not Residency.GPU:
            timings.requested_s = time.monotonic()
            sequence.copy_s = self._adapters.copy_s(ref)
        if isinstance(ref, Composition) and not timings.member_tiers:
            timings.member_tiers = tuple(map(self._adapters.residency, ref.members))
        self._adapters.request(ref, sequence.request.scheduling.tenant)

    def wait_s(self, params: SchedulingParams) -> float:
        """Estimate the seconds that a new request with these parameters would wait to begin.

        The estimate is 0 unless the engine is saturated: unless foreground sequences wait only
        because the last planned step has no capacity left. Any thread may call this.
        """
        if not self._throughput.saturated:
            return 0.0
        cost = self._tenants.cost_ahead_of(params.tenant, params.weight)
        return cost / self._throughput.cost_per_s

    def plan(self, step_budget: StepBudget) -> StepPlan:
        """Choose the next step's chunks and allocate their KV pages, in three phases.

        Preempt: free slots and KV pages for the next waiting sequence, as preemption.py allows.
        Decode: give each decoding sequence a chunk; preempt sequences where KV pages are too few.
            Add drafted tokens where they pay.
        Prefill: give chunks of prompts to running sequences, and to waiting ones that may begin.

        Beside running sequences in the foreground, all sequences in the background together compute
        only so many tokens as lengthen it by about 3%; in a step of their own, as many as take some
        50 ms. Those without a chunk keep their slots and pages.

        step_budget: bounds the sum of the ranks of the step's adapters, and the prompt tokens.
        """
        active = [sequence for sequence in self.running if not sequence.complete]
        self._preempt_for_waiting(active)
        self._background_tokens = self._background_budget(active, step_budget)
        decodes = self._with_drafts(self._schedule_decodes(active), active)
        budget = self._prompt_budget(decodes, step_budget)
        prefilling = sorted((s for s in active if not s.decodes), key=furthest_ahead_last)
        for sequence in prefilling:
            sequence.cost.set_tokens_to_compute(self._costs, sequence.kv.computed, sequence.length)
        prefills = self._schedule_prefills(active, prefilling, budget, step_budget)
        chunks = [*decodes, *prefills.chunks]
        if not chunks:
            chunks = self._preempt_for_prefills(prefilling, budget)
        if self._cache.states is not None:
            chunks = [self._with_state(chunk) for chunk in chunks]
        self._throughput.step_planned(prefills.saturated)
        self._lacks_step = prefills.saturated and self._short_of_memory is None
        predicted, draft = list[int](), None
        if self._drafts is not None:
            most = min(self._limits.sequences, self._cache.least_free_tokens)
            room, alone = most - len(active), self._alone(chunks, active)
            predicted = self._drafts.predicts(chunks, room, alone=alone)
            if predicted and (draft := self._drafts.adapter) is not None:
                chunks = self._with_noise(chunks, predicted, self._drafts)
        failed = self._drop_failed(prefills.failed)
        return StepPlan(chunks, failed, budget.scored, bool(predicted), draft)

    def launched(self, chunks: list[Chunk], forced: Mapping[int, tuple[int, ...]]) -> None:
        """Record that a step with these chunks was launched; the next plan counts the step's tokens
        as computed.

        chunks: chunks in the order of the batch.
        forced: by row of the step's logits, the tokens that the grammar requires after the token
            sampled from the row. For chunks with drafted tokens, they are passed to `verified`.
        """
        row = tokens = 0
        for chunk in chunks:
            sequence, drafted = chunk.sequence, len(chunk.drafted)
            sequence.kv.computed = chunk.end - drafted
            sequence.cost.counter.charge(PROMPT_TOKEN * len(chunk.noise))
            sequence.timings.steps += 1
            if chunk.completes:
                sequence.add_pending(row, () if drafted else forced.get(row, ()))
                sequence.awaits_read = chunk.holds
                cost = OUTPUT_TOKEN * sequence.decode_tokens + PROMPT_TOKEN * drafted
                sequence.cost.counter.charge(cost)
                tokens += sequence.decode_tokens
            row += chunk.rows
        self._throughput.add(OUTPUT_TOKEN * tokens)

    def verified(self, chunk: Chunk, accepted: int, forced: tuple[int, ...]) -> Chunk:
        """Record which drafted tokens of a chunk are accepted; return the chunk without the others.

        In a model with delta nets, a rejected token has spoilt the state. Then the returned chunk
        is empty, and the sequence's next decode computes its tokens again.

        accepted: number of accepted tokens, the first ones.
        forced: tokens that the grammar requires after the token sampled behind these.
        """
        sequence, kv, drafted = chunk.sequence, chunk.sequence.kv, len(chunk.drafted)
        kept = chunk.drafted[:accepted]
        chunk = chunk._replace(end=chunk.end - drafted + accepted, drafted=kept)
        sequence.accept_drafted(kept, forced)
        sequence.cost.counter.charge(OUTPUT_TOKEN * len(forced))
        if chunk.pages is kv.pages:  # else preempted since the step was planned
            if self._cache.states is None or accepted == drafted:
                kv.computed = chunk.end
                self._cache.drop_backup(kv)
            else:
                again = chunk.length  # the next step computes these tokens with the right state
                self._cache.roll_back(kv, chunk.start)
                chunk = chunk._replace(end=chunk.start)
                sequence.decode_tokens += again
                sequence.cost.counter.charge(PROMPT_TOKEN * again)
        self._throughput.add(OUTPUT_TOKEN * (accepted + len(forced)))
        self._counters.drafts_verified(sequence, drafted, accepted)
        return chunk

    def written(self, chunk: Chunk) -> None:
        """Record that a chunk's keys and values are written; make its full pages shareable.

        If a token is sampled from the chunk, call this only once the token is known to come from
        finite logits.
        """
        kv = chunk.sequence.kv
        if chunk.pages is kv.pages:  # else preempted since the step was planned
            self._cache.publish_written(kv, chunk.end)

    def withdraw(self, pages: Container[int]) -> None:
        """Have the running sequences with any of these KV pages wait again.

        No step that was launched may read the pages.
        """
        for sequence in list(self.running):
            if any(page in pages for page in chain(*sequence.kv.pages)):
                self._preempt(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence that has its last token, and free its resources.

        A step in flight may still write to the freed pages. The write is safe: the pages' next
        owner writes in a later step, and the device runs the steps in order.
        """
        preempted = sequence.status is SequenceStatus.PREEMPTED
        (self.waiting if preempted else self.running).remove(sequence)
        self._throughput.answer_ended(sequence.output_length)
        if self._drafts is not None:
            self._drafts.ended(sequence)
        if name := sequence.request.keeps:
            self._cache.keep(name, sequence.kv, sequence.prompt_length)
        self._end(sequence)

    def drop(self, matches: Callable[[Sequence], bool]) -> list[Sequence]:
        """Remove sequences, waiting or running, and free their resources; return them.

        matches: returns whether to remove a sequence.
        """
        waiting = [sequence for sequence in self.waiting if matches(sequence)]
        running = [sequence for sequence in self.running if matches(sequence)]
        for sequence in waiting:
            self.waiting.remove(sequence)
        if dropped := set(running):
            self.running = [s for s in self.running if s not in dropped]
        for sequence in (*waiting, *running):
            self._end(sequence)
        return waiting + running

    def _preempt_for_waiting(self, active: list[Sequence]) -> None:
        """Preempt running sequences to free what waiting sequences lacked in the last plan.

        That is a slot, KV pages or, if an adapter did not fit beside the others, the leases of the
        adapters of background sequences.

        active: running sequences that still compute tokens; the preempted ones are removed.
        """
        for sequence in self.waiting if self._lacks_room else ():
            if sequence.background:
                sequence.release()
        self._preempt_all(self._background_giving_way(active), active)
        if (waiting := self._short_of_memory) is not None:
            most = self._limits.sequences
            self._preempt_all(sequences_to_preempt(waiting, active, most, self._cache), active)
        self._short_of_memory, self._lacks_room = None, False
        self.lacks_pages = False

    def _background_giving_way(self, active: list[Sequence]) -> list[Sequence]:
        """Return the running background sequences to preempt for waiting foreground sequences.

        These are all with adapters, if an adapter of a waiting sequence did not fit beside the
        others in the last plan; and so many that all waiting foreground sequences get slots, if one
        of them lacked a slot or KV pages.

        active: running sequences that still compute tokens.
        """
        if not self._in_background:
            return []
        short, lacking = self._short_of_memory, 0
        if short is not None and not short.background:
            wanted = sum(not sequence.background for sequence in self.waiting)
            lacking = wanted + len(active) - self._limits.sequences
        behind = [sequence for sequence in active if sequence.background]
        behind.sort(key=furthest_ahead_last, reverse=True)
        return [
            sequence
            for i, sequence in enumerate(behind)
            if i < lacking or (self._lacks_room and sequence.lease is not None)
        ]

    def _preempt_all(self, sequences: list[Sequence], active: list[Sequence]) -> None:
        for sequence in sequences:
            active.remove(sequence)
            self._preempt(sequence)

    def _background_budget(self, active: list[Sequence], step_budget: StepBudget) -> int:
        """Return the number of tokens of background sequences that the step may compute.

        active: running sequences that still compute tokens.
        step_budget: limits these tokens.
        """
        if not self._in_background:
            return self._limits.tokens
        foreground = [sequence for sequence in active if not sequence.background]
        if not foreground:
            longest = max((sequence.decode_tokens for sequence in active), default=1)
            return min(self._limits.tokens, max(step_budget.background_tokens_alone(), longest))
        rows = sum(sequence.decode_tokens for sequence in foreground if sequence.decodes)
        return step_budget.background_tokens(rows)

    def _schedule_decodes(self, active: list[Sequence]) -> list[Chunk]:
        """Return a chunk of each decoding sequence that need not wait until the host has read.

        Background sequences beyond the step's limit on background tokens get none. Preempts
        sequences if there are too few KV pages for all.

        active: running sequences that still compute tokens; the preempted ones are removed.
        """
        chunks, index = list[Chunk](), 0
        tokens = sum(sequence.decode_tokens for sequence in active)
        if not self._cache.may_all_grow(tokens):  # some may have to be preempted
            active.sort(key=furthest_ahead_last)
        while index < len(active):
            sequence = active[index]
            pauses = sequence.background and sequence.decode_tokens > self._background_tokens
            if pauses or not sequence.decodes or sequence.awaits_read:
                index += 1
            elif self._cache.grow(sequence.kv, sequence.length):
                chunks.append(Chunk.of(sequence, sequence.decode_tokens))
                self._count_background(chunks[-1])
                index += 1
            else:  # preempts the youngest of the tenant furthest ahead, perhaps this very sequence
                self._preempt(active.pop())
        return chunks

    def _with_drafts(self, decodes: list[Chunk], active: list[Sequence]) -> list[Chunk]:
        """Add drafted tokens to the chunks of decodes, if that pays and takes nothing from others.

        Sequences that wait for an adapter, a slot or KV pages cannot use what drafts take.

        While a sequence awaits the verification of its drafted tokens, no other gets any, so that
        all sequences with drafts have them in the same step. If all decodes wait for the host
        before they draft, none has a chunk.

        active: running sequences that still compute tokens.
        """
        self._drafted = 0
        if self._drafts is None:
            return decodes
        if not decodes or any(sequence.awaits_read for sequence in active):
            return decodes
        waiting, limits = len(self.waiting) if self._lacks_step else 0, self._limits
        room = min(  # the step samples no more tokens than there may be sequences
            limits.sequences - len(active) - waiting,
            limits.tokens - sum(chunk.length for chunk in decodes),
        )
        alone, sequences = self._alone(decodes, active), [chunk.sequence for chunk in decodes]
        drafts, holds = self._drafts.choose(sequences, room, alone=alone)
        if holds and not drafts:
            for chunk in decodes:
                chunk.sequence.awaits_read = bool(chunk.sequence.pending_rows)
            return []
        if not self._cache.may_all_grow(len(active) + sum(map(len, drafts.values()))):
            return decodes
        for at, chunk in enumerate(decodes):
            drafted = drafts.get(chunk.sequence)
            decodes[at] = chunk._replace(holds=holds)
            if drafted and self._cache.back_up_state(chunk.sequence.kv):
                end = chunk.end + len(drafted)
                grown = self._cache.grow(chunk.sequence.kv, end)
                assert grown, "a draft without KV pages"
                decodes[at] = chunk._replace(end=end, drafted=drafted, holds=True)
                self._drafted += len(drafted)
        return decodes

    def _with_noise(
        self, chunks: list[Chunk], counts: list[int], drafts: DraftBudget
    ) -> list[Chunk]:
        """Add noise for the draft LoRA behind chunks; allocate its KV pages, which must be free.

        counts: number of noise tokens behind each chunk.
        """
        noisy = list[Chunk]()
        for chunk, count in zip(chunks, counts, strict=True):
            grown = self._cache.grow(chunk.sequence.kv, chunk.end + count)
            assert grown, "noise without KV pages"
            noisy.append(chunk._replace(noise=drafts.noise(count)))
        return noisy

    def _alone(self, chunks: list[Chunk], active: list[Sequence]) -> bool:
        """Whether all foreground sequences have a chunk, and none waits for capacity of the step.

        active: running sequences that still compute tokens.
        """
        paused = sum(sequence.background for sequence in active)
        paused -= sum(chunk.sequence.background for chunk in chunks)
        return len(chunks) + paused == len(active) and not self._lacks_step

    def _count_background(self, chunk: Chunk) -> None:
        if chunk.sequence.background:
            self._background_tokens -= chunk.length

    def _prompt_budget(self, decodes: list[Chunk], step_budget: StepBudget) -> PromptBudget:
        tokens = self._limits.tokens - sum(chunk.length for chunk in decodes)
        budget = step_budget.prompt_budget(decodes, tokens)
        if self._cache.states is not None:
            budget.multiple = self._cache.state_piece
        return budget

    def _schedule_prefills(
        self,
        active: list[Sequence],
        prefilling: list[Sequence],
        budget: PromptBudget,
        step_budget: StepBudget,
    ) -> "_Prefills":
        """Return chunks of prompts, and begin waiting sequences.

        If waiting sequences may begin, waiting and prefilling sequences get chunks in fair order.
        Then the remaining prefilling sequences get chunks.

        active: running sequences that still compute tokens.
        prefilling: active sequences that do not decode.
        budget: prompt tokens that the step may still compute.
        step_budget: bounds the sum of the ranks of the step's adapters.
        """
        chunks, failed = list[Chunk](), dict[str, AdapterError]()
        saturated = foreground_waits = self.waiting.has_foreground
        max_running = self._limits.sequences
        if self.waiting and budget and may_begin(active, max_running, self._tenants.next_place()):
            context = sum(self._costs.decode_sees(sequence.length) for sequence in active)
            max_ranks = step_budget.max_ranks(context)
            admission = Admission(
                self.running, self._limits.adapters, max_ranks, self._cache, self._adapters
            )
            chunks, saturated = self._prefill_in_fair_order(
                admission, prefilling, budget, len(active)
            )
            saturated = saturated and foreground_waits
            failed = admission.failed
            served = {chunk.sequence for chunk in chunks}
            prefilling = [sequence for sequence in prefilling if sequence not in served]
        for turn in prefilling_in_fair_order(prefilling):
            chunks += self._prompt_chunk(turn, budget, len(active))
        return _Prefills(chunks, failed, saturated)

    def _prefill_in_fair_order(
        self, admission: Admission, prefilling: list[Sequence], budget: PromptBudget, active: int
    ) -> tuple[list[Chunk], bool]:
        """Begin waiting sequences and return chunks of prompts, in fair order.

        Returns the chunks, and whether sequences in the foreground wait only because the step has
        no capacity left.

        admission: leases adapters, and keeps the step's limits on adapters.
        prefilling: running sequences that do not decode.
        budget: prompt tokens that the step may still compute.
        active: number of running sequences that still compute tokens.
        """
        chunks: list[Chunk] = []
        begun: list[Sequence] = []
        pages = 0  # of the begun sequences
        served: set[VirtualCounter] = set()  # tenants of sequences that have their adapters
        saturated = False
        order = self.waiting.in_fair_order(prefilling, admission.is_blocked, self._reserved_for)
        for turn in order:
            sequence = turn.sequence
            saturated = not sequence.background  # if the step has no capacity for this sequence
            if sequence.background and not self._background_tokens:
                break
            if sequence.status is not SequenceStatus.RUNNING:
                if sequence.pending_rows:
                    break  # just preempted: its last token comes with the step in flight
                ready = admission.prepare(sequence, self._admitted)
                if not sequence.awaits_adapter:
                    served.add(sequence.cost.counter)
                if not ready:
                    continue
                running = active + len(begun)  # each must still be able to grow by a page
                alone = not self.running and len(self.waiting) == 1
                if self._cache.awaits_fetch(sequence.kv, running, alone=alone):
                    continue
                slot = running < self._limits.sequences
                if slot and running + self._drafted >= self._limits.sequences:
                    break  # the step samples no more tokens
                if not (slot and self._cache.allocate(sequence.kv, sequence.length, running)):
                    self._short_of_memory = sequence
                    states = self._cache.states
                    self.lacks_pages = slot and (states is None or states.free >= 2)
                    break
                self._begin(sequence, admission)
                begun.append(sequence)
                pages += sum(map(len, sequence.kv.pages))
            chunks += self._prompt_chunk(turn, budget, active + len(begun))
            if not budget or pages > _PAGES_PER_PLAN:
                break
        else:
            saturated = False
        self._reserved_for, self._lacks_room = admission.reserved_for, admission.lacks_room
        self.waiting.skip_turn(counter for counter in order.exhausted if counter not in served)
        for sequence in begun:
            self.waiting.remove(sequence)  # before the status changes: the queue sorts by status
            sequence.status = SequenceStatus.RUNNING
        if begun:
            self.running = sorted([*self.running, *begun], key=lambda s: s.arrival)
        return chunks, saturated

    def _preempt_for_prefills(
        self, prefilling: list[Sequence], budget: PromptBudget
    ) -> list[Chunk]:
        """Preempt prefilling sequences until those that remain have KV pages for a chunk.

        Returns [] while an earlier step is in flight, whose end may free pages.

        prefilling: running sequences that do not decode; the last is preempted first.
        budget: prompt tokens that the step may compute.
        """
        chunks: list[Chunk] = []
        while prefilling and not chunks and self._all_is_read():
            for sequence in prefilling:
                chunks += self._prompt_chunk(Turn(sequence), budget, 0)
            if not chunks:
                self._preempt(prefilling.pop())
        return chunks

    def _prompt_chunk(self, turn: Turn, budget: PromptBudget, spare: int) -> list[Chunk]:
        """Return [next chunk] of the prompt whose turn it is; add its cost to its tenant's counter.

        Returns [] if the budget or the KV pages do not suffice.

        budget: prompt tokens that the step may still compute.
        spare: number of other sequences; one free page per group is left for each of them.
        """
        sequence = turn.sequence
        end = self._chunk_end(sequence, self._cache.reach(sequence.kv, sequence.length, spare))
        if sequence.background:
            end = min(end, sequence.kv.computed + self._background_tokens)
        if not budget.fits(sequence, end):
            return []
        chunk = budget.take(sequence, end)
        self._count_background(chunk)
        grown = self._cache.grow(sequence.kv, chunk.end)
        assert grown, "a chunk without KV pages"
        turn.computed(prompt_cost(self._costs, chunk.start, chunk.end))
        end = min(chunk.end, sequence.prompt_length)
        self._throughput.add(sequence.cost.charge_prompt(self._costs, chunk.start, end))
        return [chunk]

    def _chunk_end(self, sequence: Sequence, end: int) -> int:
        """Return the number of first tokens of a sequence beyond which its next chunk may not go.

        A chunk ends where an activated LoRA begins to change tokens, if the chunk cannot be divided
        there: in a model with states of delta nets, or for a prompt with prompt_logprobs.

        end: number of first tokens that have KV pages.
        """
        begins = sequence.active_from
        is_whole = self._cache.states is not None or sequence.to_score > 0
        return min(end, begins) if is_whole and sequence.kv.computed < begins else end

    def _with_state(self, chunk: Chunk) -> Chunk:
        kv, drafted = chunk.sequence.kv, len(chunk.drafted)
        state = self._cache.state_use(kv, chunk.start, chunk.end - drafted, drafted=drafted > 0)
        return chunk._replace(state=state)

    def _begin(self, sequence: Sequence, admission: Admission) -> None:
        admission.admit(sequence)
        self._admitted += sequence.adapter is not None
        self._tenants.start_waiting(sequence.cost.counter)  # lifts a tenant that skipped its turn
        timings = sequence.timings
        if timings.begun_s is not None:  # was preempted
            return
        timings.begun_s = time.monotonic()
        timings.cached_tokens = min(sequence.kv.computed, sequence.prompt_length)
        timings.host_tokens = min(sequence.kv.tokens_of_host, timings.cached_tokens)
        self._counters.sequence_begun(sequence)
        ref = sequence.adapter
        if ref is None:
            return
        if timings.requested_s is not None:
            timings.loaded_s = self._adapters.loaded_at_s(ref)
        if timings.member_tiers:
            timings.members_loaded_s = tuple(map(self._adapters.loaded_at_s, ref.members))

    def _preempt(self, sequence: Sequence) -> None:
        # The sequence keeps its tokens; those whose pages leave the cache are computed again.
        self.running.remove(sequence)
        self._free(sequence)
        sequence.timings.preemptions += 1
        self._counters.preemptions += not sequence.background
        sequence.status = SequenceStatus.PREEMPTED
        self._queue(sequence)

    def _queue(self, sequence: Sequence) -> None:
        cached = self._cache.expected_hit(sequence.kv)
        sequence.cost.set_tokens_to_compute(self._costs, cached, sequence.length)
        self.waiting.add(sequence)

    def _all_is_read(self) -> bool:
        """Whether the host has read the results of all launched steps."""
        return all(sequence.kv.written == sequence.kv.computed for sequence in self.running)

    def _drop_failed(self, errors: dict[str, AdapterError]) -> dict[Sequence, AdapterError]:
        if not errors:
            return {}
        dropped = self.drop(lambda s: s.adapter is not None and s.adapter.digest in errors)
        return {s: errors[s.adapter.digest] for s in dropped if s.adapter is not None}

    def _end(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.FINISHED
        sequence.cost.counter.open -= 1
        self._in_background -= sequence.background
        self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        self._cache.clear(sequence.kv)
        sequence.release()


class _Prefills(NamedTuple):
    """Result of a plan's prefill phase.

    chunks: chunks of prompts.
    failed: by digest, the errors of adapters that could not be loaded.
    saturated: whether foreground sequences wait only because the step has no capacity left.
    """

    chunks: list[Chunk]
    failed: dict[str, AdapterError]
    saturated: bool
