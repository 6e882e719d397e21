"""Scheduler without an engine: fake adapter tiers, and a model that hashes tokens."""

import hashlib
import math
from collections import Counter, defaultdict

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.costs import StepCosts
from lorikeet_engine.errors import AdapterLoadFailed
from lorikeet_engine.request import Request, SamplingParams, SchedulingParams
from lorikeet_engine.scheduling.fairness import OUTPUT_TOKEN, PROMPT_TOKEN
from lorikeet_engine.scheduling.kv_cache import KVCache, PageKeys
from lorikeet_engine.scheduling.scheduler import Scheduler, SchedulerLimits
from lorikeet_engine.scheduling.sequence import Sequence, SequenceStatus
from lorikeet_engine.scheduling.step_budget import StepBudget
from lorikeet_engine.scheduling.step_counters import StepCounters

PAGE = 4
COSTS = StepCosts(prompt_seen_s=0.0, pieces_s=0.0)  # a prompt's cost is its number of tokens
SCHEDULING = SchedulingParams()


class FakeTiers:
    """Adapters on a GPU of `places` slots; `advance` loads requested ones unless remote."""

    def __init__(self, places=100):
        self.places = places
        self.leases = Counter()
        self.wanted = {}  # in order
        self.on_gpu = {}
        self.remote = set()
        self.broken = set()
        self.takes_s = 0.0
        self.ranks = defaultdict(lambda: 8)

    def rank(self, ref):
        return self.ranks[ref.digest] if ref.digest in self.on_gpu else None

    def residency(self, ref):
        if ref.digest in self.on_gpu:
            return Residency.GPU
        return Residency.REMOTE if ref.digest in self.remote else Residency.HOST

    def copy_s(self, ref):
        return self.takes_s

    def loaded_at_s(self, ref):
        return 0.0

    def request(self, ref, tenant):
        if ref.digest not in self.on_gpu:
            self.wanted[ref.digest] = None

    def lease(self, ref, tenant):
        if ref.digest in self.broken:
            raise AdapterLoadFailed(f"{ref} is broken")
        return FakeLease(self, ref.digest) if ref.digest in self.on_gpu else None

    def advance(self):
        for digest in [d for d in self.wanted if d not in self.remote | self.broken]:
            if len(self.on_gpu) == self.places:
                idle = [d for d in self.on_gpu if not self.leases[d]]
                if not idle:
                    return
                del self.on_gpu[idle[0]]
            self.on_gpu[digest] = len(self.on_gpu)
            del self.wanted[digest]


class FakeLease:
    def __init__(self, tiers, digest):
        self.tiers, self.digest, self.slot = tiers, digest, tiers.on_gpu[digest]
        self.rank = tiers.ranks[digest]
        tiers.leases[digest] += 1

    def release(self):
        self.tiers.leases[self.digest] -= 1


class FixedBudget(StepBudget):
    """StepBudget without a goal for latency, and with a constant limit of ranks."""

    def __init__(self, ranks):
        super().__init__(None, COSTS)
        self.ranks = ranks

    def max_ranks(self, _context):
        return self.ranks


