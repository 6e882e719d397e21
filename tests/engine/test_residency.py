"""Adapters on their way: remote → disk → host → GPU, and what must never happen on it."""

import errno
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.adapter_format import AdapterLimits
from lorikeet_engine.errors import AdapterLoadFailed, AdapterTooLarge
from lorikeet_engine.residency import loading, pins, residents
from lorikeet_engine.residency.image_file import ImageFile
from lorikeet_engine.residency.residents import Lease
from lorikeet_engine.residency.tiers import Tiers
from tests.engine.blobs import SHAPE, Ranks, Shelf, elements, everywhere, until

LIMITS = AdapterLimits(max_rank=16, max_bytes=1 << 20)
ONE = everywhere(4)
SIZE = elements(ONE)  # of an adapter of rank 4, elements


class Bench:
    """Tiers of a few adapters' size, stepped by hand as an engine would."""

    def __init__(
        self,
        shelf: Shelf,
        folder: Path,
        gpu: float,
        host: float,
        slots: int = 8,
        limits: AdapterLimits = LIMITS,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.shelf, self.folder = shelf, folder
        self.woken = threading.Event()
        self.tiers = Tiers(
            SHAPE,
            limits,
            shelf,
            device=torch.device("cpu"),
            dtype=dtype,
            gpu_bytes=int(gpu * SIZE) * dtype.itemsize,
            host_bytes=int(host * SIZE) * dtype.itemsize,
            disk_bytes=1 << 30,
            cache_dir=folder,
            max_slots=slots,
            wake=self.woken.set,
        )

    def until(self, holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
        def step() -> bool:
            self.tiers.advance()
            return holds()

        until(step, self.woken, timeout_s)

    def bring(self, *refs: AdapterRef, to: Residency = Residency.GPU) -> None:
        def there() -> bool:
            for ref in refs:  # every time, as an engine does: it may have been evicted again
                self.tiers.want(ref)
            return all(self.tiers.residency(ref) >= to for ref in refs)

        self.until(there)

    def lease(self, ref: AdapterRef) -> Lease:
        self.bring(ref)
        lease = self.tiers.lease(ref)
        assert lease is not None
        self.shelf.check(ref, self.tiers.weights, lease.slot)
        return lease

    def failure(self, ref: AdapterRef) -> Exception:
        self.tiers.want(ref)
        caught = []

        def failed() -> bool:
            try:
                assert self.tiers.lease(ref) is None
            except (AdapterLoadFailed, AdapterTooLarge) as error:
                caught.append(error)
            return bool(caught)

        self.until(failed)
        return caught[0]

    def image(self, ref: AdapterRef) -> Path:
        """The image's file, once it is there."""
        end_s = time.monotonic() + 10.0
        while not self.tiers._disk.has_image(ref.digest):
            assert time.monotonic() < end_s, f"nobody wrote the image of {ref}"
            time.sleep(0.001)
        return self.folder / self.tiers._disk.image_name(ref.digest)

    def report(self) -> dict[str, tuple[Residency, int, bool]]:
        return {r.ref.name: (r.residency, r.leases, r.pinned) for r in self.tiers.report()}


@pytest.fixture
def shelf(tmp_path) -> Shelf:
    return Shelf(tmp_path / "remote")


@pytest.fixture
def bench(shelf, tmp_path) -> Iterator[Callable[..., Bench]]:
    made = []

    def make(gpu: float = 4, host: float = 8, slots: int = 8, **others: Any) -> Bench:
        made.append(Bench(shelf, tmp_path / "cache", gpu, host, slots, **others))
        return made[-1]

    yield make
    for gate in shelf.gates.values():
        gate.set()
    for one in made:
        one.tiers.close()


def make(shelf: Shelf, names: str, ranks: Ranks = ONE) -> list[AdapterRef]:
    return [shelf.make(name, ranks) for name in names]


# The way to the GPU.


def test_an_adapter_moves_up_tier_by_tier_and_arrives_whole(shelf, bench, tmp_path):
    (a,) = make(shelf, "a")
    b = bench()
    assert b.tiers.residency(a) is Residency.REMOTE
    assert b.tiers.lease(a) is None
    b.tiers.want(a)
    until(lambda: b.tiers.residency(a) is Residency.HOST, b.woken)
    assert b.tiers.lease(a) is None
    assert (tmp_path / "cache" / a.digest).read_bytes() == shelf.blob("a").read_bytes()
    b.tiers.advance()
    assert b.tiers.residency(a) is Residency.GPU
    with b.lease(a) as lease:
        assert lease.rank == 4
        assert b.report() == {"a": (Residency.GPU, 1, False)}
        assert b.tiers.report()[0].gpu_bytes == b.tiers.arena_bytes_used == SIZE * 4
    assert b.report() == {"a": (Residency.GPU, 0, False)}
    assert b.tiers.arena_bytes_total == 4 * SIZE * 4


def test_the_weights_are_the_same_tensors_for_life(shelf, bench):
    b = bench(gpu=2)
    arena, table = b.tiers.weights.arena, b.tiers.weights.table
    for ref in make(shelf, "abcdef"):
        b.lease(ref).release()
    assert b.tiers.weights.arena is arena
    assert b.tiers.weights.table is table


def test_a_second_engine_finds_the_blob_on_disk(shelf, bench):
    (a,) = make(shelf, "a")
    bench().bring(a)
    other = bench()
    assert other.tiers.residency(a) is Residency.DISK
    other.lease(a).release()
    assert shelf.fetched == ["a"]


def test_a_load_in_flight_is_not_begun_again(shelf, bench):
    (a,) = make(shelf, "a")
    b = bench()
    shelf.gates["a"] = threading.Event()
    for _ in range(20):
        b.tiers.want(a)
        b.tiers.pin(a)
        b.tiers.advance()
    shelf.gates["a"].set()
    b.bring(a)
    assert shelf.fetched == ["a"]


def test_a_release_counts_once(shelf, bench):
    (a,) = make(shelf, "a")
    b = bench()
    one, two = b.lease(a), b.lease(a)
    assert one.slot == two.slot
    one.release()
    one.release()
    assert b.report()["a"][1] == 1


def test_two_versions_of_one_adapter_live_side_by_side(shelf, bench):
    old, other = make(shelf, "ab")
    new = AdapterRef(old.tenant, old.name, 2, other.digest)
    b = bench()
    first, second = b.lease(old), b.lease(new)
    assert first.slot != second.slot
    shelf.check(old, b.tiers.weights, first.slot)


# Slow things.


def test_a_source_that_hangs_stops_only_its_own_adapters(shelf, bench):
    slow, warm, quick = make(shelf, "ABCDEFGHIJ"), make(shelf, "ab"), make(shelf, "cd")
    b = bench(gpu=12)
    b.bring(*warm)
    b = bench(gpu=12)  # has them on disk
    for ref in slow[:6]:  # two download threads are left
        shelf.gates[ref.name] = threading.Event()
    longest_s = 0.0
    for ref in (*slow[:6], *warm, *quick):
        b.tiers.want(ref)
    leased: set[str] = set()

    def all_leased() -> bool:
        nonlocal longest_s
        begin_s = time.monotonic()
        b.tiers.advance()
        b.tiers.report()
        for ref in (*slow, *warm, *quick):
            b.tiers.want(ref)
            b.tiers.residency(ref)
            if b.tiers.lease(ref):
                leased.add(ref.name)
        longest_s = max(longest_s, time.monotonic() - begin_s)
        return leased >= {"a", "b", "c", "d"}

    until(all_leased, b.woken)
    assert not leased & {ref.name for ref in slow[:6]}
    # The source hangs for ever; a step that waited for it would not come back in ten times this.
    assert longest_s < 1.0


def test_with_every_download_thread_stuck_adapters_on_disk_still_load(shelf, bench):
    slow, warm = make(shelf, "ABCDEFGHIJKLMNOP"), make(shelf, "a")
    bench().bring(*warm)
    b = bench()
    for ref in slow:
        shelf.gates[ref.name] = threading.Event()
        b.tiers.want(ref)
    b.lease(warm[0]).release()


def test_pins_that_hang_leave_threads_to_requests(shelf, bench):
    slow, quick = make(shelf, "ABCDEFGHIJKLMNOP"), make(shelf, "a")
    b = bench()
    for ref in slow:
        shelf.gates[ref.name] = threading.Event()
        b.tiers.pin(ref)
    b.tiers.advance()
    b.lease(quick[0]).release()


def test_close_does_not_wait_for_a_source_that_hangs(shelf, bench):
    (a,) = make(shelf, "a")
    b = bench()
    shelf.gates["a"] = threading.Event()
    b.tiers.want(a)
    begin_s = time.monotonic()
    b.tiers.close()
    assert time.monotonic() - begin_s < 8.0


# Failures.


def test_a_damaged_download_fails_its_adapter_only_and_leaves_nothing(shelf, bench, tmp_path):
    bad, good = make(shelf, "ab")
    b = bench()
    shelf.spoil.add("a")
    b.tiers.want(good)
    error = b.failure(bad)
    assert isinstance(error, AdapterLoadFailed)
    assert "damaged" in str(error)
    assert error.adapter == "acme/a@1"
    b.lease(good).release()
    image = b.image(good)
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {good.digest, image.name}
    assert b.tiers.arena_bytes_used == SIZE * 4
    assert set(b.report()) == {"b"}


def test_a_failure_is_told_once_and_the_next_request_tries_again(shelf, bench):
    (a,) = make(shelf, "a")
    b = bench()
    shelf.errors["a"] = ConnectionError("the bucket does not answer")
    assert "acme/a@1: its weights could not be brought" in str(b.failure(a))
    assert b.tiers.lease(a) is None
    del shelf.errors["a"]
    b.lease(a).release()
    assert shelf.fetched == ["a", "a"]


def test_a_failure_tells_its_kind_and_only_the_log_its_insides(shelf, bench, caplog):
    (a,) = make(shelf, "a")
    shelf.errors["a"] = ConnectionError("no object in /srv/catalog")
    error = bench().failure(a)
    assert "ConnectionError" in error.message
    assert "/srv/catalog" not in str(error)
    assert "/srv/catalog" in caplog.text


def test_an_untold_failure_is_not_repeated_at_every_want(shelf, bench):
    (a,) = make(shelf, "a")
    b = bench()
    shelf.errors["a"] = ConnectionError("no")
    b.tiers.want(a)
    b.woken.wait(5)
    b.woken.clear()
    for _ in range(3):
        b.tiers.advance()
        b.tiers.want(a)
    assert not b.woken.wait(0.2)
    assert shelf.fetched == ["a"]


def test_an_adapter_of_another_base_model_fails_by_name(shelf, bench):
    ref = shelf.make("a", {(0, 0): 4}, shape=replace(SHAPE, hidden=24))
    error = bench().failure(ref)
    assert isinstance(error, AdapterLoadFailed)
    assert error.field == "model.layers.0.self_attn.q_proj"


def test_what_is_not_a_digest_never_becomes_a_path(shelf, bench, tmp_path):
    error = bench().failure(AdapterRef("acme", "a", 1, "../" * 3 + "x" * 55))
    assert "no digest" in str(error)
    assert shelf.fetched == []


@pytest.mark.parametrize("ranks", [everywhere(17), everywhere(16)])
def test_an_adapter_over_a_limit_or_the_arena_is_too_large(ranks, shelf, bench):
    ref, small = shelf.make("big", ranks), shelf.make("a", ONE)
    b = bench(gpu=3)  # room for rank 12
    assert isinstance(b.failure(ref), AdapterTooLarge)
    b.lease(small).release()


# Room on the GPU.


def test_a_leased_adapter_is_never_evicted_and_others_wait_on_the_host(shelf, bench):
    a, b_, c = make(shelf, "abc")
    b = bench(gpu=2)
    one, two = b.lease(a), b.lease(b_)
    b.bring(c, to=Residency.HOST)
    for _ in range(5):
        b.tiers.advance()
        assert b.tiers.lease(c) is None
    shelf.check(a, b.tiers.weights, one.slot)
    shelf.check(b_, b.tiers.weights, two.slot)
    one.release()
    b.tiers.advance()
    assert b.tiers.lease(c) is not None
    assert b.tiers.residency(a) is Residency.HOST
    shelf.check(b_, b.tiers.weights, two.slot)


def test_slots_run_out_like_memory(shelf, bench):
    refs = make(shelf, "abcd")
    b = bench(gpu=4, slots=2)
    for ref in refs:
        b.lease(ref).release()
    assert [b.tiers.residency(ref) for ref in refs].count(Residency.GPU) == 2


def test_a_small_adapter_passes_a_large_one_that_does_not_fit(shelf, bench):
    a, b_ = make(shelf, "ab")
    large, small = shelf.make("large", everywhere(12)), shelf.make("small", everywhere(2))
    b = bench(gpu=3)
    leases = [b.lease(a), b.lease(b_)]
    b.bring(large, to=Residency.HOST)
    b.lease(small).release()
    assert b.tiers.residency(large) is Residency.HOST
    for lease in leases:
        lease.release()
    b.lease(large).release()


def test_an_admitted_adapter_stays_until_it_was_leased_once(shelf, bench, monkeypatch):
    monkeypatch.setattr(residents, "GUARD_S", 60.0)
    a, b_ = make(shelf, "ab")
    b = bench(gpu=1)
    b.bring(a)
    b.bring(b_, to=Residency.HOST)
    for _ in range(5):
        b.tiers.advance()
        assert b.tiers.residency(a) is Residency.GPU
    lease = b.tiers.lease(a)
    b.tiers.advance()
    assert b.tiers.residency(b_) is Residency.HOST
    lease.release()
    b.tiers.advance()
    assert b.tiers.residency(b_) is Residency.GPU


def test_the_adapter_that_is_used_least_gives_way(shelf, bench):
    often, once, new = make(shelf, "abc")
    b = bench(gpu=2)
    for ref in (often, often, once, new):
        b.lease(ref).release()
    assert b.tiers.residency(often) is Residency.GPU
    assert b.tiers.residency(once) is Residency.HOST


def test_what_comes_back_is_as_often_used_as_before(shelf, bench):
    a, b_, c, d = make(shelf, "abcd")
    b = bench(gpu=2)
    for ref in (a, a, a, b_, b_, b_, c):
        b.lease(ref).release()
    assert b.tiers.residency(a) is Residency.HOST
    for ref in (a, d):
        b.lease(ref).release()
    assert b.tiers.residency(a) is Residency.GPU
    assert b.tiers.residency(b_) is Residency.HOST


def test_an_adapter_that_nobody_leases_gives_its_place_up_after_a_while(shelf, bench, monkeypatch):
    monkeypatch.setattr(residents, "GUARD_S", 0.2)
    a, b_ = make(shelf, "ab")
    b = bench(gpu=1)
    b.bring(a)
    b.lease(b_).release()  # nothing but the passing of time wakes this engine
    assert b.tiers.residency(a) is Residency.HOST


def test_wanting_it_again_does_not_keep_its_place_longer(shelf, bench, monkeypatch):
    monkeypatch.setattr(residents, "GUARD_S", 0.1)
    a, b_ = make(shelf, "ab")
    b = bench(gpu=1)
    b.bring(a)
    b.tiers.want(b_)

    def other_arrived() -> bool:
        b.tiers.want(a)
        return b.tiers.residency(b_) is Residency.GPU

    b.until(other_arrived)


def test_adapters_waiting_for_one_place_all_get_it_in_turn(shelf, bench):
    refs = make(shelf, "abcdefgh")
    b = bench(gpu=1, host=3)
    waiting = list(refs)

    def step() -> bool:
        for ref in waiting:
            b.tiers.want(ref)
        for ref in list(waiting):
            lease = b.tiers.lease(ref)
            if lease is not None:
                shelf.check(ref, b.tiers.weights, lease.slot)
                lease.release()
                waiting.remove(ref)
                b.woken.set()
        return not waiting

    b.until(step)


# Room on the host.


def test_images_wait_on_disk_while_the_host_is_full_of_waiting_ones(shelf, bench):
    refs = make(shelf, "abcde")
    b = bench(gpu=1, host=2)
    lease = b.lease(refs[0])
    for ref in refs[1:]:
        b.tiers.want(ref)
    waits_on = [Residency.HOST] * 2 + [Residency.DISK] * 2
    b.until(lambda: sorted(map(b.tiers.residency, refs[1:]), reverse=True) == waits_on)
    lease.release()
    for ref in sorted(refs[1:], key=b.tiers.residency, reverse=True):
        b.lease(ref).release()


def test_what_left_the_gpu_and_the_host_comes_back_from_disk(shelf, bench):
    refs = make(shelf, "abcdef")
    b = bench(gpu=1, host=1)
    for ref in refs * 2:
        b.lease(ref).release()
    assert b.tiers.residency(refs[0]) is Residency.DISK
    assert shelf.fetched == list("abcdef")


# Pins.


@pytest.mark.parametrize("tier", [Residency.DISK, Residency.HOST, Residency.GPU])
def test_a_pin_preloads_and_holds_under_pressure_until_unpinned(tier, shelf, bench):
    pinned, *others = make(shelf, "pabcdef")
    b = bench(gpu=2, host=2)
    b.tiers.pin(pinned, tier)
    b.until(lambda: b.tiers.residency(pinned) is tier)
    assert b.report()["p"] == (tier, 0, True)
    for ref in others * 2:
        b.lease(ref).release()
        assert b.tiers.residency(pinned) >= tier
    b.tiers.unpin(pinned.digest)
    for ref in others:
        b.lease(ref).release()
    assert b.tiers.residency(pinned) is Residency.DISK
    assert not b.report()["p"][2]


def test_a_pinned_adapter_can_be_leased_like_any_other(shelf, bench):
    pinned, *others = make(shelf, "pab")
    b = bench(gpu=2)
    b.tiers.pin(pinned)
    b.until(lambda: b.tiers.residency(pinned) is Residency.GPU)
    lease = b.lease(pinned)
    for ref in others:
        b.lease(ref).release()
    shelf.check(pinned, b.tiers.weights, lease.slot)


def test_pins_never_fill_the_arena_against_requests(shelf, bench):
    refs, large = make(shelf, "abcd"), shelf.make("large", everywhere(10))
    b = bench(gpu=4)
    for ref in refs:
        b.tiers.pin(ref)
        b.until(lambda ref=ref: b.tiers.residency(ref) is Residency.GPU)
    b.lease(large).release()
    kept = [ref for ref in refs if b.tiers.residency(ref) is Residency.GPU]
    assert kept == refs[: len(kept)]
    assert len(kept) == 1  # the others' place is needed: 10 + 4 + 4 > 16
    assert all(pinned for _, _, pinned in (b.report()[ref.name] for ref in refs))


def test_pins_leave_one_slot_to_requests(shelf, bench):
    *pinned, ref = make(shelf, "abc")
    b = bench(gpu=4, slots=2)
    for one in pinned:
        b.tiers.pin(one)
    b.until(lambda: any(b.tiers.residency(one) is Residency.GPU for one in pinned))
    b.lease(ref).release()


def test_a_pin_on_the_host_gives_way_to_a_request_that_needs_the_room(shelf, bench):
    a, b_, large = *make(shelf, "ab"), shelf.make("large", everywhere(12))
    b = bench(gpu=4, host=4)
    for ref in (a, b_):
        b.tiers.pin(ref, Residency.HOST)
        b.until(lambda ref=ref: b.tiers.residency(ref) is Residency.HOST)
    b.lease(large).release()
    assert b.tiers.residency(a) is Residency.HOST


def test_a_pin_whose_load_fails_is_tried_again(shelf, bench, monkeypatch):
    monkeypatch.setattr(pins, "RETRY_S", 0.1)
    (a,) = make(shelf, "a")
    b = bench()
    shelf.errors["a"] = ConnectionError("no")
    b.tiers.pin(a)
    b.until(lambda: len(shelf.fetched) >= 2)
    del shelf.errors["a"]
    b.until(lambda: b.tiers.residency(a) is Residency.GPU)
    assert b.tiers.lease(a) is not None


def test_a_failure_that_a_pin_has_overcome_is_forgotten(shelf, bench, monkeypatch):
    monkeypatch.setattr(pins, "RETRY_S", 0.1)
    (a,) = make(shelf, "a")
    b = bench()
    shelf.errors["a"] = ConnectionError("no")
    b.tiers.want(a)  # by a request that leaves before it is told
    b.until(lambda: not b.tiers._wanted)
    del shelf.errors["a"]
    b.tiers.pin(a)
    b.until(lambda: b.tiers.residency(a) is Residency.GPU)
    assert b.tiers.lease(a) is not None


def test_a_pin_can_move_to_another_tier(shelf, bench):
    pinned, *others = make(shelf, "pabc")
    b = bench(gpu=1, host=2)
    b.tiers.pin(pinned, Residency.DISK)
    b.until(lambda: b.tiers.residency(pinned) is Residency.DISK)
    b.tiers.pin(pinned, Residency.HOST)
    b.until(lambda: b.tiers.residency(pinned) is Residency.HOST)
    for ref in others:
        b.lease(ref).release()
        assert b.tiers.residency(pinned) is Residency.HOST


# Images on the disk.


def test_the_second_load_reads_the_image_and_needs_no_blob_and_no_source(shelf, bench, caplog):
    (a,) = make(shelf, "a")
    b = bench()
    b.bring(a)
    b.image(a)
    (b.folder / a.digest).unlink()
    other = bench()
    assert other.tiers.residency(a) is Residency.DISK
    other.lease(a).release()
    assert shelf.fetched == ["a"]
    assert not (b.folder / a.digest).exists()
    assert "image_damaged" not in caplog.text


@pytest.mark.parametrize("damage", ["cut off", "random", "of another", "empty"])
@pytest.mark.parametrize("blob", [True, False])
def test_a_damaged_image_is_made_anew(damage, blob, shelf, bench, caplog):
    a, c = make(shelf, "ac")
    b = bench()
    b.bring(a, c)
    image, others, good = b.image(a), b.image(c).read_bytes(), b.image(a).read_bytes()
    bad = {"cut off": good[:-4], "random": b"\xa5" * len(good), "of another": others, "empty": b""}
    image.write_bytes(bad[damage])
    if not blob:
        (b.folder / a.digest).unlink()
    other = bench()
    other.lease(a).release()
    assert "image_damaged" in caplog.text
    assert other.image(a).read_bytes() == good
    assert sorted(shelf.fetched) == (["a", "c"] if blob else ["a", "a", "c"])


def test_an_image_that_the_disk_cannot_read_is_made_anew(shelf, bench, monkeypatch, caplog):
    (a,) = make(shelf, "a")
    b = bench()
    b.bring(a)
    good = b.image(a).read_bytes()
    other = bench()

    def unreadable(file: ImageFile, out: torch.Tensor) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(ImageFile, "read", unreadable)
    other.lease(a).release()
    assert "image_damaged" in caplog.text
    assert other.image(a).read_bytes() == good


def test_an_engine_of_another_dtype_packs_for_itself(shelf, bench):
    (a,) = make(shelf, "a")
    b, half = bench(), bench(dtype=torch.float16)
    b.bring(a)
    image = b.image(a)
    half.lease(a).release()
    assert half.image(a).name != image.name
    bench().lease(a).release()
    bench(dtype=torch.float16).lease(a).release()
    assert shelf.fetched == ["a"]


def test_an_image_from_before_the_limits_were_lowered_is_not_used(shelf, bench):
    (a,) = make(shelf, "a")
    b = bench()
    b.bring(a)
    b.image(a)
    strict = bench(limits=replace(LIMITS, max_rank=2))
    assert isinstance(strict.failure(a), AdapterTooLarge)


def test_an_adapter_lands_though_its_image_cannot_be_written(shelf, bench, monkeypatch, caplog):
    (a,) = make(shelf, "a")
    b = bench()
    tried = threading.Event()

    def full(path: Path, *image: object) -> None:
        path.write_bytes(b"half")
        tried.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(loading, "write_image", full)
    b.lease(a).release()
    assert tried.wait(10)
    b.tiers.close()
    assert "image_not_written" in caplog.text
    assert [path.name for path in b.folder.iterdir()] == [a.digest]


def test_who_waits_for_room_is_woken_when_an_image_was_written(shelf, bench, monkeypatch):
    a, c = make(shelf, "ac")
    b = bench(gpu=2, host=1)
    written, gate = threading.Event(), threading.Event()

    def slow(*image: object) -> None:
        written.set()
        gate.wait(10)

    monkeypatch.setattr(loading, "write_image", slow)
    b.bring(a)
    assert written.wait(10)
    b.bring(c, to=Residency.DISK)
    for _ in range(5):
        b.tiers.advance()
        assert b.tiers.residency(c) is Residency.DISK
    gate.set()
    b.bring(c)


def test_a_pin_to_disk_is_content_with_an_image(shelf, bench):
    (a,) = make(shelf, "a")
    b = bench()
    b.bring(a)
    b.image(a)
    (b.folder / a.digest).unlink()
    other = bench()
    other.tiers.pin(a, Residency.DISK)
    for _ in range(3):
        other.tiers.advance()
    assert other.report()["a"] == (Residency.DISK, 0, True)
    assert other.tiers._disk._pins
    assert shelf.fetched == ["a"]


# Anything at all.


STEPS = st.lists(
    st.tuples(st.sampled_from(["want", "want", "lease", "lease", "release", "pin", "unpin"]),
              st.integers(0, 9)),
    max_size=40,
)  # fmt: skip


@pytest.fixture(scope="module")
def stocked(tmp_path_factory) -> tuple[Shelf, list[AdapterRef]]:
    shelf = Shelf(tmp_path_factory.mktemp("stocked"))
    ranks = [everywhere(n % 5 + 1) for n in range(8)] + [{(1, 6): 9}, {(0, 0): 2, (1, 3): 16}]
    return shelf, [shelf.make(f"x{n}", one) for n, one in enumerate(ranks)]


@given(steps=STEPS, gpu=st.sampled_from([1.3, 2.0, 3.1]), host=st.sampled_from([1.3, 2.5]))
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_lease_always_sees_its_adapter_and_everybody_gets_one(
    steps, gpu, host, stocked, tmp_path_factory
):
    shelf, refs = stocked
    b = Bench(shelf, tmp_path_factory.getbasetemp() / "anything", gpu, host, slots=4)
    leases: list[tuple[AdapterRef, Lease]] = []
    patch = pytest.MonkeyPatch()
    patch.setattr(residents, "GUARD_S", 0.01)
    try:
        for action, number in steps:
            apply(b, action, refs[number], leases)
            b.tiers.advance()
            check_all(b, leases)
        for _, lease in leases:
            lease.release()
        for ref in refs:
            b.lease(ref).release()
        check_all(b, [])
    finally:
        patch.undo()
        b.tiers.close()


def apply(b: Bench, action: str, ref: AdapterRef, leases: list[tuple[AdapterRef, Lease]]) -> None:
    if action == "want":
        b.tiers.want(ref)
        b.woken.wait(0.002)
    elif action == "lease" and (lease := b.tiers.lease(ref)) is not None:
        leases.append((ref, lease))
    elif action == "release" and leases:
        leases.pop(0)[1].release()
    elif action == "pin":
        b.tiers.pin(ref, Residency(int(ref.digest[0], 16) % 3 + 1))
    elif action == "unpin":
        b.tiers.unpin(ref.digest)


def check_all(b: Bench, leases: list[tuple[AdapterRef, Lease]]) -> None:
    for ref, lease in leases:
        b.shelf.check(ref, b.tiers.weights, lease.slot)
        assert b.tiers.residency(ref) is Residency.GPU
    reports = b.tiers.report()
    assert sum(r.leases for r in reports) == len(leases)
    assert sum(r.gpu_bytes for r in reports) == b.tiers.arena_bytes_used
    assert b.tiers.arena_bytes_used <= b.tiers.arena_bytes_total
    rows = b.tiers.weights.table[..., 2].flatten(1).any(dim=1)
    assert rows.sum() == sum(r.residency is Residency.GPU for r in reports)
