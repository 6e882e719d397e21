"""What is remembered of tenants' JSON."""

from lorikeet.catalog.records import Holdings, Limits, TenantRecord
from lorikeet.catalog.snapshots.partition_format import encode_holdings
from lorikeet.catalog.snapshots.partitions import HoldingsCache

DATA = [encode_holdings(Holdings(TenantRecord("acme", 1.0, Limits(limit)))) for limit in (1, 2, 3)]


def test_the_same_json_is_read_once() -> None:
    cache = HoldingsCache(1000)
    assert cache.decode("acme", DATA[0]).record.limits.requests_per_min == 1
    assert cache.decode("acme", DATA[0]) is cache.decode("acme", bytes(bytearray(DATA[0])))
    assert cache.decode("globex", DATA[0]).record.name == "globex"


def test_the_least_lately_used_is_forgotten_first() -> None:
    cache = HoldingsCache(2 * len(DATA[0]))
    first, second = (cache.decode("acme", data) for data in DATA[:2])
    assert cache.decode("acme", DATA[0]) is first
    cache.decode("acme", DATA[2])
    assert cache.decode("acme", DATA[0]) is first
    assert cache.decode("acme", DATA[1]) is not second


def test_one_that_is_larger_than_all_is_remembered_alone() -> None:
    cache = HoldingsCache(1)
    first = cache.decode("acme", DATA[0])
    assert cache.decode("acme", DATA[0]) is first
    cache.decode("acme", DATA[1])
    assert cache.decode("acme", DATA[0]) is not first
