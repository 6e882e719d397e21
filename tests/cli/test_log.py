"""log, restore, --as-of, shares and snapshot against a real gateway."""

import json
import time
from pathlib import Path

import pytest
import typer

from lorikeet.cli.arguments import parse_as_of, parse_share, parse_since
from tests.cli.conftest import Lorikeet
from tests.cli.test_adapters import register


def test_the_log_shows_changes_with_their_authors(lorikeet: Lorikeet, tmp_path: Path) -> None:
    register(lorikeet, tmp_path)
    register(lorikeet, tmp_path, seed=1)
    lorikeet.do("promote", "acme/support@2", "--expect", "1")
    (key_id,) = lorikeet.catalog.reader.state.admin_keys()

    lines = lorikeet.run("log", COLUMNS="200").stdout.strip().splitlines()
    assert lines[0].split() == ["Entry", "When", "(UTC)", "By", "What"]
    assert key_id in lines[2]
    assert "alias moved acme/support alias=prod version=2" in lines[2]
    assert "version registered acme/support version=1 digest=" in lines[4]
    assert "key created" in lorikeet.do("log")

    said = json.loads(lorikeet.do("log", "--adapter", "acme/support", "--json", "--limit", "2"))
    assert [entry["actor"] for entry in said["data"]] == [key_id, key_id]
    assert lorikeet.do("log", "--actor", "nobody") == "No such entries.\n"
    assert "catalog created" not in lorikeet.do("log", "--tenant", "acme")
    assert "Older entries: --before 6" in lorikeet.do("log", "--limit", "1")
    older = json.loads(lorikeet.do("log", "--before", "6", "--json"))["data"]
    assert [entry["seq"] for entry in older] == [5, 4, 3, 2, 1]
    assert "alias moved" in lorikeet.do("log", "--since", "1h")


def test_the_log_shows_limits_with_their_values(lorikeet: Lorikeet) -> None:
    lorikeet.catalog.limit_tenant("acme", max_adapters=7, actor="ann")
    newest = lorikeet.run("log", "--limit", "1", COLUMNS="200").stdout
    assert "acme max_adapters=7" in newest


def test_list_and_show_can_show_a_past_state(lorikeet: Lorikeet, tmp_path: Path) -> None:
    register(lorikeet, tmp_path)
    register(lorikeet, tmp_path, "--promote", seed=1)
    seq = lorikeet.catalog.reader.state.seq

    assert "prod→2" in lorikeet.do("list")
    assert "prod→1" in lorikeet.do("list", "--as-of", str(seq - 1))
    assert "prod→1" not in lorikeet.do("list", "--as-of", "2100-01-01")
    then = json.loads(lorikeet.do("show", "acme/support", "--as-of", str(seq - 1), "--json"))
    assert len(then["versions"]) == 1
    early = lorikeet.run("list", "--as-of", "2001-01-01")
    assert early.exit_code == 1
    assert "there was no catalog then" in early.stderr


def test_a_retired_adapter_is_restored(lorikeet: Lorikeet, tmp_path: Path) -> None:
    register(lorikeet, tmp_path)
    lorikeet.do("retire", "acme/support")
    assert lorikeet.do("restore", "acme/support") == "Restored acme/support; prod is version 1.\n"
    assert lorikeet.run("restore", "acme/support").exit_code == 3
    register(lorikeet, tmp_path, "--promote", seed=1)
    lorikeet.do("retire", "acme/support@1")
    assert "acme/support@1; prod is version 2" in lorikeet.do("restore", "acme/support@1")


def test_an_alias_is_shared(lorikeet: Lorikeet, tmp_path: Path) -> None:
    register(lorikeet, tmp_path)
    register(lorikeet, tmp_path, seed=1)
    said = lorikeet.do("promote", "acme/support@2", "--share", "10%")
    assert said == "10% of acme/support@prod now goes to version 2.\n"
    assert "prod→1 (2: 10%)" in lorikeet.run("list", COLUMNS="200").stdout
    lorikeet.do("rollback", "acme/support")
    assert "10%" not in lorikeet.run("list", COLUMNS="200").stdout


def test_a_snapshot_is_made(lorikeet: Lorikeet) -> None:
    seq = lorikeet.catalog.reader.state.seq
    assert lorikeet.do("snapshot") == f"There is a snapshot of entry {seq}.\n"
    assert json.loads(lorikeet.do("snapshot", "--json")) == {"seq": seq}


def test_as_of_takes_an_entry_a_time_or_a_duration() -> None:
    assert parse_as_of("12") == {"as_of_seq": "12"}
    assert parse_as_of("1970-01-01T01:00") == {"as_of_time": "3600.0"}
    assert parse_since("1970-01-01T01:00+01:00") == 0.0
    assert abs(parse_since("2h") - (time.time() - 7200)) < 5
    for text in ("", "0h", "yesterday", "1.5h", "2026-13-01"):
        with pytest.raises(typer.BadParameter):
            parse_as_of(text)


def test_a_share_is_a_percentage_or_a_fraction() -> None:
    assert parse_share("10%") == parse_share("0.1") == 0.1
    for text in ("0", "0%", "1", "100%", "-5%", "x", "5e-1", ""):
        with pytest.raises(typer.BadParameter):
            parse_share(text)
