"""Which tokens a step computes: decodes, then prompts in their tenants' turns, in one batch."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from lorikeet_engine.adapter import Residency
from lorikeet_engine.costs import StepCosts
from lorikeet_engine.errors import AdapterError
from lorikeet_engine.request import Terms
from lorikeet_engine.scheduling.admission import Adapters, Admission
from lorikeet_engine.scheduling.fairness import (
    OUTPUT_TOKEN,
    PROMPT_TOKEN,
    Bill,
    VirtualCounter,
    VirtualCounters,
)
from lorikeet_engine.scheduling.kv_cache import KVCache
from lorikeet_engine.scheduling.sequence import Chunk, Sequence
from lorikeet_engine.scheduling.step_budget import StepBudget
from lorikeet_engine.scheduling.step_counters import StepCounters
from lorikeet_engine.scheduling.throughput import Throughput
from lorikeet_engine.scheduling.waiting_queue import Turns, WaitingQueue


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one step may hold at most: tokens, sequences, distinct adapters."""

    tokens: int
    sequences: int
    adapters: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. failed: the sequences whose adapter could not be loaded, no longer scheduled."""

    chunks: list[Chunk]
    failed: list[tuple[Sequence, AdapterError]]


class Scheduler:
    """The sequences that wait and those that run. Used by one thread, but for wait_s.

    Only running sequences hold KV pages; one that waits for nothing but pages may hold its lease.
    """

    def __init__(
        self,
        bounds: Bounds,
        cache: KVCache,
        adapters: Adapters,
        costs: StepCosts,
        counts: StepCounters,
    ) -> None:
        self._bounds = bounds
        self._cache = cache
        self._adapters = adapters
        self._prompt_token_s = costs.prompt_token_s
        self._accounts = VirtualCounters()
        self._pace = Throughput(costs)
        self._counts = counts
        self.waiting = WaitingQueue(self._accounts)
        self.running: list[Sequence] = []  # in the order of arrival
        self._admitted = 0  # sequences with adapters, so far
        self._promised: Sequence | None = None  # the next with an adapter to begin

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its tenant's turn."""
        terms, ref = sequence.request.terms, sequence.adapter
        answer = min(sequence.max_tokens, self._pace.answer_tokens)
        account = self._accounts.open(terms.tenant, terms.weight)
        worth = PROMPT_TOKEN * sequence.prompt_length + OUTPUT_TOKEN * answer
        sequence.bill = Bill(account, worth)
        self.waiting.add(sequence)
        if ref is not None and self._adapters.residency(ref) is not Residency.GPU:
            sequence.progress.came_cold = True
            copy_s = self._adapters.copy_s(ref)
            account.charge(PROMPT_TOKEN * copy_s / self._prompt_token_s)
        if ref is not None:
            self._adapters.want(ref, terms.tenant)

    def wait_s(self, terms: Terms) -> float:
        """How long a request on these terms would wait for its turn. On any thread."""
        if not self._pace.full:
            return 0.0
        return self._accounts.ahead_of(terms.tenant, terms.weight) / self._pace.per_s

    def plan(self, goal: StepBudget | None = None) -> Plan:
        """Choose the next step's chunks and give them KV pages; preempts where too few are free.

        goal: bounds the ranks of adapters that run, and prompts' tokens beside decodes.
        """
        active = [sequence for sequence in self.running if not sequence.complete]
        chunks = self._decodes(active)
        budget = self._bounds.tokens - len(chunks)
        if chunks and goal is not None:
            budget = min(budget, goal.prompt_tokens(chunks))
        prompts = sorted((s for s in active if s.remaining > 1), key=_turn)
        failed: dict[str, AdapterError] = {}
        full = bool(self.waiting)
        if self.waiting and budget and len(active) < self._bounds.sequences:
            max_ranks = goal.ranks if goal is not None else math.inf
            admission = Admission(
                self.running, self._bounds.adapters, max_ranks, self._cache, self._adapters
            )
            taken, full = self._take_turns(admission, prompts, budget, len(active))
            chunks += taken
            budget -= sum(chunk.length for chunk in taken)
            failed = admission.failed
            served = {chunk.sequence for chunk in taken}
            prompts = [sequence for sequence in prompts if sequence not in served]
        for sequence in prompts:
            if budget > 0:
                chunks.append(self._charged(Chunk.of(sequence, budget)))
                budget -= chunks[-1].length
        self._pace.planned(full)
        return Plan(chunks, self._drop_failed(failed))

    def launched(self, chunks: list[Chunk]) -> None:
        """The device computes them now, in this order: the next plan builds on it."""
        rows = count()
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.kv.computed = chunk.end
            sequence.progress.steps += 1
            if chunk.completes:
                sequence.draw(next(rows))
                sequence.bill.account.charge(OUTPUT_TOKEN)
        self._pace.did(OUTPUT_TOKEN * next(rows))

    def written(self, chunk: Chunk) -> None:
        """The keys and values of a launched chunk are in its pages: let others find full ones."""
        kv = chunk.sequence.kv
        if chunk.pages is kv.pages:  # not preempted since
            self._cache.publish_written(kv, chunk.end)

    def finish(self, sequence: Sequence) -> None:
        """A sequence has made its last token: free what it holds.

        A step in flight may still write to its pages. Whoever gets them next writes in a later
        step, and the device computes one step after the other.
        """
        preempted = not sequence.kv.pages
        (self.waiting if preempted else self.running).remove(sequence)
        self._pace.ended(sequence.made)
        self._end(sequence)

    def drop(self, doomed: Callable[[Sequence], bool]) -> list[Sequence]:
        """Take out every doomed sequence, waiting or running, and free what it holds."""
        waiting = [sequence for sequence in self.waiting if doomed(sequence)]
        running = [sequence for sequence in self.running if doomed(sequence)]
        for sequence in waiting:
            self.waiting.remove(sequence)
        if running:
            gone = set(running)
            self.running = [s for s in self.running if s not in gone]
        for sequence in (*waiting, *running):
            self._end(sequence)
        return waiting + running

    def _decodes(self, active: list[Sequence]) -> list[Chunk]:
        """One token of each that has no more; takes those out of `active` that it preempts."""
        chunks: list[Chunk] = []
        index = 0
        if self._cache.free < len(active):  # somebody may have to give way
            active.sort(key=_turn)
        while index < len(active):
            sequence = active[index]
            if sequence.remaining > 1 or sequence.awaits_token:
                index += 1
            elif self._cache.grow(sequence.kv, sequence.length):
                chunks.append(Chunk.of(sequence, 1))
                index += 1
            else:  # the youngest of the tenant that is furthest ahead, perhaps this very sequence
                self._preempt(active.pop())
        return chunks

    def _preempt(self, sequence: Sequence) -> None:
        # It keeps its tokens and later computes them anew, but for pages that are still cached.
        self.running.remove(sequence)
        self._free(sequence)
        sequence.progress.preemptions += 1
        self._counts.preemptions += 1
        self.waiting.add(sequence)

    def _take_turns(
        self, admission: Admission, prompts: list[Sequence], budget: int, active: int
    ) -> tuple[list[Chunk], bool]:
        """Chunks of prompts that run and of who may begin; whether more were kept out by room."""
        chunks: list[Chunk] = []
        begun: list[Sequence] = []
        served: set[VirtualCounter] = set()  # or would be but for room
        full = True
        turns = self.waiting.turns(prompts, admission.refuses)
        for sequence in self._candidates(turns):
            if not sequence.kv.pages:
                if active + len(begun) == self._bounds.sequences:
                    break
                if sequence.pending:
                    break  # just preempted: the step in flight tells its last token
                allowed = admission.allows(sequence, self._admitted)
                if not sequence.awaits_adapter:
                    served.add(sequence.bill.account)
                if not allowed:
                    continue
                # a page is left for each that grows
                if not self._cache.allocate(sequence.kv, sequence.length, active + len(begun)):
                    break
                self._begin(sequence, admission)
                begun.append(sequence)
            chunks.append(self._charged(Chunk.of(sequence, budget)))
            budget -= chunks[-1].length
            if budget == 0:
                break
        else:
            full = False
        self._promised = admission.promised
        self.waiting.stand_aside(account for account in turns.over if account not in served)
        for sequence in begun:
            self.waiting.remove(sequence)
        if begun:
            self.running = sorted([*self.running, *begun], key=lambda s: s.arrival)
        return chunks, full

    def _candidates(self, turns: Turns) -> Iterator[Sequence]:
        """Ahead of all others who has been promised the room."""
        promised = self._promised
        if promised is not None and not promised.ended:
            yield promised
        for sequence in turns:
            if sequence is not promised:
                yield sequence

    def _begin(self, sequence: Sequence, admission: Admission) -> None:
        admission.admit(sequence)
        self._admitted += sequence.adapter is not None
        self._accounts.wait(sequence.bill.account)  # whoever stood aside is lifted now
        progress = sequence.progress
        if progress.begun_s is not None:
            return
        progress.begun_s = time.monotonic()
        progress.cached_tokens = sequence.kv.computed
        self._counts.begun(sequence)
        if progress.came_cold and sequence.adapter is not None:
            progress.loaded_s = self._adapters.here_since_s(sequence.adapter)

    def _charged(self, chunk: Chunk) -> Chunk:
        """A chunk of a prompt, for which its tenant pays."""
        sequence = chunk.sequence
        end = min(chunk.end, sequence.prompt_length)
        self._pace.did(sequence.bill.charge_prompt(chunk.start, end))
        return chunk

    def _drop_failed(self, errors: dict[str, AdapterError]) -> list[tuple[Sequence, AdapterError]]:
        if not errors:
            return []
        dropped = self.drop(lambda s: s.adapter is not None and s.adapter.digest in errors)
        return [(s, errors[s.adapter.digest]) for s in dropped if s.adapter is not None]

    def _end(self, sequence: Sequence) -> None:
        sequence.ended = True
        sequence.bill.account.open -= 1
        self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        self._cache.clear(sequence.kv)
        if sequence.lease is not None:
            sequence.lease.release()
            sequence.lease = None


def _turn(sequence: Sequence) -> tuple[float, int]:
    """Those of tenants that are behind come first, and of each tenant's the oldest."""
    return sequence.bill.account.counter, sequence.arrival
