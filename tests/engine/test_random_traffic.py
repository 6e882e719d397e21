"""Random traffic through a whole engine: every token as predicted, every page accounted for.

The model (hash_model) reads all its input from the KV pages, which are too few for the requests.
Requests arrive, share, fail and are aborted at any moment; checked_engine.py has the checks.
"""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from lorikeet_engine.adapter import Residency
from lorikeet_engine.device import border_memory
from lorikeet_engine.execution import batch_builder, border
from lorikeet_engine.execution.page_copies import RankPages
from lorikeet_engine.request import SamplingParams
from lorikeet_engine.scheduling import host_pages
from lorikeet_engine.scheduling.border_policy import BorderPolicy
from lorikeet_engine.scheduling.host_pages import HostPages
from lorikeet_engine.scheduling.kv_cache import KVCache
from tests.engine.checked_engine import ADAPTER_BYTES, BROKEN, GOOD, OTHER, CheckedEngine
from tests.engine.half_right import draft_half_right, predict_half_right
from tests.engine.hash_model import PAGE, WHOLE, WINDOWED

pytestmark = pytest.mark.usefixtures("one_thread")

MOST = 12  # choices in flight above which no request is submitted
TAILS = ((7,), (8,), (7, 8), (7, 7, 7, 8, 8))
HEADS = (0, PAGE, 2 * PAGE + 1, 4 * PAGE, 8 * PAGE)
PROMPTS = [(7,) * head + tail for head in HEADS for tail in TAILS]
SAMPLINGS = [
    SamplingParams(most, min(most, least), heat, seed=3, stop_token_ids=stops, **more)
    for more in (
        {},
        {"presence_penalty": 1.5, "frequency_penalty": -0.75, "logit_bias": ((7, 2.0), (9, -3.0))},
        {"repetition_penalty": 4.0, "frequency_penalty": 0.5},
        {"grammar": "below 60, end under 30", "repetition_penalty": 0.3},
        {"grammar": "below 60, end under 30, by one from 55 to 33"},
        {"prompt_logprobs": 1, "grammar": "below 50, end under 40, by one from 45 to 18"},
        {"prompt_logprobs": 0},
        {"prompt_logprobs": 2, "grammar": "below 60, end under 30"},
    )
    for most in (25, 24, 12, 2)
    for least, stops in ((0, ()), (0, tuple(range(4))), (5, tuple(range(20))))
    for heat in (0.0, 1.0)
]
calls = st.tuples(
    st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=2),
    st.fixed_dictionaries(
        {
            "sampling": st.sampled_from(SAMPLINGS),
            "n": st.sampled_from((1, 1, 3)),
            "adapter": st.sampled_from((None, GOOD, None, OTHER, GOOD, BROKEN)),
            "salt": st.sampled_from(("", "globex")),
            "background": st.sampled_from((False, False, True)),
        }
    ),
)


class Traffic(RuleBasedStateMachine):
    overlap, windows, states, cached_states = False, WHOLE, False, 0
    speculation, more = "off", {}

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()

    @initialize(
        running=st.sampled_from((4, 5, 3, 2, 1)),
        spare=st.sampled_from((0, 3, 7, 20)),
        kv_pages=st.sampled_from((8, 10, 6, 4, 14)),
        places=st.sampled_from((1, 2, 3)),
    )
    def begin(self, running, spare, kv_pages, places):
        self.folder, self.places = Path(tempfile.mkdtemp()), places
        self.checked = CheckedEngine(
            self.folder,
            kv_pages=kv_pages * (2 if len(self.windows) > 1 else 1),
            windows=self.windows,
            states=self.states,
            cached_states=self.cached_states,
            max_running=running,
            max_batch_tokens=running + spare,
            max_batch_adapters=2,
            adapter_gpu_bytes=places * ADAPTER_BYTES,
            overlap=self.overlap,
            speculation=self.speculation,
            **self.more,
        )

    @rule(calls=st.lists(calls, min_size=1, max_size=4))
    def submit(self, calls):
        for prompts, call in calls:
            if sum(map(len, self.checked.live.values())) < MOST:
                self.checked.submit(*prompts, **call)

    @rule(times=st.sampled_from((1, 1, 2, 6)))
    def step(self, times):
        for _ in range(times):
            self.checked.step()

    @rule(which=st.integers(0, 9), choice=st.sampled_from((None, None, 0, 1, 2, 5)))
    def abort(self, which, choice):
        if names := sorted(self.checked.live):
            self.checked.abort(names[which % len(names)], choice)

    @rule(which=st.integers(0, 9))
    def load(self, which):
        self.checked.load(which)

    @rule(when=st.sampled_from((None, None, None, "before", "after")))
    def fail_the_next_batch(self, when):
        self.checked.fault = when

    def teardown(self):
        try:
            self.end()
        finally:
            self.patch.undo()

    def end(self):
        if not hasattr(self, "checked"):
            return
        try:
            # otherwise the first error says more than those that follow from it
            if self.checked.sound:
                self.checked.drain()
        finally:
            self.checked.engine.close()
            shutil.rmtree(self.folder)


