"""Sending a blob: in parts, several at once, and on from where it was when it is sent again.

The server knows an upload by its blob's digest. It tells which parts are missing and where they
go: to an address of the store's own, or to the server itself.
"""

import base64
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import httpx
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from lorikeet.cli.admin_client import AdminClient, Json, ServerUnavailable
from lorikeet.cli.output import print_error
from lorikeet.errors import LorikeetError, NotFound, StoreError, Unavailable
from lorikeet.sizes import show_size

_CONNECTIONS = 4
_CHUNK_BYTES = 1 << 16
_TIMEOUT = httpx.Timeout(60.0, connect=5.0)
_TRIES = 7  # in a row without a part that arrives: 45 s, in which a gateway restarts
_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 15.0
_MAX_REFUSALS = 2  # of the store's own addresses, before the parts go through the server
# not_found: another register of the same blob has just ended the upload that both were sending
_PASSING = (LorikeetError.code, NotFound.code, StoreError.code, Unavailable.code)
_INTERRUPTED = 130  # what shells expect after Ctrl-C

T = TypeVar("T")


def send_blob(
    server: AdminClient, blob: Path, digest: str, about: Mapping[str, Any], *, quiet: bool
) -> None:
    """Bring the server whatever it has not got of this file.

    about: what the blob is for, which the server checks before any byte is sent. Shows a bar on
    stderr where a person watches. Raises LorikeetError; Ctrl-C ends the command and says how to
    go on.
    """
    with _ProgressBar(blob.stat().st_size, quiet=quiet) as progress:
        try:
            _BlobUpload(server, blob, digest, about, progress).run()
        except KeyboardInterrupt:
            progress.stop()
            print_error(f"interrupted at {progress.shown}: the same command goes on from there")
            raise typer.Exit(_INTERRUPTED) from None


def with_retries(call: Callable[[], T]) -> T:
    """The answer to what may be asked twice, also from a server that is away for a moment."""
    for attempt in range(1, _TRIES):
        try:
            return call()
        except ServerUnavailable:
            _pause(attempt)
    return call()


class _ProgressBar:
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

    def __enter__(self) -> "_ProgressBar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _draw(self) -> None:
        self._progress.update(self._bar, completed=self.arrived + sum(self._sent.values()))


class _BlobUpload:
    def __init__(
        self,
        server: AdminClient,
        blob: Path,
        digest: str,
        about: Mapping[str, Any],
        progress: _ProgressBar,
    ) -> None:
        self._server = server
        self._blob = blob
        self._digest = digest
        self._order = {"digest": digest, "size_bytes": blob.stat().st_size, **about}
        self._progress = progress
        self._part_bytes = 0
        self._refusals = 0
        self._stop = threading.Event()

    def run(self) -> None:
        """Send until nothing is missing. Raises LorikeetError."""
        missing, failures = self._missing(), 0
        while missing:
            before = self._progress.arrived
            problem = self._round(missing)
            if problem is None:
                return
            failures = 1 if self._progress.arrived > before else failures + 1
            if failures == _TRIES:
                raise LorikeetError(
                    f"the upload is stuck at {self._progress.shown}: {problem}. The same command "
                    "goes on from there"
                ) from problem
            _pause(failures)
            missing = with_retries(self._missing)

    def _missing(self) -> list[Json]:
        answer = self._server.post("/uploads", self._order)
        missing: list[Json] = answer["missing"]
        self._part_bytes = answer["part_bytes"]
        self._progress.restart(sum(part["size_bytes"] for part in missing))
        return missing

    def _round(self, parts: list[Json]) -> Exception | None:
        """Send these parts. What kept one from arriving, if it may pass; raises what will not."""
        self._stop.clear()
        with ThreadPoolExecutor(_CONNECTIONS) as connections:
            futures = [connections.submit(self._send, part) for part in parts]
            try:
                wait(futures)
            except KeyboardInterrupt:
                self._stop.set()
                connections.shutdown(cancel_futures=True)
                raise
        problems = [error for future in futures if (error := future.exception())]
        for error in problems:
            if not _may_pass(error):
                raise error
        return next((error for error in problems if isinstance(error, LorikeetError)), None)

    def _send(self, part: Json) -> None:
        """Send one part. Raises LorikeetError, _Stopped."""
        number = part["number"]
        with self._blob.open("rb") as file:
            file.seek((number - 1) * self._part_bytes)
            data = file.read(part["size_bytes"])
        md5 = hashlib.md5(data, usedforsecurity=False).digest()
        headers = {
            "content-length": str(len(data)),
            "content-md5": base64.b64encode(md5).decode(),
        }
        chunks = self._chunks(number, data)
        try:
            if part["url"] is None or self._refusals >= _MAX_REFUSALS:
                self._server.send(f"/uploads/{self._digest}/parts/{number}", chunks, headers)
            else:
                self._send_to_store(part["url"], number, chunks, headers)
        except LorikeetError as error:
            self._progress.lost(number)
            if not _may_pass(error):
                self._stop.set()  # the other parts need not be tried
            raise
        self._progress.has_arrived(number)

    def _send_to_store(
        self, url: str, number: int, chunks: Iterator[bytes], headers: Mapping[str, str]
    ) -> None:
        """Raises ServerUnavailable: other addresses may work, or the way through the server."""
        try:
            answer = httpx.put(url, content=chunks, headers=headers, timeout=_TIMEOUT)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            self._refusals += 1
            why = (
                f"status {error.response.status_code}"
                if isinstance(error, httpx.HTTPStatusError)
                else str(error) or type(error).__name__
            )
            raise ServerUnavailable(f"the store did not take part {number}: {why}") from error
        self._refusals = 0

    def _chunks(self, number: int, data: bytes) -> Iterator[bytes]:
        for begin in range(0, len(data), _CHUNK_BYTES):
            if self._stop.is_set():
                raise _Stopped
            chunk = data[begin : begin + _CHUNK_BYTES]
            yield chunk
            self._progress.sent(number, len(chunk))


class _Stopped(Exception):
    """Nobody waits for this part any more."""


def _may_pass(error: BaseException) -> bool:
    """Whether the same request may be answered otherwise in a moment."""
    return isinstance(error, ServerUnavailable | _Stopped) or (
        isinstance(error, LorikeetError) and error.code in _PASSING
    )


def _pause(failures: int) -> None:
    time.sleep(min(_LONGEST_PAUSE_S, _PAUSE_S * 2 ** (failures - 1)))
