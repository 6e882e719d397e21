"""Checks of images in memory: damage is found in time, and churn raises no false alarm."""

import functools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.errors import AdapterDamaged
from lorikeet_engine.residency import image_checks
from lorikeet_engine.residency.packed_image import PackedLayout
from tests.engine.blobs import everywhere
from tests.engine.residency.tiers_driver import TiersDriver, finish_sums, make

GPU, HOST = Residency.GPU, Residency.HOST


def on_gpu(b: TiersDriver, ref: AdapterRef) -> torch.Tensor:
    """The last piece of an adapter's image, as it lies in the GPU's arena."""
    (adapter,) = (one for one in b.tiers._gpu.snapshot() if one.ref == ref)
    image = b.tiers._pool.image(adapter.slot)
    assert image is not None
    return b.tiers.arena.blocks(image.pieces)[-1]


def on_host(b: TiersDriver, ref: AdapterRef) -> torch.Tensor:
    image = b.tiers._host.image(ref.digest)
    assert image is not None
    return image.elements


def flip(elements: torch.Tensor, at: int = 0) -> None:
    elements.view(torch.uint8)[at] ^= 1


def failures(b: TiersDriver, tier: Residency) -> int:
    return b.tiers.status()[tier].checksum_failures


def stage(b: TiersDriver, *refs: AdapterRef) -> None:
    """Load adapters to the host and no further."""
    for ref in refs:
        b.tiers.prefetch(ref, HOST)
        b.until(lambda: b.tiers.residency(ref) is HOST)  # noqa: B023


def steps_until(b: TiersDriver, holds: Callable[[], bool]) -> int:
    """Step as an engine that has work, and say how often."""
    steps = 0
    while not holds():
        steps += 1
        assert steps < 10_000
        finish_sums(b.tiers)
        b.tiers.advance()
    return steps


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_checks, "EVERY_STEPS", 32)


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin no check."""
    monkeypatch.setattr(image_checks, "EVERY_STEPS", 1 << 60)


@pytest.mark.parametrize("at", [0, 1001, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_changed_byte_on_the_gpu_is_found_in_time_and_the_adapter_reloaded(
    at, dtype, shelf, bench, caplog
):
    a, *others = make(shelf, "abc")
    b = bench(gpu=4, dtype=dtype)
    b.load(a, *others)
    flip(on_gpu(b, a), at)
    rounds = 2 * 3 * image_checks.EVERY_STEPS
    assert steps_until(b, lambda: failures(b, GPU) == 1) <= rounds
    assert list(b.tiers.take_damaged()) == [a.digest]
    (event,) = (r for r in caplog.records if r.message == "adapter_damaged")
    assert (event.adapter, event.tier) == (str(a), "gpu")
    b.until(lambda: b.tiers.residency(a) is GPU)
    b.lease(a).release()
    steps_until(b, lambda: b.tiers._checks._steps % rounds == 0)
    assert failures(b, GPU) == 1


def test_a_changed_byte_on_the_host_is_found_in_time_and_the_adapter_reloaded(shelf, bench, caplog):
    a, *others = make(shelf, "abc")
    b = bench()
    stage(b, a, *others)
    b.image(a)
    good = on_host(b, a).clone()
    flip(on_host(b, a), 77)
    rounds = 2 * 3 * image_checks.EVERY_STEPS
    assert steps_until(b, lambda: failures(b, HOST) == 1) <= rounds
    b.until(lambda: b.tiers.residency(a) is HOST)
    assert torch.equal(on_host(b, a), good)
    assert not b.tiers.take_damaged(), "nobody computed with it"
    assert shelf.fetched.count("a") == 1


def test_large_images_are_checked_in_slices_of_whole_layers(shelf, bench, monkeypatch):
    (a,) = make(shelf, "a")
    monkeypatch.setattr(image_checks, "_HOST_SLICE_BYTES", 1)
    b = bench()
    b.load(a)
    for at, count in ((0, 1), (-1, 2)):  # of the first layer, of the last one
        b.until(lambda: b.tiers.residency(a) is GPU)
        flip(on_gpu(b, a), at)
        rounds = 2 * 2 * image_checks.EVERY_STEPS
        assert steps_until(b, lambda: failures(b, GPU) == count) <= rounds  # noqa: B023


def test_a_damaged_adapter_cannot_be_leased_and_is_evicted_with_its_last_lease(shelf, bench):
    (a,) = make(shelf, "a")
    b = bench()
    one, two = b.lease(a), b.lease(a)
    flip(on_gpu(b, a))
    steps_until(b, lambda: failures(b, GPU) == 1)
    assert b.tiers.lease(a) is None
    assert b.tiers.residency(a) is HOST
    one.release()
    assert b.gpu.adapters == 1
    two.release()
    assert b.gpu.adapters == 0
    b.lease(a).release()


@pytest.mark.usefixtures("never")
@pytest.mark.parametrize("prefetched", [False, True])
def test_an_image_damaged_on_the_host_is_read_again_for_waiting_requests(
    prefetched, shelf, bench, caplog
):
    (a,) = make(shelf, "a")
    b = bench()
    stage(b, a)
    b.image(a)
    flip(on_host(b, a), -1)
    (b.tiers.prefetch if prefetched else b.tiers.request)(a)
    b.tiers.advance()
    assert "adapter_damaged" in caplog.text
    assert (b.gpu.adapters, failures(b, HOST), failures(b, GPU)) == (0, 1, 0)
    assert b.tiers.lease(a) is None, "it fails"
    b.lease(a).release()
    assert shelf.fetched.count("a") == 1


@pytest.mark.usefixtures("never")
def test_a_request_fails_if_its_adapter_is_damaged_twice_in_a_row(shelf, bench):
    (a,) = make(shelf, "a")
    b = bench()

    def staged() -> bool:
        # again: a load ends early while a damaged image of it is still being written to the disk
        b.tiers.prefetch(a, HOST)
        return b.tiers.residency(a) is HOST

    for _ in range(2):
        b.until(staged)
        flip(on_host(b, a))
        b.tiers.request(a)
        b.tiers.advance()
    with pytest.raises(AdapterDamaged, match=r"acme/a@1.*send the request again"):
        b.tiers.lease(a)
    b.lease(a).release()


@pytest.mark.usefixtures("never")
def test_a_waiting_adapter_whose_image_is_discarded_is_read_from_the_disk(shelf, bench):
    a, c = make(shelf, "ac")
    b = bench(gpu=1)
    lease = b.lease(c)
    b.load(a, to=HOST)
    b.tiers._checks.discard(a.digest, HOST)
    assert b.tiers.residency(a) is Residency.DISK
    b.until(lambda: b.tiers.residency(a) is HOST)
    lease.release()
    b.lease(a).release()


@pytest.mark.usefixtures("never")
def test_a_pinned_adapter_that_was_damaged_is_pinned_again(shelf, bench):
    (a,) = make(shelf, "a")
    b = bench()
    b.tiers.pin(a)
    b.until(lambda: b.tiers._gpu.is_pinned(a.digest))
    b.tiers._checks.discard(a.digest, GPU)
    b.until(lambda: b.tiers._gpu.is_pinned(a.digest))
    b.lease(a).release()


# Events between the begin and the end of a sum.


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Event for which sums begun from now on wait."""
    monkeypatch.setattr(image_checks, "EVERY_STEPS", 1)
    may_run, word_sum = threading.Event(), image_checks.word_sum

    def late(elements: torch.Tensor) -> torch.Tensor:
        may_run.wait(10)
        return word_sum(elements)

    monkeypatch.setattr(image_checks, "word_sum", late)
    yield may_run
    may_run.set()