class OverlappedTraffic(Traffic):
    overlap = True


class WindowedTraffic(Traffic):
    overlap, windows = True, WINDOWED


class HostedTraffic(OverlappedTraffic):
    """Traffic whose pages go to host and disk and come back, some damaged, at any moment."""

    @initialize(
        running=st.sampled_from((4, 5, 3, 2, 1)),
        spare=st.sampled_from((20, 7, 3, 0)),
        kv_pages=st.sampled_from((8, 10, 6, 4, 14)),
        places=st.sampled_from((1, 2, 3)),
        host_pages=st.sampled_from((40, 20, 8, 1)),
        room=st.sampled_from((40, 40, 3, 1)),
        windows=st.sampled_from((WHOLE, WINDOWED)),
        overlap=st.sampled_from((True, True, False)),
    )
    def begin(self, running, spare, kv_pages, places, host_pages, room, windows, overlap):
        self.overlap, self.windows = overlap, windows
        self.more = {"kv_host_bytes": host_pages * (2 * 4 * 4 * PAGE + 8)}
        self.more |= {"kv_disk_bytes": 4096 * (160 // host_pages)}
        self.patch.setattr(HostPages, "pays", lambda *_: True)
        self.patch.setattr(RankPages, "room", room)
        super().begin(running, spare, kv_pages, places)

    @rule(
        prompt=st.sampled_from(PROMPTS[8:]),
        sampling=st.sampled_from([SamplingParams(2, seed=3), SamplingParams(9, seed=3)]),
        adapter=st.sampled_from((None, GOOD)),
        salt=st.sampled_from("ab"),
        times=st.sampled_from((1, 20, 40)),
    )
    def answer(self, prompt, sampling, adapter, salt, times):
        if sum(map(len, self.checked.live.values())) < MOST:
            self.checked.submit(prompt, sampling=sampling, adapter=adapter, salt=salt)
            self.checked.load()
        self.step(times)

    @rule(times=st.sampled_from((1, 2)))
    def fetch(self, times):
        for _ in range(times):
            self.checked.fetch()
        self.step(times)

    @rule(slot=st.integers(0, 39), word=st.integers(0, 15))
    def spoil(self, slot, word):
        host = self.checked.engine._page_copies._own._host
        host[slot % len(host), word] += 1


class DraftedTraffic(OverlappedTraffic):
    """Traffic in which any sequence may have a draft in any step, however little it gains."""

    speculation = "lookup"

    @initialize(
        running=st.sampled_from((24, 18, 12, 6)),
        spare=st.sampled_from((20, 7, 3)),
        kv_pages=st.sampled_from((60, 30, 15, 8)),
        places=st.sampled_from((1, 2, 3)),
        seed=st.integers(0, 99),
        overlap=st.sampled_from((True, True, False)),
        windows=st.sampled_from((WHOLE, WINDOWED)),
    )
    def begin(self, running, spare, kv_pages, places, seed, overlap, windows):
        self.overlap, self.windows = overlap, windows
        draft_half_right(self.patch, lambda *choice: self.checked.expected[choice][0], seed)
        super().begin(running, spare, kv_pages, places)


class NoisyTraffic(DraftedTraffic):
    """Traffic with a draft LoRA, which tenants use, too, and which leaves at any moment."""

    speculation = "draft"

    @initialize(
        running=st.sampled_from((24, 18, 12, 6)),
        spare=st.sampled_from((20, 7, 3)),
        kv_pages=st.sampled_from((60, 30, 15)),
        places=st.sampled_from((2, 3)),
        seed=st.integers(0, 99),
        overlap=st.sampled_from((True, True, False)),
        windows=st.sampled_from((WHOLE, WINDOWED)),
    )
    def begin(self, running, spare, kv_pages, places, seed, overlap, windows):
        self.overlap, self.windows = overlap, windows
        predict_half_right(self.patch, lambda *choice: self.checked.expected[choice][0], seed)
        Traffic.begin(self, running, spare, kv_pages, places)
        self.pin(True)

    @rule(pinned=st.sampled_from((True, True, False)))
    def pin(self, pinned):
        draft, engine = self.checked.refs[GOOD], self.checked.engine
        if pinned and not engine._drafts:
            engine.pin(draft, draft=True)
            self.checked.load()
        elif not pinned and engine._drafts:
            engine.unpin(draft.digest)

    @rule(
        prompts=st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=3),
        sampling=st.sampled_from(SAMPLINGS),
        adapter=st.sampled_from((None, GOOD)),
        times=st.sampled_from((3, 9, 20)),
    )
    def answer_alone(self, prompts, sampling, adapter, times):
        """While others wait, nothing is predicted."""
        self.checked.drain_requests()
        for prompt in prompts:
            self.checked.submit(prompt, sampling=sampling, adapter=adapter)
        self.checked.load()
        self.step(times)


class DraftedStates(DraftedTraffic):
    """Drafted traffic of a model whose states go back where drafted tokens are rejected."""

    states = True

    @initialize(
        running=st.sampled_from((24, 12, 6)),
        spare=st.sampled_from((20, 7, 3)),
        kv_pages=st.sampled_from((60, 30, 15, 8)),
        places=st.sampled_from((1, 2, 3)),
        seed=st.integers(0, 99),
        overlap=st.sampled_from((True, True, False)),
        cached=st.sampled_from((12, 5, 3, 1)),
    )
    def begin(self, running, spare, kv_pages, places, seed, overlap, cached):
        self.cached_states = cached
        super().begin(running, spare, kv_pages, places, seed, overlap, WHOLE)
        self.patch.setattr(KVCache, "state_piece", PAGE)
        self.patch.setattr(batch_builder, "CHUNK", PAGE)


class StatefulTraffic(Traffic):
    """Traffic of a model whose sequences have states, saved behind any page."""

    overlap, states = True, True

    @initialize(
        running=st.sampled_from((4, 5, 3, 2, 1)),
        spare=st.sampled_from((20, 7, 3, 0)),
        kv_pages=st.sampled_from((14, 8, 10, 6, 4)),
        places=st.sampled_from((1, 2, 3)),
        cached=st.sampled_from((5, 1, 3, 0, 12)),
    )
    def begin(self, running, spare, kv_pages, places, cached):
        self.cached_states = cached
        self.patch.setattr(KVCache, "state_piece", PAGE)
        self.patch.setattr(batch_builder, "CHUNK", PAGE)
        super().begin(running, spare, kv_pages, places)


class BorderTraffic(HostedTraffic):
    """Traffic beside which memory moves between adapters and KV pages at any moment."""

    @initialize(
        running=st.sampled_from((4, 5, 3, 2)),
        spare=st.sampled_from((20, 7, 3, 0)),
        kv_pages=st.sampled_from((30, 20, 14)),
        places=st.sampled_from((1, 2, 3)),
        host_pages=st.sampled_from((0, 20, 0, 8)),
        windows=st.sampled_from((WHOLE, WINDOWED)),
        overlap=st.sampled_from((True, True, False)),
    )
    def begin(self, running, spare, kv_pages, places, host_pages, windows, overlap, disk_pages=0):
        self.overlap, self.windows = overlap, windows
        self.more = {"kv_host_bytes": host_pages * (2 * 4 * 4 * PAGE + 8)}
        self.more |= {"kv_disk_bytes": 4096 * disk_pages}
        self.more |= {"moving_border": True, "max_context": 24}
        self.patch.setattr(HostPages, "pays", lambda *_: True)
        self.patch.setattr(RankPages, "room", 20)
        self.patch.setitem(border_memory.GRANULES, "cpu", 64)  # a unit is a page
        self.patch.setattr(border, "EVERY_S", 0)
        Traffic.begin(self, running, spare, kv_pages, places)
        assert self.checked.engine.status().border.lendable_units > 0
        self.wanted = 0
        self.patch.setattr(BorderPolicy, "decide", lambda *_: self.wanted)

    @rule(units=st.sampled_from((1, -1, 5, -5, 0)), times=st.sampled_from((1, 3, 9)))
    def move(self, units, times):
        self.wanted = units
        self.step(times)
        used = self.checked.engine.status().border
        gpu = self.checked.engine.status().tiers[Residency.GPU]
        units = len(self.checked.engine._cache._references)  # of the KV pages at the start
        in_all = units + self.places * ADAPTER_BYTES // 128
        assert used.arena_units + used.kv_units == in_all
        moves = self.checked.engine._border._moves
        there = used.arena_units - sum(not move.to_kv for move in moves)
        assert gpu.capacity_bytes == 128 * there >= self.places * ADAPTER_BYTES
        assert used.kv_units >= units // 4

    @rule(slot=st.integers(0, 39), word=st.integers(0, 15))
    def spoil(self, slot, word):
        if self.more["kv_host_bytes"]:
            super().spoil(slot, word)


class SharedTraffic(BorderTraffic):
    """Traffic with all at once: the border moves, pages and kept prompts go to host and disk, come
    back beside steps or before one, and are damaged; answers have drafts and are preempted.
    """

    speculation = "lookup"

    @initialize(
        running=st.sampled_from((8, 5, 12, 3)),
        spare=st.sampled_from((20, 7, 3)),
        kv_pages=st.sampled_from((30, 20, 14)),
        places=st.sampled_from((1, 2, 3)),
        host_pages=st.sampled_from((20, 8, 40)),
        disk_pages=st.sampled_from((40, 8, 160)),
        in_step_s=st.sampled_from((1.0, -1.0)),
        seed=st.integers(0, 99),
        windows=st.sampled_from((WHOLE, WINDOWED)),
        overlap=st.sampled_from((True, True, False)),
    )
    def begin(self, in_step_s, seed, **sizes):
        draft_half_right(self.patch, lambda *choice: self.checked.expected[choice][0], seed)
        self.patch.setattr(host_pages, "IN_STEP_S", in_step_s)
        super().begin(**sizes)

    @rule(
        prompt=st.sampled_from(PROMPTS[8:]),
        adapter=st.sampled_from((None, GOOD)),
        salt=st.sampled_from("ab"),
        name=st.sampled_from("pq"),
        times=st.sampled_from((1, 9, 20)),
    )
    def keep(self, prompt, adapter, salt, name, times):
        engine = self.checked.engine
        engine.keep_prompts((*engine.keep_prompts(()), name))
        once = {"sampling": SamplingParams(1, seed=3), "background": True, "keeps": name}
        if sum(map(len, self.checked.live.values())) < MOST:
            self.checked.submit(prompt, adapter=adapter, salt=salt, **once)
        self.step(times)

    @rule(names=st.sampled_from(("", "p", "q")))
    def drop_prompts(self, names):
        self.checked.engine.keep_prompts(tuple(names))

    @rule(place=st.integers(0, 159))
    def spoil_disk(self, place):
        file = self.checked.engine._page_copies._own.file
        at = place % file.places * file._stride + 40
        byte = os.pread(file._file.fileno(), 1, at)
        os.pwrite(file._file.fileno(), bytes([byte[0] ^ 1]), at)

    @rule(
        prompt=st.sampled_from(PROMPTS[8:]),
        sampling=st.sampled_from(SAMPLINGS),
        salt=st.sampled_from("ab"),
    )
    def answer_alone(self, prompt, sampling, salt):
        """Only a request that is alone has a step that waits for its pages."""
        self.checked.drain_requests()
        self.checked.submit(prompt, sampling=sampling, salt=salt)
        self.checked.drain_requests()


class TestTraffic(Traffic.TestCase):
    settings = settings(max_examples=10, stateful_step_count=40, deadline=None)


class TestOverlappedTraffic(OverlappedTraffic.TestCase):
    settings = settings(max_examples=12, stateful_step_count=40, deadline=None)


class TestDraftedTraffic(DraftedTraffic.TestCase):
    settings = settings(max_examples=12, stateful_step_count=40, deadline=None)


class TestNoisyTraffic(NoisyTraffic.TestCase):
    settings = settings(
        max_examples=12, stateful_step_count=40, deadline=None, derandomize=True, database=None
    )


class TestDraftedStates(DraftedStates.TestCase):
    settings = settings(max_examples=10, stateful_step_count=40, deadline=None)


class TestStatefulTraffic(StatefulTraffic.TestCase):
    settings = settings(max_examples=12, stateful_step_count=40, deadline=None)


class TestWindowedTraffic(WindowedTraffic.TestCase):
    settings = settings(max_examples=12, stateful_step_count=40, deadline=None)


@pytest.mark.soak
@pytest.mark.timeout(3600)
class TestMuchWindowedTraffic(WindowedTraffic.TestCase):
    settings = settings(max_examples=4000, stateful_step_count=80, deadline=None)


@pytest.mark.soak
@pytest.mark.timeout(3600)
class TestMuchHostedTraffic(HostedTraffic.TestCase):
    settings = settings(max_examples=4000, stateful_step_count=80, deadline=None)


class TestBorderTraffic(BorderTraffic.TestCase):
    settings = settings(max_examples=15, stateful_step_count=40, deadline=None)


class TestSharedTraffic(SharedTraffic.TestCase):
    settings = settings(max_examples=12, stateful_step_count=40, deadline=None)


@pytest.mark.soak
@pytest.mark.timeout(3600)
class TestMuchSharedTraffic(SharedTraffic.TestCase):
    settings = settings(max_examples=3000, stateful_step_count=80, deadline=None)


@pytest.mark.soak
@pytest.mark.timeout(3600)
class TestMuchBorderTraffic(BorderTraffic.TestCase):
    settings = settings(max_examples=4000, stateful_step_count=80, deadline=None)


@pytest.mark.soak
@pytest.mark.timeout(3600)
class TestMuchDraftedTraffic(DraftedTraffic.TestCase):
    settings = settings(max_examples=4000, stateful_step_count=80, deadline=None)


@pytest.mark.soak
@pytest.mark.timeout(3600)
class TestMuchNoisyTraffic(NoisyTraffic.TestCase):
    settings = settings(max_examples=4000, stateful_step_count=80, deadline=None)


@pytest.mark.soak
@pytest.mark.timeout(3600)
class TestManyDraftedStates(DraftedStates.TestCase):
    settings = settings(max_examples=3000, stateful_step_count=80, deadline=None)


@pytest.mark.soak
@pytest.mark.timeout(3600)
class TestMuchTraffic(Traffic.TestCase):
    settings = settings(max_examples=3000, stateful_step_count=80, deadline=None)


@pytest.mark.soak
@pytest.mark.timeout(3600)
class TestMuchOverlappedTraffic(OverlappedTraffic.TestCase):
    settings = settings(max_examples=4000, stateful_step_count=80, deadline=None)
