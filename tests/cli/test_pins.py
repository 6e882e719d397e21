"""pin, unpin, pins against a real gateway."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lorikeet.catalog.changes import Pinned
from lorikeet.catalog.log import Log
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet_engine.adapter import Residency
from lorikeet_engine.telemetry.status import AdapterStatus
from tests.cli.conftest import Lorikeet
from tests.cli.peft_folders import peft_folder
from tests.placement.builders import report

README = Path(__file__).parents[2] / "README.md"


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


def test_the_readme_quotes_the_output_of_pin(registered: Lorikeet) -> None:
    said = registered.do("pin", "acme/support").replace("acme/support", "kestrel/shout")
    assert f"    {said}" in README.read_text()


def test_every_option_of_pin_reaches_the_server(registered: Lorikeet) -> None:
    options = ["--replicas", "2", "--tier", "host", "--reason", "launch [day]", "--expires", "2h"]
    pin = json.loads(registered.do("pin", "acme/support@1", *options, "--json"))
    assert (pin["selector"], pin["replicas"], pin["tier"]) == ("1", 2, "host")
    assert pin["reason"] == "launch [day]"
    assert pin["expires"] == pytest.approx(time.time() + 7200, abs=30)


def test_pins_are_listed_and_removed(registered: Lorikeet) -> None:
    assert "Nothing is pinned." in registered.do("pins")
    registered.do("pin", "acme/support", "--reason", "launch [day]")
    row = registered.do("pins").splitlines()[3].split()
    facts = ["acme/support@prod", "gpu", "all", "0", "512", "B", "never", "unmet"]
    assert row == [*facts, "launch", "[day]"]
    assert registered.do("unpin", "acme/support") == "Unpinned acme/support.\n"
    assert json.loads(registered.do("pins", "--json")) == {"data": []}


def test_a_draft_is_shown_and_kept_until_it_is_ended(registered: Lorikeet) -> None:
    assert "and drafts tokens" in registered.do("pin", "acme/support", "--draft")
    assert "and drafts tokens" in registered.do("pin", "acme/support", "--priority", "1")
    assert "gpu, drafts" in registered.do("pins")
    assert "drafts" not in registered.do("pin", "acme/support", "--no-draft")
    assert "drafts" not in registered.do("pins")


def test_a_pins_prompt_is_read_shown_and_removed(registered: Lorikeet, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("You are a clerk.\n")
    registered.do("pin", "acme/support", "--prompt", str(file))
    registered.do("pin", "acme/support", "--priority", "1")
    assert "16 B on 0 of 0" in registered.do("pins")
    assert registered.do("pins", "--prompt", "acme/support") == "You are a clerk.\n"
    assert "stays pinned" in registered.do("unpin", "acme/support", "--prompt")
    assert "16 B" not in registered.do("pins")
    assert pins_of(registered)["acme/support"]["priority"] == 1


def test_a_tenants_name_alone_removes_no_prompt(registered: Lorikeet, tmp_path: Path) -> None:
    registered.do("register", str(peft_folder(tmp_path / "prompt")), "acme/prompt")
    registered.do("pin", "acme/prompt")
    refused = registered.run("unpin", "acme", "--prompt")
    assert refused.exit_code == 2
    assert "want TENANT/NAME" in refused.stderr
    assert "acme/prompt" in pins_of(registered)


def test_a_prompt_that_is_no_text_is_refused(registered: Lorikeet, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xff\xfe")
    refused = registered.run("pin", "acme/support", "--prompt", str(file))
    assert "is no text in UTF-8" in refused.stderr


def test_status_counts_computed_prompts(registered: Lorikeet) -> None:
    one = replica("r1", 2**20)
    registered.engines.said = [replace(one, prompts={"a": None, "b": ""}), one]
    assert "; prompts: 1 of 2 computed" in registered.do("status")


def replica(name: str, gpu: int, *adapters: AdapterStatus) -> ReplicaReport:
    return report(name, gpu, host=2**30, disk=2**30, adapters=adapters)


def pins_of(lorikeet: Lorikeet) -> dict[str, dict[str, Any]]:
    listed = json.loads(lorikeet.do("pins", "--json"))["data"]
    return {pin["adapter"] or pin["tenant"]: pin for pin in listed}


def test_a_pin_that_does_not_fit_is_unmet_with_a_reason(
    registered: Lorikeet, tmp_path: Path
) -> None:
    registered.do("register", str(peft_folder(tmp_path / "other", seed=1)), "acme/legal")
    registered.engines.said = [replica("r1", 600)]
    registered.do("pin", "acme/support")
    registered.do("pin", "acme/legal", "--priority", "1")
    pins = pins_of(registered)
    assert {name: pin["state"] for name, pin in pins.items()} == {
        "acme/legal": "loading",
        "acme/support": "unmet",
    }
    said = " ".join(registered.do("pins").split())
    assert "acme/support@prod acme/support@1 it takes 512 bytes, and earlier pins leave" in said
    assert "unmet (`lorikeet pins` says why)" in registered.do("status")


def test_a_tenants_pin_keeps_its_adapters_of_now_and_later(
    registered: Lorikeet, tmp_path: Path
) -> None:
    said = registered.do("pin", "acme", "--tier", "host")
    assert said.startswith("Every adapter of acme will be kept on host on all replicas;")
    assert pins_of(registered)["acme"]["versions"] == 1
    registered.do("register", str(peft_folder(tmp_path / "other", seed=1)), "acme/legal")
    assert pins_of(registered)["acme"]["versions"] == 2
    assert registered.do("unpin", "acme") == "Unpinned acme.\n"
    assert pins_of(registered) == {}


def test_a_dry_run_lists_moves_and_changes_nothing(registered: Lorikeet, tmp_path: Path) -> None:
    registered.do("register", str(peft_folder(tmp_path / "other", seed=1)), "acme/legal")
    registered.do("pin", "acme/support")
    registered.engines.said = [replica("r1", 600), replica("r2", 2000)]
    before = registered.catalog.reader.refresh()
    options = ["--priority", "1", "--dry-run"]
    moves = json.loads(registered.do("pin", "acme/legal", *options, "--json"))
    assert [
        (load["replica"], load["adapter"], load["from"], load["to"]) for load in moves["loads"]
    ] == [
        ("r1", "acme/legal", "remote", "gpu"),
        ("r2", "acme/legal", "remote", "gpu"),
    ]
    assert [(each["replica"], each["adapter"]) for each in moves["releases"]] == [
        ("r1", "acme/support")
    ]
    assert moves["unmet"] == []
    assert [each["pin"] for each in moves["lost"]] == ["acme/support@prod"]
    said = registered.do("pin", "acme/legal", *options)
    assert "Would load 2 images, 1.0 KiB. Nothing was changed." in said
    assert "Other pins would no longer be met:" in said
    assert registered.catalog.reader.refresh() is before


@pytest.mark.parametrize("target", ["acme@prod", "acme/", "/support", "acme/support@", "Acme"])
def test_a_malformed_pin_target_is_wrong_usage(lorikeet: Lorikeet, target: str) -> None:
    assert lorikeet.run("pin", target).exit_code == 2


def test_a_pin_with_a_lifetime_prints_its_end(registered: Lorikeet) -> None:
    said = registered.do("pin", "acme/support", "--tier", "disk", "--expires", "7d")
    assert said.startswith("acme/support@prod will be kept on disk on all replicas until ")


def test_a_pin_on_more_replicas_than_exist_is_not_reported_as_met(
    registered: Lorikeet,
) -> None:
    said = registered.do("pin", "acme/support", "--replicas", "99")
    assert "will be kept on gpu on 99 replicas; `lorikeet pins` shows when" in said


def test_text_from_the_catalog_cannot_control_a_terminal(registered: Lorikeet) -> None:
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
    Log(catalog.store).append(catalog.reader.state.seq, "test", time.time(), [change])
    row = registered.do("pins").splitlines()[3]
    assert "\\x1b[2Jgone\\n" in row
    assert "1.0e+13 s" in row


@pytest.mark.parametrize(
    "options",
    [
        ["--replicas", "0"],
        ["--replicas", "some"],
        ["--tier", "cloud"],
        ["--priority", "1001"],
        ["--priority", "high"],
        ["--expires", "2"],
        ["--expires", "0h"],
        ["--expires", "soon"],
        ["--expires", "3651d"],
        ["--expires", "9" * 5000 + "d"],
        ["--replicas", "9" * 5000],
    ],
    ids=lambda options: " ".join(options)[:20],
)
def test_malformed_options_are_wrong_usage(lorikeet: Lorikeet, options: list[str]) -> None:
    assert lorikeet.run("pin", "acme/support", *options).exit_code == 2


def test_a_malformed_lifetime_is_named(lorikeet: Lorikeet) -> None:
    result = lorikeet.run("pin", "acme/support", "--expires", "soon")
    assert "Invalid value for '--expires'" in result.stderr


def test_pinning_an_unknown_adapter_fails(lorikeet: Lorikeet) -> None:
    result = lorikeet.run("pin", "acme/nothing")
    assert result.exit_code == 1
    assert "acme/nothing" in result.stderr
