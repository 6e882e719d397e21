"""Every command explains itself."""

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from lorikeet.cli import app
from tests.test_layout import PAGES


def walk(command: typer.core.TyperGroup, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, child in command.commands.items():
        if isinstance(child, typer.core.TyperGroup):
            yield from walk(child, (*path, name))
        else:
            yield (*path, name)


ROOT = get_command(app)
assert isinstance(ROOT, typer.core.TyperGroup)
COMMANDS = tuple(walk(ROOT))


def help_of(*path: str) -> str:
    result = CliRunner().invoke(app, [*path, "--help"], prog_name="lorikeet", env={"COLUMNS": "80"})
    assert result.exit_code == 0
    return str(result.stdout)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_help_page_has_an_example_of_its_own_command(path: tuple[str, ...]) -> None:
    example = " ".join(help_of(*path).partition("Example:")[2].split())
    assert " ".join(["lorikeet", *path]) in example


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_help_page_fits_80_columns(path: tuple[str, ...]) -> None:
    assert max(map(len, help_of(*path).splitlines())) <= 80


def test_every_command_that_prints_has_json() -> None:
    groups = {path[:-1] for path in COMMANDS if path}
    for path in set(COMMANDS) - groups:
        assert "--json" in help_of(*path), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_every_command_and_option_in_the_docs_exists(page: Path) -> None:
    line_of_it = r"^ *(?:\$ |[A-Z_]+=\S+ )*lorikeet ((?:[a-z]|--)[^#\n]*)"
    for line in re.findall(line_of_it, shown(page.read_text()), re.MULTILINE):
        words = line.split()
        command = find(words)
        assert command is not ROOT or words[0].startswith("--"), line
        known = {option for each in command.params for option in each.opts + each.secondary_opts}
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= known | {"--help"}, line


def shown(text: str) -> str:
    """Return a page's code spans and blocks, one a line, without paths of programs."""
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))
    blocks = re.findall(r"^```\n(.*?)^```|^    (.*)$", text, flags=re.S | re.M)
    return "\n".join([*spans, *map("".join, blocks)]).replace(".venv/bin/", "")


def find(words: list[str]) -> typer.core.TyperCommand | typer.core.TyperGroup:
    """Return the command that words begin with; the root if there is none."""
    found = ROOT
    for word in words:
        if not isinstance(found, typer.core.TyperGroup) or word not in found.commands:
            break
        found = found.commands[word]
    return found


def test_every_promised_command_exists() -> None:
    promised = """
        init register convert smoke parity list show promote rollback retire pin unpin pins status
        why usage log restore snapshot gc capacity doctor settings serve stop
        bench bench/isolation
        tenants tenants/list tenants/show tenants/create tenants/limit
        keys keys/create keys/list keys/limit keys/rotate keys/revoke
    """
    assert {"/".join(path) for path in COMMANDS if path} == set(promised.split())


@pytest.mark.parametrize("path", [(), ("tenants",), ("keys",), ("bench",)], ids=" ".join)
def test_a_group_without_a_command_shows_its_help_and_is_wrong_usage(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, list(path), prog_name="lorikeet")
    assert result.exit_code == 2
    assert "Example:" in result.output


def test_the_version_is_the_packages() -> None:
    result = CliRunner().invoke(app, ["--version"], prog_name="lorikeet")
    assert (result.exit_code, result.stdout) == (0, f"lorikeet {version('lorikeet-serve')}\n")


def test_the_help_lists_exit_statuses() -> None:
    assert "3 a conflict" in help_of()


def test_commands_start_without_the_gateway() -> None:
    """Its libraries take as long to import as all else together."""
    program = (
        "import sys; from lorikeet.cli.app import _COMMANDS, _import_command; "
        "[_import_command(name) for name in _COMMANDS]; sys.exit('fastapi' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
