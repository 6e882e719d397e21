"""Progress of a start on a terminal, read from the service's log."""

import json
import sys
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from lorikeet.sizes import show_size


class StartProgress:
    """Bar that shows the stage of a start, below the lines of the service's log.

    Within the `with` block lines are printed above the bar; afterwards they are only printed.

    engines: number of engines that start.
    """

    def __init__(self, engines: int) -> None:
        self._engines, self._ready = engines, 0
        self._console = Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("Starting Ray", total=None)
        self._is_shown = False

    def __enter__(self) -> Self:
        self._progress.start()
        self._is_shown = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_shown = False
        self._progress.stop()

    def read(self, line: str) -> None:
        """Show a line of the log: as progress if it is an event of loading, else as it is."""
        event = _event(line)
        match event.get("event"):
            case "weights_loading":
                self._show_weights(event["read_bytes"], event["total_bytes"])
                return
            case "engine_assembled":
                self.show("Starting engines")
            case "engine_ready":
                self._ready += 1
                self.show(f"Engines ready: {self._ready} of {self._engines}")
        if self._is_shown:
            self._console.print(Text.from_ansi(line), soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)

    @property
    def tasks(self) -> list[Task]:
        """The bar's single task in Rich, with its description and progress."""
        return self._progress.tasks

    def show(self, stage: str) -> None:
        """Show a stage whose length is not known."""
        self._progress.update(self._task, description=stage, total=None)

    def _show_weights(self, read: int, total: int) -> None:
        text = f"Loading weights: {show_size(min(read, total))} of {show_size(total)}"
        self._progress.update(self._task, description=text, completed=read, total=total)


def _event(line: str) -> dict[str, Any]:
    """Return the event of a line of the log, after Ray's prefix; {} if it has none."""
    _, brace, rest = line.partition("{")
    try:
        event = json.loads(brace + rest)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}
