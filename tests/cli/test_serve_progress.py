"""Progress of a start, as a terminal shows it."""

import io
import json

import pytest
from rich.console import Console

from lorikeet.cli.serve.progress import StartProgress

PREFIX = "\x1b[36m(ServeReplica:default:engine-m pid=7)\x1b[0m "


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr("lorikeet.cli.serve.progress.Console", lambda **_: terminal)
    return shown


def event(name: str, **facts: object) -> str:
    return PREFIX + json.dumps({"level": "info", "event": name, **facts})


def test_loading_is_a_bar_in_place_of_its_events(screen: io.StringIO) -> None:
    progress = StartProgress(engines=2)
    with progress:
        progress.read(event("weights_loading", read_bytes=2**30, total_bytes=4 * 2**30))
        (task,) = progress.tasks
        assert (task.completed, task.total) == (2**30, 4 * 2**30)
    assert "Loading weights: 1.0 GiB of 4.0 GiB" in screen.getvalue()
    assert "weights_loading" not in screen.getvalue()


def test_engines_that_are_ready_are_counted(screen: io.StringIO) -> None:
    progress = StartProgress(engines=2)
    with progress:
        progress.read(event("engine_ready", replica="a"))
    assert "Engines ready: 1 of 2" in screen.getvalue()


@pytest.mark.parametrize(
    "line", ["plain text", "a {brace", "[bold]no markup[/]", event("start_failed", error="why")]
)
def test_other_lines_of_the_log_are_shown_as_they_are(
    screen: io.StringIO, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    progress = StartProgress(engines=1)
    with progress:
        progress.read(line)
    assert line.removeprefix(PREFIX) in screen.getvalue()
    progress.read(line)  # once the service is ready
    assert capsys.readouterr().err == f"{line}\n"
