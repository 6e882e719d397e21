"""pin, unpin, pins against a real gateway."""

import json
import time
from pathlib import Path

import pytest

from lorikeet.catalog.changes import Pinned
from lorikeet.catalog.log import Log
from lorikeet_engine.adapter import Residency
from tests.cli.adapters import peft_folder
from tests.cli.conftest import Lorikeet


@pytest.fixture
def registered(lorikeet: Lorikeet, tmp_path: Path) -> Lorikeet:
    lorikeet.do("register", str(peft_folder(tmp_path / "adapter")), "acme/support")
    return lorikeet


def test_a_pin_of_the_name_alone_follows_prod_on_all_replicas(registered: Lorikeet) -> None:
    pin = json.loads(registered.do("pin", "acme/support", "--json"))
    said = {key: pin[key] for key in ("adapter", "selector", "tier", "replicas", "expires")}
    assert said == {
        "adapter": "acme/support",
        "selector": "prod",
        "tier": "gpu",
        "replicas": None,
        "expires": None,
    }


def test_every_option_of_a_pin_arrives(registered: Lorikeet) -> None:
    options = ["--replicas", "2", "--tier", "host", "--reason", "launch [day]", "--expires", "2h"]
    pin = json.loads(registered.do("pin", "acme/support@1", *options, "--json"))
    assert (pin["selector"], pin["replicas"], pin["tier"]) == ("1", 2, "host")
    assert pin["reason"] == "launch [day]"
    assert pin["expires"] == pytest.approx(time.time() + 7200, abs=30)


def test_pins_are_listed_and_taken_back(registered: Lorikeet) -> None:
    assert "Nothing is pinned." in registered.do("pins")
    registered.do("pin", "acme/support", "--reason", "launch [day]")
    (row,) = [line for line in registered.do("pins").splitlines() if "acme/support" in line]
    assert row.split() == ["acme/support@prod", "gpu", "all", "never", "launch", "[day]"]
    assert registered.do("unpin", "acme/support") == "Unpinned acme/support.\n"
    assert json.loads(registered.do("pins", "--json")) == {"data": []}


def test_a_pin_says_for_how_long(registered: Lorikeet) -> None:
    said = registered.do("pin", "acme/support", "--tier", "disk", "--expires", "7d")
    assert said.startswith("acme/support@prod will be kept on disk on all replicas until ")


def test_a_pin_on_more_replicas_than_there_are_is_no_claim_that_it_is_done(
    registered: Lorikeet,
) -> None:
    said = registered.do("pin", "acme/support", "--replicas", "99")
    assert "will be kept on gpu on 99 replicas; `lorikeet status` shows when" in said


def test_what_a_catalog_holds_cannot_break_or_steer_a_terminal(registered: Lorikeet) -> None:
    change = Pinned(
        tenant="acme",
        name="support",
        selector="prod",
        tier=Residency.GPU,
        replicas=None,
        reason="\x1b[2Jgone\n",
        expires=1e13,
    )
    catalog = registered.catalog
    Log(catalog.store).append(catalog.state.seq, "test", time.time(), [change])
    (row,) = [line for line in registered.do("pins").splitlines() if "acme/support" in line]
    assert "\\x1b[2Jgone\\n" in row
    assert "1.0e+13 s" in row


@pytest.mark.parametrize(
    "options",
    [
        ["--replicas", "0"],
        ["--replicas", "some"],
        ["--tier", "cloud"],
        ["--expires", "2"],
        ["--expires", "0h"],
        ["--expires", "soon"],
        ["--expires", "3651d"],
        ["--expires", "9" * 5000 + "d"],
        ["--replicas", "9" * 5000],
    ],
    ids=lambda options: " ".join(options)[:20],
)
def test_what_cannot_be_meant_is_wrong_usage(lorikeet: Lorikeet, options: list[str]) -> None:
    assert lorikeet.run("pin", "acme/support", *options).exit_code == 2


def test_pinning_what_is_not_there_fails(lorikeet: Lorikeet) -> None:
    result = lorikeet.run("pin", "acme/nothing")
    assert result.exit_code == 1
    assert "acme/nothing" in result.stderr
