"""Output of register --smoke and of smoke, as text and as JSON."""

import json
from pathlib import Path

from tests.cli.conftest import Lorikeet
from tests.cli.peft_folders import peft_folder


def test_register_with_smoke_prints_how_far_answers_differ(
    lorikeet: Lorikeet, tmp_path: Path
) -> None:
    folder = str(peft_folder(tmp_path / "adapter"))
    said = lorikeet.do("register", folder, "acme/support", "--smoke")
    assert "acme/support version 1, now prod" in said
    assert "50% of 8 tokens equal the base model's, the first that differs is number 2" in said


def test_smoke_of_a_version_with_given_prompts(lorikeet: Lorikeet, tmp_path: Path) -> None:
    lorikeet.do("register", str(peft_folder(tmp_path / "adapter")), "acme/support")
    answer = json.loads(
        lorikeet.do("smoke", "acme/support@1", "--prompt", "a", "--prompt", "b", "--json")
    )
    assert [prompt["prompt"] for prompt in answer["prompts"]] == ["a", "b"]
    assert (answer["adapter"], answer["version"], answer["first_difference"]) == (
        "acme/support",
        1,
        1,
    )


def test_an_adapter_that_changes_nothing_gives_a_warning(
    lorikeet: Lorikeet, tmp_path: Path
) -> None:
    lorikeet.do("register", str(peft_folder(tmp_path / "adapter")), "acme/support")
    lorikeet.engines.second = 1
    result = lorikeet.run("smoke", "acme/support")
    assert result.exit_code == 0
    assert "100% of 8 tokens equal the base model's, none differs" in result.stdout
    assert result.stderr.startswith("Warning: the adapter changed none of 8 tokens")


def test_smoke_of_an_unknown_adapter_fails(lorikeet: Lorikeet) -> None:
    assert lorikeet.run("smoke", "acme/nothing").exit_code == 1
    assert lorikeet.run("smoke", "nonsense").exit_code == 2
