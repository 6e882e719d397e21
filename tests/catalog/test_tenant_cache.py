"""Cache of decoded tenants."""

from lorikeet.catalog.partition_format import TenantStateCache, encode_tenant
from lorikeet.catalog.records import Limits, TenantRecord, TenantState

DATA = [encode_tenant(TenantState(TenantRecord("acme", 1.0, Limits(limit)))) for limit in (1, 2, 3)]


def test_equal_json_is_decoded_once() -> None:
    cache = TenantStateCache(1000)
    assert cache.decode("acme", DATA[0]).record.limits.requests_per_min == 1
    assert cache.decode("acme", DATA[0]) is cache.decode("acme", bytes(bytearray(DATA[0])))
    assert cache.decode("globex", DATA[0]).record.name == "globex"


def test_the_least_recently_used_tenant_is_evicted_first() -> None:
    cache = TenantStateCache(2 * len(DATA[0]))
    first, second = (cache.decode("acme", data) for data in DATA[:2])
    assert cache.decode("acme", DATA[0]) is first
    cache.decode("acme", DATA[2])
    assert cache.decode("acme", DATA[0]) is first
    assert cache.decode("acme", DATA[1]) is not second


def test_a_tenant_larger_than_the_cache_is_cached_alone() -> None:
    cache = TenantStateCache(1)
    first = cache.decode("acme", DATA[0])
    assert cache.decode("acme", DATA[0]) is first
    cache.decode("acme", DATA[1])
    assert cache.decode("acme", DATA[0]) is not first
