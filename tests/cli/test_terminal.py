"""Output that only a terminal gets."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from lorikeet.cli.output import print_json, spinner
from tests.cli.conftest import Lorikeet
from tests.cli.peft_folders import peft_folder

_MAIN = "from lorikeet.cli import main; main()"


def register(lorikeet: Lorikeet, folder: Path, *options: str) -> tuple[str, str]:
    """Run register with a pipe as stdout and a terminal as stderr; return both outputs."""
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", _MAIN, "register", str(folder), "acme/support", *options],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=os.environ
        | {"LORIKEET_SERVER": lorikeet.url, "LORIKEET_ADMIN_KEY": lorikeet.admin_key}
        | {"TERM": "xterm-256color", "COLUMNS": "100"},
        check=True,
        text=True,
    )
    os.close(theirs)
    try:
        shown = os.read(ours, 65536).decode()
    except OSError:  # Linux's answer for a closed terminal without output
        shown = ""
    os.close(ours)
    return done.stdout, shown


def test_a_terminal_shows_the_uploads_progress(lorikeet: Lorikeet, tmp_path: Path) -> None:
    said, shown = register(lorikeet, peft_folder(tmp_path / "adapter"))
    assert said.startswith("acme/support version 1")
    assert "Uploading" in shown


def test_json_comes_without_a_bar(lorikeet: Lorikeet, tmp_path: Path) -> None:
    said, shown = register(lorikeet, peft_folder(tmp_path / "adapter"), "--json")
    assert said.startswith("{")
    assert shown == ""


def test_json_cannot_control_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"model": "café \x1b[2J \x9b2J \x9d0;title\x07 \u202elive \U000e0041 \x7f \n"}
    print_json(value)
    said = capsys.readouterr().out
    assert json.loads(said) == value
    assert "café" in said
    assert all(char.isprintable() or char == "\n" for char in said)
    assert said.count("\n") == 3


def shown_by(program: str, ending: str = "") -> bytes:
    """Return the output of a Python program in a shell with jobs, on a terminal of its own.

    ending: ends the shell's command line, such as & for the background.
    """
    process, terminal = pty.fork()
    if not process:
        os.execvp("bash", ["bash", "-c", f"set -m; {sys.executable} -c '{program}' {ending}"])
    said = b""
    while True:
        try:
            said += os.read(terminal, 1024)
        except OSError:  # Linux's end of a terminal
            break
    os.waitpid(process, 0)
    os.close(terminal)
    return said


@pytest.mark.parametrize(("ending", "shown"), [("", b"True"), ("& wait", b"False")])
def test_bars_are_for_a_terminals_foreground(ending: str, shown: bytes) -> None:
    program = "import sys; from lorikeet.cli.output import is_shown; print(is_shown(sys.stderr))"
    assert shown in shown_by(program, ending)


@pytest.mark.parametrize(("quiet", "shown"), [(False, True), (True, False)])
def test_a_spinner_is_shown_on_a_terminal_unless_quiet(quiet: bool, shown: bool) -> None:
    program = f"""
from lorikeet.cli.output import spinner
with spinner("looking about", quiet={quiet}):
    pass
"""
    assert (b"looking about" in shown_by(program.replace("'", '"'))) is shown


def test_a_spinner_is_not_shown_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with spinner("looking about", quiet=False):
        pass
    assert capsys.readouterr().err == ""
