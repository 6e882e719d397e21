"""Limits of a tenant's own, from the command to the door and into snapshots."""

from pathlib import Path

import pytest

from lorikeet.catalog import AdapterCatalog
from tests.cli.adapters import peft_folder
from tests.cli.conftest import Lorikeet


def register(lorikeet: Lorikeet, folder: Path, adapter: str = "acme/x") -> tuple[int, str]:
    result = lorikeet.run("register", str(folder), adapter)
    return result.exit_code, " ".join(result.stderr.split())


def test_a_tenants_limits_are_narrower_than_the_services(
    lorikeet: Lorikeet, tmp_path: Path
) -> None:
    lorikeet.do("tenants", "create", "globex")
    said = lorikeet.do("tenants", "adapter-limits", "acme", "4", "none")
    assert said == "New adapters of acme may have at most rank 4 and any size served here.\n"
    low, high = peft_folder(tmp_path / "low", rank=4), peft_folder(tmp_path / "high", rank=5)
    assert register(lorikeet, low)[0] == 0
    status, error = register(lorikeet, high)
    assert status == 1
    assert "has rank 5: the limit is 4" in error
    assert register(lorikeet, high, "globex/x")[0] == 0
    lorikeet.do("tenants", "adapter-limits", "acme", "none", "1KiB")
    assert "bytes: the limit is 1024" in register(lorikeet, high)[1]
    lorikeet.do("tenants", "adapter-limits", "acme", "none", "none")
    assert register(lorikeet, high)[0] == 0


def test_a_tenant_is_let_in_no_more_than_the_service_holds(
    lorikeet: Lorikeet, tmp_path: Path
) -> None:
    lorikeet.do("tenants", "adapter-limits", "acme", "1000", "1TiB")
    status, error = register(lorikeet, peft_folder(tmp_path / "a", rank=17))
    assert (status, "the limit is 16" in error) == (1, True)


def test_limits_are_listed_and_outlive_a_snapshot(lorikeet: Lorikeet) -> None:
    lorikeet.do("tenants", "adapter-limits", "acme", "24", "3MiB")
    (row,) = [line for line in lorikeet.do("tenants", "list").splitlines() if "acme" in line]
    assert "24" in row
    assert "3.0 MiB" in row
    lorikeet.catalog.refresh()
    lorikeet.catalog.snapshot()
    other = AdapterCatalog(lorikeet.catalog.store)
    other.refresh()
    tenant = other.ask(lambda state: state.tenant("acme"))
    assert (tenant.max_rank, tenant.max_adapter_bytes) == (24, 3 << 20)


@pytest.mark.parametrize("values", [("0", "none"), ("many", "none"), ("4", "0"), ("4", "big")])
def test_what_is_no_limit_is_wrong_usage(lorikeet: Lorikeet, values: tuple[str, str]) -> None:
    assert lorikeet.run("tenants", "adapter-limits", "acme", *values).exit_code == 2


def test_limits_of_nobody_are_refused(lorikeet: Lorikeet) -> None:
    result = lorikeet.run("tenants", "adapter-limits", "nobody", "4", "none")
    assert result.exit_code == 1
    assert "nobody" in result.stderr