def under_way(b: TiersDriver, tier: Residency) -> str | None:
    """The image whose sum is being computed."""
    checks = b.tiers._checks._under_way
    if checks is None or checks.totals.done() or tier not in checks.slices:
        return None
    return checks.slices[tier].image.digest


def evict(b: TiersDriver, ref: AdapterRef) -> None:
    b.tiers._gpu._evict(b.tiers._gpu._adapters[ref.digest])


def read_sums(b: TiersDriver, sums: threading.Event) -> None:
    """Wait until all pending sums are compared."""
    sums.set()
    assert b.tiers._checks._under_way is not None
    b.tiers._checks._under_way.totals.result(10)
    b.tiers.advance()


def test_evicting_an_image_during_its_check_is_no_alarm(shelf, bench, sums):
    a, c = make(shelf, "ac")
    b = bench(gpu=1, host=2)
    b.load(a)
    steps_until(b, lambda: under_way(b, GPU) == a.digest)
    at = on_gpu(b, a).data_ptr()
    b.lease(c).release()
    assert on_gpu(b, c).data_ptr() == at, "another image lies there now"
    read_sums(b, sums)
    assert (failures(b, GPU), failures(b, HOST)) == (0, 0)


def test_reloading_an_image_elsewhere_during_its_check_is_no_alarm(shelf, bench, sums):
    a, c = make(shelf, "ac")
    b = bench(gpu=2, host=3)
    b.load(a)
    steps_until(b, lambda: under_way(b, GPU) == a.digest)
    at = on_gpu(b, a).data_ptr()
    evict(b, a)
    for ref in (c, a):
        b.lease(ref).release()
    assert on_gpu(b, a).data_ptr() != at
    read_sums(b, sums)
    assert failures(b, GPU) == 0


