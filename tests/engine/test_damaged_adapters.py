"""Weights that change in memory while requests use them: those requests fail, later ones are right.

The tokens of the model (hash_model) depend on the first number of the adapter's weights, which the
model reads from the KV pages.
"""

import pytest
import torch

from lorikeet_engine.adapter import Adapter, AdapterRef, Composition, Residency
from lorikeet_engine.engine import Engine
from lorikeet_engine.errors import AdapterDamaged
from lorikeet_engine.request import Request, SamplingParams
from lorikeet_engine.residency import image_checks
from tests.engine import hash_model
from tests.engine.blobs import Shelf
from tests.engine.engine_driver import Answers
from tests.engine.residency.tiers_driver import finish_sums

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = tuple(range(3, 43))
SHORT = SamplingParams(8, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(300, temperature=0.0, ignore_eos=True)


class Served(Answers):
    """Engine with a few adapters, and the expected tokens of each."""

    def __init__(self, folder, **settings):
        self.shelf = Shelf(folder / "blobs")
        shape = hash_model.SHAPE
        self.refs = {n: self.shelf.make(n, {(0, 0): 2}, shape=shape) for n in ("good", "other")}
        sizes = {"kv_pages": 3000, "max_running": 4, "max_batch_tokens": 64}
        engine, _ = hash_model.build(folder, self.shelf, **{**sizes, **settings})
        super().__init__(engine)

    def ask(self, request_id: str, sampling: SamplingParams, adapter: str | None = "good") -> None:
        ref: Adapter | None = self.refs[adapter] if adapter and adapter != "both" else None
        if adapter == "both":
            ref = Composition((*self.refs.values(),), (1.0, 1.0))
        self.submit(Request(request_id, (PROMPT,), sampling, adapter=ref))

    def expected(self, sampling: SamplingParams, adapter: str | None = "good") -> list[int]:
        deltas = self.shelf._tensors[self.refs[adapter].digest] if adapter else None
        mark = float(deltas[0, 0][0][0, 0]) if deltas else 0.0
        return hash_model.predict(PROMPT, sampling, 0, 4096, mark)[0]

    def step(self) -> None:
        finish_sums(self.engine._tiers)
        super().step()

    def begun(self, *request_ids: str) -> None:
        self.until(lambda: all(self.tokens.get((name, 0)) for name in request_ids))

    def steps_until_failed(self, request_id: str) -> int:
        steps = 0
        while request_id not in self.errors:
            steps += 1
            assert steps < 10_000
            self.step()
        return steps


def damage(engine: Engine, ref: AdapterRef) -> None:
    """Change the first number of an adapter's weights on the GPU."""
    (adapter,) = (one for one in engine._tiers._gpu.snapshot() if one.ref == ref)
    weights = engine._tiers.weights
    at = int(weights.table[adapter.slot, 0, 0, 0])
    weights.arena[at : at + 1].view(torch.uint8)[3] ^= 0x40


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr(image_checks, "EVERY_STEPS", 16)


@pytest.fixture(params=[True, False], ids=["overlapped", "read_at_once"])
def make_served(tmp_path, request):
    made = []

    def make(**settings):
        made.append(Served(tmp_path, overlap=request.param, **settings))
        return made[-1]

    yield make
    for served in made:
        served.engine.close()


def test_requests_on_a_damaged_adapter_fail_within_the_stated_steps(make_served, caplog):
    served = make_served()
    for name, adapter in (("spoilt", "good"), ("kin", "other"), ("base", None)):
        served.ask(name, LONG, adapter)
    served.begun("spoilt", "kin", "base")
    damage(served.engine, served.refs["good"])
    assert served.steps_until_failed("spoilt") <= 2 * 2 * image_checks.EVERY_STEPS
    error = served.errors["spoilt"]
    assert isinstance(error, AdapterDamaged)
    assert "acme/good@1" in error.message
    assert error.retry_after_s == 1.0
    assert "adapter_damaged" in caplog.text
    served.ask("again", SHORT)
    served.all()
    assert list(served.errors) == ["spoilt"]
    assert served.of("kin") == served.expected(LONG, "other")
    assert served.of("base") == served.expected(LONG, None)
    assert served.of("again") == served.expected(SHORT)
    assert served.engine.status().tiers[Residency.GPU].checksum_failures == 1


def test_requests_fail_that_compose_a_damaged_adapter_with_another(make_served):
    served = make_served()
    served.ask("spoilt", LONG, "both")
    served.ask("kin", LONG, "other")
    served.begun("spoilt", "kin")
    damage(served.engine, served.refs["good"])
    served.steps_until_failed("spoilt")
    assert isinstance(served.errors["spoilt"], AdapterDamaged)
    cached = served.engine.status().cached_tokens
    served.ask("again", SHORT, "both")
    served.all()
    assert list(served.errors) == ["spoilt"]
    assert served.engine.status().cached_tokens == cached, "its pages have left the prefix cache"
    served.ask("warm", SHORT, "both")
    served.all()
    assert served.engine.status().cached_tokens - cached == len(PROMPT) - hash_model.PAGE


def test_pages_computed_with_a_damaged_adapter_leave_the_prefix_cache(make_served, monkeypatch):
    served = make_served()
    with monkeypatch.context() as patch:
        patch.setattr(image_checks, "EVERY_STEPS", 1 << 60)
        served.ask("before", SHORT, "other")
        served.ask("warm", SamplingParams(1, temperature=0.0))
        served.all()
        served.engine._cache.forget_adapter(served.refs["good"].digest)
        damage(served.engine, served.refs["good"])
        served.ask("wrong", SHORT)
        served.all()
        assert served.of("wrong") != served.expected(SHORT)
    found = served.engine.status
    served.ask("beside", LONG, "other")
    served.until(lambda: found().tiers[Residency.GPU].checksum_failures)
    cached = found().cached_tokens
    served.ask("after", SHORT)
    served.ask("kin", SHORT, "other")
    served.until(lambda: ("kin", 0) in served.finish and ("after", 0) in served.finish)
    assert served.of("after") == served.expected(SHORT)
    assert found().cached_tokens - cached == len(PROMPT) - hash_model.PAGE, "another's is kept"


def test_a_request_that_only_waited_gets_the_adapter_loaded_again(make_served):
    served = make_served(max_running=1, max_batch_tokens=64)
    served.ask("spoilt", LONG)
    served.ask("waiting", SHORT)
    served.begun("spoilt")
    damage(served.engine, served.refs["good"])
    served.all()
    assert list(served.errors) == ["spoilt"]
    assert served.of("waiting") == served.expected(SHORT)


def test_a_waiting_request_gives_its_lease_of_a_damaged_adapter_back(make_served):
    """Let the request wait for KV pages, as the first request holds too many of them."""
    served = make_served(kv_pages=1030, max_running=2)
    for name, length, sampling in (("spoilt", 200, LONG), ("waiting", 4000, SHORT)):
        prompt = tuple((i + length) % 60 + 3 for i in range(length))
        served.submit(Request(name, (prompt,), sampling, adapter=served.refs["good"]))
    served.begun("spoilt")
    scheduler = served.engine._scheduler
    served.until(lambda: any(s.lease for s in scheduler.waiting))
    damage(served.engine, served.refs["good"])
    served.until(lambda: "spoilt" in served.errors)
    assert not any(s.lease for s in scheduler.waiting)
    served.all()
    assert list(served.errors) == ["spoilt"]
    assert len(served.of("waiting")) == 8


@pytest.mark.parametrize("prefetched", [False, True])
def test_an_adapter_damaged_on_the_host_is_loaded_from_the_disk(make_served, prefetched):
    served = make_served()
    ref, tiers = served.refs["good"], served.engine._tiers
    served.engine.prefetch(ref, Residency.HOST)
    served.until(lambda: tiers.residency(ref) is Residency.HOST)
    image = tiers._host.image(ref.digest)
    assert image is not None
    image.elements.view(torch.uint8)[3] ^= 0x40
    if prefetched:
        served.engine.prefetch(ref, Residency.GPU)
        served.step()
    served.ask("first", SHORT)
    served.all()
    assert served.of("first") == served.expected(SHORT)
    assert served.errors == {}
    assert served.engine.status().tiers[Residency.HOST].checksum_failures == 1
