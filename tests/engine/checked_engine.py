"""Engine whose tokens are all known beforehand, with its state checked at each step.

Nothing runs beside the test: adapters load and pages arrive from the host when the test says so,
and the clock counts steps, so every failure can be repeated.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import wait
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.errors import AdapterError, StepFailed
from lorikeet_engine.execution import page_copies
from lorikeet_engine.execution.page_copies import WritePages
from lorikeet_engine.models.batch import Batch
from lorikeet_engine.request import (
    Failed,
    PromptLogprobs,
    Request,
    SamplingParams,
    SchedulingParams,
    Tokens,
)
from lorikeet_engine.residency import loader, requested_adapters, tiers
from lorikeet_engine.scheduling.draft_budget import MOST_DRAFTED
from lorikeet_engine.scheduling.host_pages import (
    Arrival,
    DiskCopy,
    Fetch,
    HostPages,
    PageSlots,
)
from lorikeet_engine.scheduling.sequence import Sequence, SequenceStatus
from tests.engine.blobs import Shelf
from tests.engine.hash_model import PAGE, SHAPE, build, predict, predict_scores, shift_of

GOOD, OTHER, BROKEN = ADAPTERS = ("good", "other", "broken")
HEAD = (SHAPE.outer_layer, SHAPE.index("lm_head"))  # in OTHER only
ADAPTER_BYTES = 512
STEPS = 2000  # far more than all requests need to end


class ManualWorkers:
    """Replacement for the loader's threads: work waits until the test runs it."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def submit(self, work: Callable[[], None], *, urgent: bool, tenant: str = "") -> None:
        self.work.append(work)

    def close(self) -> None:
        self.work.clear()


