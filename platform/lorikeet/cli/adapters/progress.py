"""How far an upload is: a bar with bytes, rate and time left where a person watches."""

import threading

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from lorikeet.sizes import show_size


class ProgressBar:
    """Counts bytes of numbered parts, from any thread. Draws on stderr if that is a terminal."""

    def __init__(self, total: int, *, quiet: bool) -> None:
        self.arrived = 0
        self._total = total
        self._sent: dict[int, int] = {}  # of the parts that are on their way
        self._lock = threading.Lock()
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("Uploading"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._bar = self._progress.add_task("upload", total=total)

    @property
    def shown(self) -> str:
        """How many bytes have arrived of how many, for people."""
        return f"{show_size(self.arrived)} of {show_size(self._total)}"

    def restart(self, missing: int) -> None:
        """Begin again with this many bytes missing and nothing on its way."""
        with self._lock:
            self._sent.clear()
            self.arrived = self._total - missing
            self._draw()

    def sent(self, number: int, count: int) -> None:
        """Count more bytes of a part as on their way."""
        with self._lock:
            self._sent[number] = self._sent.get(number, 0) + count
            self._draw()

    def has_arrived(self, number: int) -> None:
        """Count all that was sent of a part as arrived."""
        with self._lock:
            self.arrived += self._sent.pop(number, 0)

    def lost(self, number: int) -> None:
        """Forget what was sent of a part: nothing of it has arrived."""
        with self._lock:
            self._sent.pop(number, None)
            self._draw()

    def stop(self) -> None:
        """Take the bar away."""
        self._progress.stop()

    def __enter__(self) -> "ProgressBar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _draw(self) -> None:
        self._progress.update(self._bar, completed=self.arrived + sum(self._sent.values()))