class SchedulerHarness:
    """Scheduler, and a model that samples each token as a hash of the sequence so far.

    ranks: limit of Σ rank when an adapter begins; may be changed at any time.
    budget: budget of steps instead of FixedBudget(ranks); None: that one.
    overlap: each step is read after the next has been launched.
    window: window of all layers.
    forced: tokens forced after those sampled in the next step, by sequence.
    """

    def __init__(
        self,
        *,
        tokens=64,
        sequences=16,
        adapters=8,
        ranks=math.inf,
        pages=100,
        places=100,
        overlap=False,
        window=None,
    ):
        self.cache = KVCache(pages, PAGE, (window,), tokens)
        self.tiers = FakeTiers(places)
        self.limits, self.ranks = SchedulerLimits(tokens, sequences, adapters), ranks
        self.budget = None
        self.scheduler = Scheduler(self.limits, self.cache, self.tiers, COSTS, StepCounters())
        self.arrivals = 0
        self.finished = {}
        self.failed = []
        self.computed_tokens = 0
        self.steps = 0
        self.served = Counter()  # tenant → cost
        self.reached = Counter()  # sequence → prompt tokens that were computed or cached
        self.overlap = overlap
        self.in_flight = []
        self.forced = {}
        self.present = set()  # adapters of the last step

    def add(self, prompt, adapter=None, max_tokens=4, n=1, salt="", stop=(), scheduling=SCHEDULING):
        if isinstance(prompt, int):
            prompt = [1000 * self.arrivals + i for i in range(prompt)]
        params = SamplingParams(max_tokens=max_tokens)
        ref = AdapterRef("acme", adapter, 1, adapter) if adapter else None
        request = Request(f"r{self.arrivals}", (tuple(prompt),), params, n, ref, salt, scheduling)
        keys = PageKeys(prompt, PAGE, salt, adapter)
        made = []
        for choice in range(n):
            made.append(
                Sequence(
                    request,
                    choice,
                    arrival=self.arrivals,
                    max_tokens=max_tokens,
                    stop_ids=frozenset(stop),
                    seed=0,
                    prompt_keys=keys,
                )
            )
            self.arrivals += 1
            self.scheduler.add(made[-1])
        return made if n > 1 else made[0]

    def step(self):
        self.steps += 1
        self.tiers.advance()
        plan = self.scheduler.plan(self.budget or FixedBudget(self.ranks))
        self.failed += plan.failed.items()
        self.check(plan.chunks)
        self.count(plan.chunks)
        before, self.in_flight = self.in_flight, plan.chunks
        # as for a grammar, which must know the tokens before
        if any(chunk.sequence.forced for chunk in plan.chunks):
            self.read(before)
            before = []
        completed = [chunk.sequence for chunk in plan.chunks if chunk.completes]
        forced, self.forced = self.forced, {}
        self.scheduler.launched(
            plan.chunks, {i: forced[s] for i, s in enumerate(completed) if s in forced}
        )
        self.read(before)
        if not self.overlap:
            self.read(self.in_flight)
            self.in_flight = []
        return [(chunk.sequence, chunk.length) for chunk in plan.chunks]

    def read(self, chunks):
        for chunk in chunks:
            sequence = chunk.sequence
            self.computed_tokens += chunk.length
            if sequence.status is SequenceStatus.FINISHED:
                continue
            self.scheduler.written(chunk)
            if chunk.completes:
                token = hashlib.sha256(str(sequence.tokens[: chunk.end]).encode()).digest()[0]
                finish = sequence.accept(token)
                if finish is not None:
                    self.finished[sequence] = tuple(sequence.tokens)
                    self.scheduler.finish(sequence)

    def count(self, chunks):
        """Count the work done for each tenant; work done twice counts once."""
        for chunk in chunks:
            sequence, tenant = chunk.sequence, chunk.sequence.request.scheduling.tenant
            first = max(chunk.start, self.reached[sequence])
            last = self.reached[sequence] = min(max(first, chunk.end), sequence.prompt_length)
            self.served[tenant] += PROMPT_TOKEN * max(0, last - first)
            self.served[tenant] += OUTPUT_TOKEN * chunk.completes

    def check(self, chunks):
        limits = self.limits
        running = [s for s in self.scheduler.running if not s.complete]
        assert sum(chunk.length for chunk in chunks) <= limits.tokens
        assert len(running) <= limits.sequences
        assert all(s.status is SequenceStatus.RUNNING for s in self.scheduler.running)
        for sequence in self.scheduler.waiting:
            preempted = sequence.timings.preemptions > 0
            expected = SequenceStatus.PREEMPTED if preempted else SequenceStatus.WAITING
            assert sequence.status is expected
            assert not sequence.kv.pages
        adapters = {s.adapter.digest for s in running if s.adapter}
        assert len(adapters) <= limits.adapters
        if adapters - self.present and len(adapters) > 1:
            assert sum(self.tiers.ranks[d] for d in adapters) <= self.ranks
        self.present = adapters
        assert len({chunk.sequence for chunk in chunks}) == len(chunks)
        assert all(s.lease is not None for s in running if s.adapter)
        written = Counter()
        for chunk in chunks:
            assert chunk.length >= 1, "nothing to compute, so no logits"
            assert chunk.sequence in running
            assert chunk.pages is chunk.sequence.kv.pages
            (pages,), first = chunk.pages, chunk.sequence.kv.first
            assert (first + len(pages)) * PAGE >= chunk.end
            written.update(pages[chunk.start // PAGE - first : -(-chunk.end // PAGE) - first])
        assert all(count == 1 for count in written.values()), "two sequences write one page"

    def run(self, steps=10_000):
        while (self.scheduler.waiting or self.scheduler.running) and steps:
            self.step()
            steps -= 1
        assert steps, "it never ends"
        assert self.cache.used == 0
        assert not +self.tiers.leases
