"""A prefetch counts for what the adapter is used elsewhere."""

from lorikeet_engine.adapter import Residency
from tests.engine.residency.test_prefetches import settled, use
from tests.engine.residency.tiers_driver import make


def test_what_is_used_more_elsewhere_takes_the_place_of_what_is_used_less_here(shelf, bench):
    here, elsewhere = make(shelf, "ab")
    b = bench(gpu=1)
    use(b, here, times=3)
    b.tiers.prefetch(elsewhere, Residency.GPU, 2.0)
    settled(b, elsewhere)
    assert b.tiers.residency(here) is Residency.GPU
    b.tiers.prefetch(elsewhere, Residency.GPU, 4.0)
    settled(b, elsewhere, at=Residency.GPU)
    assert b.tiers.residency(here) is Residency.HOST


def test_until_it_is_used_it_keeps_its_place_by_that(shelf, bench):
    rare, elsewhere, new = make(shelf, "abn")
    b = bench(gpu=2)
    use(b, rare)
    b.tiers.prefetch(elsewhere, Residency.GPU, 2.0)
    settled(b, elsewhere, at=Residency.GPU)
    use(b, new)
    assert b.tiers.residency(rare) is Residency.HOST
    assert b.tiers.residency(elsewhere) is Residency.GPU
