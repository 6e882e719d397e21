"""Status of adapters on the GPU, as any thread may read it at any time."""

import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lorikeet_engine.adapter import Residency
from lorikeet_engine.residency.gpu.slots import PlacedImage
from lorikeet_engine.residency.packed_image import PackedLayout
from lorikeet_engine.telemetry.status import AdapterStatus
from tests.engine.blobs import SHAPE, elements, everywhere
from tests.engine.residency.test_slots import TOTAL, Pool, fill, pool_of, whole
from tests.engine.residency.tiers_driver import TiersDriver

ITEMSIZE = torch.float32.itemsize
Span = tuple[int, int]


def blocks(b: TiersDriver) -> dict[str, AdapterStatus]:
    return {each.name: each for each in b.tiers.adapters(Residency.GPU)}


def begin_of(b: TiersDriver, slot: int) -> int:
    """Offset in bytes of an image's first matrix, by the table."""
    rows = b.tiers.weights.table[slot].view(-1, 3)
    return int(rows[rows[:, 2] > 0, :2].min()) * ITEMSIZE


def disjoint(spans: Sequence[Span]) -> bool:
    return all(one + size <= two for (one, size), (two, _) in itertools.pairwise(sorted(spans)))


def test_the_status_places_each_adapter_where_the_table_finds_it(shelf, bench):
    wide, narrow = shelf.make("wide", everywhere(8)), shelf.make("narrow", {(0, 0): 2, (1, 6): 4})
    b = bench()
    with b.lease(wide) as one, b.lease(narrow) as two, b.lease(narrow):
        found = blocks(b)
        for ref, lease, leases in ((wide, one, 1), (narrow, two, 2)):
            block = found[ref.name]
            assert block.ref == ref
            assert (block.rank, block.leases) == (lease.rank, leases)
            assert (block.kept, block.arriving) == (False, False)
            assert [offset for offset, _ in block.pieces] == [begin_of(b, lease.slot)]
        assert sum(size for _, size in found["wide"].pieces) == elements(everywhere(8)) * ITEMSIZE
    assert [block.leases for block in blocks(b).values()] == [0, 0]


def test_the_status_of_a_split_image_lists_its_pieces(shelf, bench):
    ranks = {"a": 4, "b": 4, "c": 4, "d": 4}
    refs = {name: shelf.make(name, everywhere(rank)) for name, rank in ranks.items()}
    large = shelf.make("large", everywhere(8))
    b = bench(gpu=4)
    held = {name: b.lease(ref) for name, ref in refs.items()}
    for name in "ac":
        held[name].release()
    with b.lease(large):
        pieces = blocks(b)["large"].pieces
        assert len(pieces) == 2
        assert sum(size for _, size in pieces) == elements(everywhere(8)) * ITEMSIZE
        assert disjoint([piece for block in blocks(b).values() for piece in block.pieces])


def test_the_status_shows_adapters_that_may_not_be_evicted_as_pinned(shelf, bench):
    ref = shelf.make("a", everywhere(4))
    b = bench()
    b.tiers.pin(ref)
    b.until(lambda: "a" in blocks(b) and blocks(b)["a"].kept)
    b.tiers.unpin(ref.digest)
    b.until(lambda: not blocks(b)["a"].kept)


@pytest.fixture
def restless() -> Iterator[None]:
    """Let threads switch as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@contextmanager
def watching(look: Callable[[], Any]) -> Iterator[list[Any]]:
    """Results of repeated calls of `look` on a separate thread, while `meanwhile` runs."""
    seen, over = [], threading.Event()

    def run() -> None:
        while not over.is_set():
            seen.append(look())
            time.sleep(1e-5)  # else the others hardly get a turn

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def enough(seen: list[Any], looks: int, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Return when there have been so many looks, after one go of `meanwhile` at least."""
    end_s = time.monotonic() + 20
    while meanwhile() or len(seen) < looks:
        assert time.monotonic() < end_s, "nothing is seen"
        time.sleep(1e-4)


def spans(image: PlacedImage) -> list[Span]:
    return [(piece.offset, piece.end - piece.begin) for piece in image.pieces]


def churn(pool: Pool, steps: int) -> None:
    """Place and free images that cannot be split, so that others move for them."""
    chance, live = random.Random(7), []
    for seed in range(steps):
        layout = whole(16 * chance.randint(1, 6))
        while not pool.can_place(layout.elements):
            pool.free(live.pop(chance.randrange(len(live))))
        live.append(fill(pool, layout, seed)[0])
    for slot in live:
        pool.free(slot)


def test_two_images_never_overlap_for_a_concurrent_reader(restless):
    pool = pool_of(elements=20 * TOTAL, count=200)
    with watching(pool.placed) as seen:
        enough(seen, 500, meanwhile=lambda: churn(pool, 300))
    assert pool.moved_elements > TOTAL
    for placed in seen:
        assert disjoint([span for image in placed.values() for span in spans(image)])
        for image in placed.values():
            assert sum(size for _, size in spans(image)) == image.layout.elements


def test_a_concurrent_reader_never_sees_one_adapter_in_the_slot_of_another(shelf, bench):
    ranks = {f"r{rank}": rank for rank in (1, 2, 3, 5, 8)}
    refs = [shelf.make(name, everywhere(rank)) for name, rank in ranks.items()]
    b = bench(gpu=2.5)
    with watching(lambda: blocks(b)) as seen:
        for ref in refs * 4:
            with b.lease(ref):
                enough(seen, len(seen) + 2)  # the first of them may have begun before
    assert {name for found in seen for name in found} == set(ranks)
    for found in seen:
        assert disjoint([piece for block in found.values() for piece in block.pieces])
        for name, block in found.items():
            layout = PackedLayout.of_ranks(everywhere(ranks[name]), SHAPE)
            image = layout.elements * ITEMSIZE
            assert (block.rank, sum(size for _, size in block.pieces)) == (ranks[name], image)
