"""No starvation: a request gets its adapter in time, however busy the others and full the tiers.

Real engine and tiers with a tiny model; loads run between two steps, and the clock counts steps.
"""

from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest

from lorikeet_engine.adapter import AdapterRef, Composition, Residency
from lorikeet_engine.request import Failed, Request, SamplingParams
from lorikeet_engine.residency import loader, tiers
from lorikeet_engine.scheduling.admission import MAX_OVERTAKES
from tests.engine.blobs import Shelf
from tests.engine.checked_engine import ManualWorkers
from tests.engine.hash_model import SHAPE, build

ADAPTER_BYTES = 128

STEP_S = 0.1
AT_ONCE = 3  # requests for each busy adapter


class Rush:
    """An engine in which requests for some adapters never stop coming.

    gpu, host: room for so many adapters of rank 2. ended: how many requests of each adapter have.
    """

    def __init__(self, folder, *, gpu, host=100, **settings):
        self.shelf, self.ended, self.busy = Shelf(folder / "blobs"), Counter(), ()
        self._loads, self._now_s, self._steps = ManualWorkers(), 0.0, 0
        self._open, self._refs = {}, {}  # request → adapter's name; by name
        clock = SimpleNamespace(monotonic=lambda: self._now_s)
        with (
            mock.patch.object(loader, "Workers", return_value=self._loads),
            mock.patch.object(tiers, "time", clock),
        ):
            self.engine, _ = build(
                folder,
                self.shelf,
                kv_pages=512,
                max_running=64,
                max_batch_tokens=256,
                adapter_gpu_bytes=gpu * ADAPTER_BYTES,
                adapter_host_bytes=host * ADAPTER_BYTES,
                **settings,
            )

    def ref(self, name: str, rank: int = 2) -> AdapterRef:
        if name not in self._refs:
            self._refs[name] = self.shelf.make(name, {(0, 0): rank}, shape=SHAPE)
        return self._refs[name]

    def submit(self, name: str, tokens: int = 8) -> str:
        """Submit a request for an adapter, or for a composition, such as "a+b"."""
        request = f"{name} {len(self._open) + self.ended.total()} {self._steps}"
        sampling = SamplingParams(tokens, temperature=0.0, ignore_eos=True)
        refs = [self.ref(each) for each in name.split("+")]
        adapter = refs[0] if len(refs) == 1 else Composition(tuple(refs), (1.0,) * len(refs))
        self.engine.submit(Request(request, ((7, 8, 9),), sampling, adapter=adapter))
        self._open[request] = name
        return request

    def step(self) -> None:
        # One begins when another has not ended yet, so that no lease is ever the last.
        for name in self.busy:
            running = sum(one == name for one in self._open.values())
            if running < AT_ONCE and self._steps % 2 == 0:
                self.submit(name)
        while self._loads.work:
            self._loads.work.pop(0)()
        for output in self.engine.step():
            assert not isinstance(output, Failed), output
            if output.finish is not None:
                self.ended[self._open.pop(output.request_id)] += 1
        self._steps += 1
        self._now_s += STEP_S

    def passed_until(self, *names: str) -> int:
        """Number of busy adapters' requests that end before one request of each of these does."""
        before = sum(self.ended[name] for name in self.busy)
        for _ in range(150 * len(names)):
            if all(self.ended[name] for name in names):
                return sum(self.ended[name] for name in self.busy) - before
            self.step()
        pytest.fail(f"these still wait: {[name for name in names if not self.ended[name]]}")


@pytest.fixture
def rush(tmp_path):
    made = []

    def make(**sizes):
        made.append(Rush(tmp_path, **sizes))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()


def busy_with(rush: Rush, *names: str) -> Rush:
    """Run the busy adapters until they hold leases at all times."""
    rush.busy = names
    for _ in range(30):
        rush.step()
    return rush


@pytest.mark.parametrize("host", [100, 1])
def test_leased_adapters_give_way_to_one_that_waits(rush, host):
    one = busy_with(rush(gpu=2, host=host), "a", "b")
    one.submit("c")
    assert MAX_OVERTAKES // 2 < one.passed_until("c") < 2 * MAX_OVERTAKES


def test_a_full_batch_gives_way_as_well(rush):
    one = busy_with(rush(gpu=100, max_batch_adapters=2), "a", "b")
    one.submit("c")
    assert MAX_OVERTAKES // 2 < one.passed_until("c") < 2 * MAX_OVERTAKES


def test_ranks_that_leave_no_time_give_way_as_well(rush):
    one = busy_with(rush(gpu=100, inter_token_goal_s=1e-9), "a")
    one.submit("c")
    assert MAX_OVERTAKES // 2 < one.passed_until("c") < 2 * MAX_OVERTAKES


def test_an_adapter_that_needs_all_memory_gets_it(rush):
    one = busy_with(rush(gpu=2), "a", "b")
    one.ref("large", rank=4)
    one.submit("large")
    assert one.passed_until("large") < 2 * MAX_OVERTAKES


def test_pinned_adapters_cannot_bypass_a_waiting_one(rush):
    one = rush(gpu=3)
    one.engine.pin(one.ref("p"), Residency.GPU)
    while one.engine.residency(one.ref("p")) is not Residency.GPU:
        one.step()
    busy_with(one, "p", "a", "b")
    one.submit("c")
    assert one.passed_until("c") < 2 * MAX_OVERTAKES
    assert one.engine.residency(one.ref("p")) is Residency.GPU


@pytest.mark.parametrize("host", [100, 1])
def test_many_waiting_adapters_are_served_one_after_another(rush, host):
    one = busy_with(rush(gpu=2, host=host), "a", "b")
    names = [f"w{n}" for n in range(4)]
    for name in names:
        one.submit(name)
    assert one.passed_until(*names) < len(names) * 2 * MAX_OVERTAKES


@pytest.mark.parametrize("host", [100, 1])
def test_newcomers_with_other_adapters_do_not_starve_a_waiting_one(rush, host):
    one = busy_with(rush(gpu=2, host=host), "a", "b")
    one.submit("c")
    newcomers = 0
    while not one.ended["c"]:
        newcomers += 1
        assert newcomers < 2 * MAX_OVERTAKES, "c starves"
        one.submit(f"n{newcomers}", tokens=4)
        for _ in range(3):
            one.step()


@pytest.mark.parametrize("host", [100, 1])
def test_leased_adapters_give_way_to_a_composition(rush, host):
    one = busy_with(rush(gpu=2, host=host), "a", "b")
    one.submit("c+d")
    assert MAX_OVERTAKES // 2 < one.passed_until("c+d") < 3 * MAX_OVERTAKES


@pytest.mark.parametrize("host", [100, 1])
@pytest.mark.parametrize("names", [("a+b", "c+d"), ("a+b", "b+c", "c+a"), ("a+b+c", "d+e+f")])
def test_compositions_that_need_each_others_memory_are_served_one_after_another(rush, names, host):
    one = rush(gpu=len(names[0].split("+")), host=host)
    for name in names:
        one.submit(name)
    one.passed_until(*names)


def test_busy_compositions_give_way_to_one_another(rush):
    one = busy_with(rush(gpu=3), "a+b", "b+c")
    one.submit("d+e")
    assert one.passed_until("d+e") < 3 * MAX_OVERTAKES
