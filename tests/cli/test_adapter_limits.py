"""A tenant's own limits: set by command, applied at registration, kept in snapshots."""

import re
from pathlib import Path

from lorikeet.catalog.reader import CatalogReader
from tests.cli.conftest import Lorikeet
from tests.cli.peft_folders import peft_folder


def register(lorikeet: Lorikeet, folder: Path, adapter: str = "acme/x") -> tuple[int, str]:
    result = lorikeet.run("register", str(folder), adapter)
    return result.exit_code, " ".join(result.stderr.split())


def test_a_tenants_own_limit_applies_below_the_services(lorikeet: Lorikeet, tmp_path: Path) -> None:
    lorikeet.do("tenants", "create", "globex")
    said = lorikeet.do("tenants", "limit", "acme", "--rank", "4")
    assert re.search(r"Rank +4 *\n *Bytes of an adapter +as the service", said)
    low, high = peft_folder(tmp_path / "low", rank=4), peft_folder(tmp_path / "high", rank=5)
    assert register(lorikeet, low)[0] == 0
    status, error = register(lorikeet, high)
    assert status == 1
    assert "has rank 5: the limit is 4" in error
    assert "(LORIKEET_MAX_RANK, or the tenant's own" in error
    assert "; 5 admits it)" in error
    assert register(lorikeet, high, "globex/x")[0] == 0
    lorikeet.do("tenants", "limit", "acme", "--rank", "none", "--adapter-bytes", "1KiB")
    error = register(lorikeet, high)[1]
    assert "bytes: the limit is 1024 (LORIKEET_MAX_ADAPTER_BYTES" in error
    lorikeet.do("tenants", "limit", "acme", "--rank", "none", "--adapter-bytes", "none")
    assert register(lorikeet, high)[0] == 0


def test_a_tenants_limit_above_the_services_does_not_raise_it(
    lorikeet: Lorikeet, tmp_path: Path
) -> None:
    lorikeet.do("tenants", "limit", "acme", "--rank", "1000", "--adapter-bytes", "1TiB")
    status, error = register(lorikeet, peft_folder(tmp_path / "a", rank=17))
    assert (status, "the limit is 16" in error) == (1, True)


def test_limits_are_listed_and_outlive_a_snapshot(lorikeet: Lorikeet) -> None:
    lorikeet.do("tenants", "limit", "acme", "--rank", "24", "--adapter-bytes", "3MiB")
    shown = lorikeet.do("tenants", "show", "acme")
    assert re.search(r"Rank +24 *\n *Bytes of an adapter +3.0 MiB", shown)
    lorikeet.catalog.reader.refresh()
    lorikeet.catalog.reader.snapshot()
    other = CatalogReader(lorikeet.catalog.store)
    other.refresh()
    tenant = other.ask(lambda state: state.tenant("acme"))
    assert (tenant.max_rank, tenant.max_adapter_bytes) == (24, 3 << 20)


def test_one_adapter_too_many_is_refused_with_a_remedy(lorikeet: Lorikeet, tmp_path: Path) -> None:
    lorikeet.do("tenants", "limit", "acme", "--adapters", "1", "--bytes", "1MiB")
    assert register(lorikeet, peft_folder(tmp_path / "a", seed=1), "acme/a")[0] == 0
    second = peft_folder(tmp_path / "b", seed=2)
    status, error = register(lorikeet, second, "acme/b")
    assert status == 3
    assert "of acme in use: 1, and its limit is 1: retire one" in error
    assert "lorikeet tenants limit acme --adapters N" in error
    assert "acme/b" not in lorikeet.do("list")
    assert re.search(r"of acme in use: 1, [0-9.]+ KiB", lorikeet.do("tenants", "show", "acme"))

    lorikeet.do("retire", "acme/a")
    assert register(lorikeet, second, "acme/b")[0] == 0
    assert lorikeet.run("restore", "acme/a").exit_code == 3
    lorikeet.do("tenants", "limit", "acme", "--adapters", "none", "--bytes", "1KiB")
    status, error = register(lorikeet, peft_folder(tmp_path / "c", seed=3), "acme/c")
    assert (status, "its limit is 1024: retire versions" in error) == (3, True)
