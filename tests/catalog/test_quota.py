"""A tenant's adapters stay within its quota."""

import hashlib
from pathlib import Path
from threading import Barrier, Thread

import pytest

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import BlobFacts
from lorikeet.catalog.rules.quota import QuotaUsage, quota_usage
from lorikeet.errors import Conflict
from tests.catalog.conftest import Register


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    """Use the local store only: the rules are the same for every store."""
    return str(tmp_path / "store")


def test_adapters_beyond_the_limit_are_refused(catalog: AdapterCatalog, register: Register) -> None:
    catalog.limit_tenant("acme", max_adapters=2, actor="ann")
    register("acme/a", b"1")
    register("acme/b", b"2")
    with pytest.raises(Conflict, match="of acme in use: 2, and its limit is 2: retire one"):
        register("acme/c", b"3")
    assert catalog.reader.state.find("acme", "c") is None

    register("acme/a", b"4")  # a version more is no adapter more
    catalog.retire("acme", "b", actor="ann")
    register("acme/c", b"3")
    with pytest.raises(Conflict, match="limit is 2"):
        catalog.restore("acme", "b", actor="ann")
    with pytest.raises(Conflict, match="limit is 2"):
        catalog.restore("acme", "b", 1, actor="ann")
    catalog.limit_tenant("acme", max_adapters=None, actor="ann")
    assert not catalog.restore("acme", "b", actor="ann").retired


def test_bytes_beyond_the_limit_are_refused(catalog: AdapterCatalog, register: Register) -> None:
    catalog.limit_tenant("acme", max_total_bytes=100, actor="ann")
    register("acme/a", b"1" * 40)
    register("acme/a", b"2" * 40)
    refusal = "would take 120 bytes, 80 without this one, and its limit is 100"
    with pytest.raises(Conflict, match=refusal):
        register("acme/a", b"3" * 40)
    with pytest.raises(Conflict, match=refusal):
        register("acme/b", b"3" * 40)

    register("acme/b", b"1" * 40)  # the same blob, which is counted once
    catalog.promote("acme", "a", 2, actor="ann")
    catalog.retire("acme", "a", 1, actor="ann")
    with pytest.raises(Conflict, match="120 bytes"):  # b has it still
        register("acme/b", b"3" * 40)
    catalog.retire("acme", "b", actor="ann")
    register("acme/b", b"3" * 40)
    assert quota_usage(catalog.reader.state, "acme") == QuotaUsage(2, 80)
    with pytest.raises(Conflict, match="120 bytes"):
        catalog.restore("acme", "a", 1, actor="ann")


def test_a_lowered_limit_refuses_only_changes_that_add(
    catalog: AdapterCatalog, register: Register
) -> None:
    register("acme/a", b"1" * 40)
    register("acme/b", b"2" * 40)
    catalog.limit_tenant("acme", max_adapters=1, max_total_bytes=10, actor="ann")

    assert register("acme/a", b"1" * 40).version == 1
    assert register("acme/a", b"1" * 40, promote=True, shared=True).version == 1
    with pytest.raises(Conflict):
        register("acme/a", b"3")


def test_of_two_concurrent_registrations_at_the_limit_one_succeeds(
    catalog: AdapterCatalog, tmp_path: Path
) -> None:
    catalog.limit_tenant("acme", max_adapters=3, actor="ann")
    start = Barrier(6)
    refused: list[str] = []

    def race(number: int) -> None:
        data = str(number).encode()
        blob = tmp_path / str(number)
        blob.write_bytes(data)
        facts = BlobFacts(hashlib.sha256(data).hexdigest(), 1, 8, "demo", 10)
        own = AdapterCatalog(catalog.store)
        start.wait()
        try:
            own.register("acme", f"a{number}", blob, facts, actor="ann")
        except Conflict as error:
            refused.append(error.message)

    racing = [Thread(target=race, args=(number,)) for number in range(6)]
    for each in racing:
        each.start()
    for each in racing:
        each.join()

    assert quota_usage(catalog.reader.refresh(), "acme").adapters == 3
    assert len(refused) == 3
    assert all("its limit is 3" in message for message in refused)
