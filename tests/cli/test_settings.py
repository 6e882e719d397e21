"""docs/settings.md is the output of `lorikeet settings --markdown`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lorikeet.cli import app
from lorikeet.cli.service.settings import as_written
from lorikeet.settings import Settings

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def show(environment: dict[str, str], *options: str) -> Result:
    given = {"LORIKEET_ADMIN_KEY": "", "LORIKEET_SERVER": ""} | environment
    return CliRunner().invoke(app, ["settings", *options], env=given, prog_name="lorikeet")


def test_the_page_is_the_commands_output() -> None:
    printed = show({}, "--markdown").stdout
    assert PAGE.read_text() == printed, "run `lorikeet settings --markdown > docs/settings.md`"


@pytest.mark.parametrize("name", Settings.model_fields)
def test_a_printed_default_parses_to_the_same_value(name: str) -> None:
    default = Settings.from_env({})
    written = as_written(Settings.model_fields[name], getattr(default, name))
    given = {} if written is None else {f"LORIKEET_{name.upper()}": written}
    assert Settings.from_env(given) == default
    assert Settings.model_fields[name].description


def test_a_given_value_is_shown_beside_the_default() -> None:
    given = {
        "LORIKEET_BASE_MODELS": "a=/m/a,b=/m/b",
        "LORIKEET_REPLICAS": "a=4",
        "LORIKEET_KV_CACHE_MEMORY": "12.5%",
        "LORIKEET_ADAPTER_DISK": "1000000000",
    }
    said = show(given).stdout.splitlines()
    assert "LORIKEET_REPLICAS=a=4,b=2   (default: 2)" in said
    assert "LORIKEET_KV_CACHE_MEMORY=12.50%   (default: auto)" in said
    assert "LORIKEET_ADAPTER_DISK=1000000000   (default: 4GiB)" in said
    assert "LORIKEET_MAX_CONTEXT is not set" in said
    assert "LORIKEET_MAX_RANK=64" in said
    answer = {row["variable"]: row for row in json.loads(show(given, "--json").stdout)}
    assert answer["LORIKEET_REPLICAS"]["value"] == "a=4,b=2"
    assert answer["LORIKEET_MAX_CONTEXT"] == {
        "variable": "LORIKEET_MAX_CONTEXT",
        "value": None,
        "default": None,
        "given": False,
        "meaning": Settings.model_fields["max_context"].description,
    }


def test_a_bad_setting_is_an_error() -> None:
    said = show({"LORIKEET_REPLICAS": "many"})
    assert (said.exit_code, said.stdout) == (1, "")
    assert "LORIKEET_REPLICAS='many'" in said.stderr