def test_an_adapter_reloaded_into_another_slot_is_not_checked_in_its_old_one(
    shelf, bench, never, monkeypatch
):
    once = functools.cache(lambda: layout_of_ranks(*arguments))
    layout_of_ranks, arguments = PackedLayout.of_ranks, list[Any]()

    def shared(*args: Any) -> PackedLayout:
        arguments[:] = args
        return once()

    monkeypatch.setattr(PackedLayout, "of_ranks", shared)  # adapters of equal ranks may share one
    a, c, d = make(shelf, "acd")
    b = bench(gpu=3, host=4)
    for ref in (d, a, c):
        b.load(ref)
    slots = {ref: b.tiers._gpu.usable(ref.digest).slot for ref in (a, c)}
    images = image_checks.gpu_images(b.tiers._gpu, b.tiers._pool, b.tiers.weights.arena)
    assert next(images).digest == d.digest
    evict(b, a)
    evict(b, c)
    for ref in (a, c):
        b.lease(ref).release()
    assert {ref: b.tiers._gpu.usable(ref.digest).slot for ref in (c, a)} == {
        c: slots[a],
        a: slots[c],
    }
    assert not list(images), "their turn comes in the next round"


def test_moving_an_image_during_its_check_is_no_alarm(shelf, bench, sums, monkeypatch):
    small, a = shelf.make("small", everywhere(2)), shelf.make("a", everywhere(4))
    b = bench(gpu=2, host=3)
    with monkeypatch.context() as patch:
        patch.setattr(image_checks, "EVERY_STEPS", 1 << 60)
        b.load(small)
        b.load(a)
        evict(b, small)
    steps_until(b, lambda: under_way(b, GPU) == a.digest)
    at = on_gpu(b, a).data_ptr()
    b.tiers.arena.run(b.tiers._pool._compact(b.tiers._pool.elements // 2))
    assert on_gpu(b, a).data_ptr() != at
    b.tiers.weights.arena[-16:] = 1.0  # behind what moved
    read_sums(b, sums)
    assert failures(b, GPU) == 0


def test_evicting_an_image_on_the_host_during_its_check_is_no_alarm(shelf, bench, sums):
    a, c = make(shelf, "ac")
    b = bench(gpu=1, host=1)
    stage(b, a)
    b.image(a)
    steps_until(b, lambda: under_way(b, HOST) == a.digest)
    stage(b, c)
    assert b.tiers._host.image(a.digest) is None
    read_sums(b, sums)
    assert failures(b, HOST) == 0


# Churn.

LEAST_COMPARED_PER_S = 100


def churn(b: TiersDriver, refs: list[AdapterRef], seconds: float) -> int:
    """Load, lease, move and evict at random under checks; returns how many were compared.

    On a busy machine it takes up to a minute to reach the wanted number.
    """
    chance, begin_s, compared = random.Random(2), time.monotonic(), 0
    leases, checks = [], b.tiers._checks
    while (took_s := time.monotonic() - begin_s) < seconds or (
        compared <= LEAST_COMPARED_PER_S * seconds and took_s < seconds + 60
    ):
        for ref in chance.sample(refs, 3):
            b.tiers.request(ref)
        if (lease := b.tiers.lease(chance.choice(refs))) is not None:
            leases.append(lease)
        if len(leases) > 3:
            leases.pop(chance.randrange(4)).release()
        if b.tiers.weights.arena.is_cuda and chance.random() < 0.1:
            torch.cuda._sleep(chance.choice((100_000, 4_000_000)))  # steps are late
        compared += checks._under_way is not None and checks._under_way.totals.done()
        b.tiers.advance()
        time.sleep(chance.choice((0.0, 0.0, 0.0002, 0.002)))
    for lease in leases:
        lease.release()
    return compared


@pytest.mark.parametrize(
    ("device", "seconds"),
    [
        ("cpu", 2.0),
        pytest.param(
            "cpu",
            float(os.environ.get("CHURN_S", "3600")),
            marks=[pytest.mark.soak, pytest.mark.timeout(0)],
            id="soak",
        ),
        pytest.param(
            "cuda",
            float(os.environ.get("CHURN_S", "480")),
            marks=[
                pytest.mark.gpu,
                pytest.mark.timeout(0),
            ],
        ),
    ],
)
def test_churn_gives_no_false_alarm(device, seconds, shelf, bench, monkeypatch):
    monkeypatch.setattr(image_checks, "EVERY_STEPS", 1)
    monkeypatch.setattr("lorikeet_engine.residency.gpu.adapters.GUARD_S", 0.002)
    refs = [shelf.make(f"x{n}", everywhere(n % 5 + 1)) for n in range(16)]
    b = bench(gpu=3.3, host=5.3, slots=6, device=device)
    compared = churn(b, refs, seconds)
    assert compared > LEAST_COMPARED_PER_S * seconds
    assert all(tier.checksum_failures == 0 for tier in b.tiers.status().values())
    assert b.tiers._pool.moved_elements, "nothing moved"
    for ref in refs:
        b.lease(ref).release()