class CheckedEngine:
    """Engine with too little memory for its requests, and the outputs that they must have.

    live: choices in flight, by request id.
    sound: False once a check has failed.
    fault: "before" or "after": the next batch fails before or after it is computed.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.shelf = Shelf(folder / "blobs")
        self.refs = {name: self._make(name) for name in ADAPTERS}
        self.shelf.errors[BROKEN] = OSError("the connection was reset")
        self.loads, self.fetches, self._now_s = ManualWorkers(), ManualWorkers(), 0.0
        clock = SimpleNamespace(monotonic=lambda: self._now_s)
        with (
            mock.patch.object(loader, "Workers", return_value=self.loads),
            mock.patch.object(page_copies, "Workers", return_value=self.fetches),
            mock.patch.object(tiers, "time", clock),
            mock.patch.object(requested_adapters, "time", clock),
        ):
            self.engine, self.model = build(folder, self.shelf, **settings)
        if (copies := self.engine._page_copies) is not None:
            copies._waits = True
        self.slots = self.engine._sampler.penalties.free
        self.model.before = self._check_batch
        self.model.after = lambda: self._break("after")
        self.expected: dict[tuple[str, int], Any] = {}
        self.outputs: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.expected_scores: dict[tuple[str, int], list[float]] = {}
        self.scored = Counter[tuple[str, int]]()
        self.live: dict[str, set[int]] = defaultdict(set)
        self.sound = True
        self.fault: str | None = None
        self._hopeless: set[str] = set()  # requests whose adapter cannot be loaded
        self._batch: set[str] = set()  # requests of the last batch
        self._failing: set[str] = set()  # requests of the step that has just failed

    def _make(self, name: str) -> AdapterRef:
        ranks = {(0, 0): 2, HEAD: 1} if name == OTHER else {(0, 0): 8}
        return self.shelf.make(name, ranks, shape=SHAPE)

    def submit(
        self,
        *prompts: tuple[int, ...],
        sampling: SamplingParams,
        n: int = 1,
        adapter: str | None = None,
        salt: str = "",
        background: bool = False,
        keeps: str = "",
    ) -> str:
        """Submit a request, with prompts cut to the context; return its id."""
        context = self.engine.info.max_context
        prompts = tuple(prompt[: context - 1] for prompt in prompts)
        name, ref = f"r{len(self.expected)}", self.refs[adapter] if adapter else None
        scheduling = SchedulingParams(tenant=salt, background=background)
        request = Request(name, prompts, sampling, n, ref, salt, scheduling, keeps=keeps)
        self.engine.submit(request)
        wait(s.compiled for s in self.engine._requests.submitted if s.compiled is not None)
        deltas = self.shelf._tensors[ref.digest] if ref else {}
        mark, head = (float(deltas[at][0][0, 0]) if at in deltas else 0.0 for at in ((0, 0), HEAD))
        for choice in range(n * len(prompts)):
            seed = (sampling.seed or 0) + choice
            expected = predict(prompts[choice // n], sampling, seed, context, mark, shift_of(head))
            self.expected[name, choice] = expected
            self.live[name].add(choice)
            if sampling.prompt_logprobs is not None and choice % n == 0:
                scores = predict_scores(prompts[choice // n], mark, shift_of(head))
                self.expected_scores[name, choice] = scores
        if adapter == BROKEN:
            self._hopeless.add(name)
        return name

    def abort(self, name: str, choice: int | None = None) -> None:
        self.engine.abort(name, choice)
        for ended in [c for c in self.live.get(name, ()) if choice in (None, c)]:
            self._end(name, ended)

    def load(self, which: int = 0) -> None:
        """Do one of the waiting pieces of work that load adapters, if any waits.

        which: number of the piece, modulo the number of waiting pieces.
        """
        if self.loads.work:
            self.loads.work.pop(which % len(self.loads.work))()

    def fetch(self) -> None:
        """Copy the pages of the oldest fetch from the host, if there is any."""
        if self.fetches.work:
            self.fetches.work.pop(0)()

    def step(self) -> None:
        """Step the engine; check its outputs and the resources that it holds."""
        self.sound, self._failing = False, set()
        errors = {}
        for output in self.engine.step():
            if isinstance(output, Tokens):
                self._check(output)
                continue
            if isinstance(output, PromptLogprobs):
                self._check_scores(output)
                continue
            assert isinstance(output, Failed)
            assert output.request_id in self.live, "an error after the end"
            errors[output.request_id] = output.error
            del self.live[output.request_id]
        failed = {name for name, error in errors.items() if isinstance(error, StepFailed)}
        assert failed == self._failing
        for name in errors.keys() - failed:
            assert isinstance(errors[name], AdapterError)
            assert name in self._hopeless
        self._check_pages()
        self._now_s += 0.1
        self.sound = True

    def drain_requests(self) -> None:
        """Step until all requests have ended."""
        for _ in range(STEPS):
            self.load()
            self.fetch()
            self.step()
            if not self.live:
                break
        assert not self.live, "these never end"

    def drain(self) -> None:
        """Step until all requests have ended; check that no resource is held."""
        self.drain_requests()
        while self.fetches.work:
            self.fetch()
        for draft in self.engine._drafts:
            self.engine.unpin(draft.digest)
        self.step()  # an abort takes effect in the next step
        live = self.engine.status().live
        assert (live.running, live.waiting, live.kv_pages_used) == (0, 0, 0)
        assert all(adapter.leases == 0 for adapter in self.engine.adapters())
        assert not self.engine._requests.open_choices
        assert self.engine._sampler.penalties.free == self.slots
        cache = self.engine._cache
        there = [page for page, gone in enumerate(cache._withdrawn) if not gone]
        assert sorted(cache.take(cache.pages)) == there
        while self.fetches.work:  # pages that the last step began to write to the disk
            self.fetch()

    def _check(self, output: Tokens) -> None:
        name, choice = output.request_id, output.choice
        assert choice in self.live.get(name, ()), "tokens after the end"
        assert name not in self._hopeless
        got, (tokens, finish) = self.outputs[name, choice], self.expected[name, choice]
        if not got:
            assert self.scored[name, choice] == len(self.expected_scores.get((name, choice), ()))
        got.extend(output.token_ids)
        assert got == tokens[: len(got)]
        if output.finish is not None:
            assert (got, output.finish) == (tokens, finish)
            self._end(name, choice)

    def _check_scores(self, output: PromptLogprobs) -> None:
        key = output.request_id, output.choice
        assert output.choice in self.live.get(output.request_id, ()), "scores after the end"
        assert not self.outputs[key], "scores after the first token"
        begin = self.scored[key]
        self.scored[key] += len(output.logprobs)
        told = [score.logprob for score in output.logprobs]
        assert told == pytest.approx(self.expected_scores[key][begin : self.scored[key]], abs=1e-5)

    def _end(self, name: str, choice: int) -> None:
        self.live[name].remove(choice)
        if not self.live[name]:
            del self.live[name]

    def _check_batch(self, batch: Batch) -> None:
        """Check a batch that is about to be computed."""
        cache, running = self.engine._cache, self.engine._scheduler.running
        assert len(batch.token_ids) <= self.engine._settings.max_batch_tokens
        slots = batch.kv_slots.ravel().tolist()
        assert len(set(slots)) == len(slots), "two tokens in one place"
        written = {slot // PAGE for slot in slots}
        for page in written:
            assert cache._references[page] == 1, "a written page is shared or has no owner"
            assert cache._keys[page] is None, "a written page can be found by others"
        self._batch = {
            s.request.request_id for s in running if written.intersection(chain(*s.kv.pages))
        }
        self._break("before")

    def _break(self, when: str) -> None:
        if self.fault == when:
            self.fault, self._failing = None, self._batch
            raise RuntimeError(f"out of memory {when} the batch was computed")

    def _check_pages(self) -> None:
        """Check that each page is held by its users alone, and shared only for equal contents."""
        cache, scheduler = self.engine._cache, self.engine._scheduler
        holders = defaultdict(list)
        for sequence in scheduler.running:
            for group, pages in enumerate(sequence.kv.pages):
                before = sequence.kv.first if group else 0
                assert not group or len(pages) <= self._most_windowed(sequence)
                for index, page in enumerate(pages, before + 1):
                    holders[page].append((sequence, group, index * PAGE))
        shared = {page: len(held) for page, held in holders.items()}
        fetches = self._check_host()
        for page in chain.from_iterable(pages for fetch in fetches for pages in fetch.kept):
            shared[page] = shared.get(page, 0) + 1
        references = {page: count for page, count in enumerate(cache._references) if count}
        assert shared == references
        assert cache.used == len(shared)
        for shared in (held for held in holders.values() if len(held) > 1):
            assert len({_content(*holder) for holder in shared}) == 1
        assert not any(sequence.kv.pages for sequence in scheduler.waiting)
        assert all(s.status is SequenceStatus.RUNNING for s in scheduler.running)
        waiting = {SequenceStatus.WAITING, SequenceStatus.PREEMPTED}
        assert waiting.issuperset(s.status for s in scheduler.waiting)
        sequences = (*scheduler.running, *scheduler.waiting)
        leases = Counter(s.adapter.digest for s in sequences if s.adapter and s.lease)
        if (draft := self.engine._leased_draft) is not None:
            leases[draft] += 1
        assert leases == {a.digest: a.leases for a in self.engine.adapters() if a.leases}
        assert all(s.lease for s in scheduler.running if s.adapter)
        self._check_states(scheduler.running)
        slots = [s.penalty_slot.index for s in sequences if s.penalty_slot]
        assert len(set(slots)) == len(slots) == self.slots - self.engine._sampler.penalties.free
        assert not any(s.penalty_slot for s in scheduler.waiting)

    def _check_host(self) -> list[Fetch]:
        """Check that each slot on the host is free, has one page, or is copied by a fetch or to the
        disk; return the fetches under way.
        """
        cache, copies = self.engine._cache, self.engine._page_copies
        if cache.host is None or copies is None:
            return []
        under_way = list(copies._under_way)
        assert set(cache._arriving.values()) == set(under_way)
        assert not cache.host.to_fetch
        writing = copies._writing[0] if copies._writing else WritePages(0, (), ())
        _check_copies(cache.host, [each.arrival for each in under_way], writing.copies)
        if cache.host_states is not None:
            states = [each.state.arrival for each in under_way if each.state is not None]
            _check_copies(cache.host_states, states, writing.states)
        return under_way

    def _check_states(self, running: list[Sequence]) -> None:
        """Check that every slot of a state that is not free belongs to one running sequence."""
        pool = self.engine._cache.states
        if pool is None:
            return
        owned = [slot for s in running for slot in (s.kv.state, *s.kv.saving.values())]
        owned += [s.kv.backup for s in running if s.kv.backup is not None]
        copies = self.engine._page_copies
        fetches = copies._under_way if copies is not None else ()
        owned += [each.state.copy.page for each in fetches if each.state is not None]
        held = {s.kv.restore for s in running} - {None}
        assert len({*owned, *held}) == len(owned) + len(held)
        assert pool.free + len(owned) + len(held) == self.engine._runner.state_slots

    def _most_windowed(self, sequence: Sequence) -> int:
        """Return how many pages of a window a sequence may hold: its own and those of steps in
        flight.
        """
        needs, kv = self.engine._cache._needs, sequence.kv
        drafted = MOST_DRAFTED if sequence.lookup or self.engine._leased_draft else 0
        return needs.window_pages + needs.pages_for(kv.computed - kv.written + drafted)


def _content(sequence: Sequence, group: int, end: int) -> tuple[object, ...]:
    """Return everything that the keys and values of a page depend on."""
    tokens = tuple(sequence.tokens[:end])
    assert len(tokens) == end, "a page is shared that is not full of read tokens"
    return group, sequence.request.salt, sequence.request.adapter, tokens


def _check_copies(host: HostPages, arrivals: list[Arrival], writes: tuple[DiskCopy, ...]) -> None:
    """Check slots of host memory and of its file against the copies under way.

    arrivals: what fetches copy to the GPU.
    """
    arriving = Counter(chain.from_iterable(each.pages for each in arrivals))
    assert host._fetching == arriving.total()
    _check_slots(host, arriving + Counter(copy.slot for copy in writes))
    if host.disk is not None:
        reads = list(chain.from_iterable(each.reads for each in arrivals))
        assert host._reading == len(reads)
        _check_slots(host.disk, Counter(copy.place for copy in (*reads, *writes)))


def _check_slots(slots: PageSlots, copied: Counter[int]) -> None:
    """Check that each slot is free, has one page, or is copied.

    copied: number of copies from or to each slot.
    """
    assert slots._holds == copied
    assert sorted({*slots._free, *slots._pages, *slots._holds}) == list(range(slots.slots))
    assert len(slots._free) + len({*slots._pages, *slots._holds}) == slots.slots
    assert slots._of_tenants == Counter(page.tenant for page in slots._pages.values())
    found = {slot: key for pages in slots.pages_of for key, slot in pages.items()}
    assert found == {slot: page.key for slot, page in slots._pages.items()}
    assert not slots.to_store
