"""Resumable upload of a blob, in parallel parts, with a progress bar.

The server identifies an upload by the blob's digest. It lists the missing parts, each with a
presigned address in the store, or without one: then the part goes to the server itself.
"""

import base64
import hashlib
import sys
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
from lorikeet.cli.output import is_shown, print_error
from lorikeet.errors import LorikeetError, NotFound, StoreError, Unavailable
from lorikeet.sizes import show_size

_CONNECTIONS = 4
_CHUNK_BYTES = 1 << 16
_TIMEOUT = httpx.Timeout(60.0, connect=5.0)
_TRIES = 7  # in a row in which no part arrives: 45 s, enough for a gateway's restart
_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 15.0
_MAX_REFUSALS = 2  # by the store, in a row, before parts go through the server
# not_found: another register of the same blob has just completed the upload that both were sending
_TRANSIENT = (LorikeetError.code, NotFound.code, StoreError.code, Unavailable.code)
_INTERRUPTED = 130  # what shells expect after Ctrl-C

T = TypeVar("T")


def send_blob(
    server: AdminClient, blob: Path, digest: str, about: Mapping[str, Any], *, quiet: bool
) -> None:
    """Upload the parts of a file that the server lacks.

    Raises LorikeetError if the server refuses them, or no part arrives in _TRIES attempts in a row.

    Ctrl-C ends the command, and prints how to resume.

    blob: the file.
    digest: its SHA-256, by which the server identifies the upload.
    about: tenant and base model, which the server checks before any byte is sent.
    quiet: show no progress bar; otherwise one is shown if stderr is a terminal.
    """
    with _ProgressBar(blob.stat().st_size, quiet=quiet) as progress:
        try:
            _BlobUpload(server, blob, digest, about, progress).run()
        except KeyboardInterrupt:
            progress.stop()
            print_error(f"interrupted at {progress.shown}: run the same command again to resume")
            raise typer.Exit(_INTERRUPTED) from None


def with_retries(call: Callable[[], T]) -> T:
    """Make an idempotent call, up to _TRIES times while it raises ServerUnavailable."""
    for attempt in range(1, _TRIES):
        try:
            return call()
        except ServerUnavailable:
            _pause(attempt)
    return call()


class _ProgressBar:
    """Progress bar over numbered parts, for any thread. Draws only if stderr is a terminal.

    arrived: bytes of complete parts.
    """

    def __init__(self, total: int, *, quiet: bool) -> None:
        self.arrived = 0
        self._total = total
        self._sent: dict[int, int] = {}  # part → bytes sent, of unfinished parts
        self._lock = threading.Lock()
        self._progress = Progress(
            TextColumn("Uploading"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=quiet or not is_shown(sys.stderr),
        )
        self._bar = self._progress.add_task("upload", total=total)

    @property
    def shown(self) -> str:
        """Progress in words: 3 MiB of 8 MiB."""
        return f"{show_size(self.arrived)} of {show_size(self._total)}"

    def restart(self, missing: int) -> None:
        """Start over: show `missing` bytes as still to send, and forget the parts that were being
        sent.
        """
        with self._lock:
            self._sent.clear()
            self.arrived = self._total - missing
            self._draw()

    def sent(self, number: int, count: int) -> None:
        """Count more bytes of a part as sent."""
        with self._lock:
            self._sent[number] = self._sent.get(number, 0) + count
            self._draw()

    def has_arrived(self, number: int) -> None:
        """Count a part's sent bytes as arrived."""
        with self._lock:
            self.arrived += self._sent.pop(number, 0)

    def lost(self, number: int) -> None:
        """Discard a part's sent bytes: the part has to be sent again."""
        with self._lock:
            self._sent.pop(number, None)
            self._draw()

    def stop(self) -> None:
        """Remove the bar."""
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
        """Send parts until the server lacks none.

        Raises LorikeetError if the server refuses them or no part arrives in _TRIES attempts.
        """
        missing, failures = self._missing(), 0
        while missing:
            before = self._progress.arrived
            problem = self._round(missing)
            if problem is None:
                return
            failures = 1 if self._progress.arrived > before else failures + 1
            if failures == _TRIES:
                raise LorikeetError(
                    f"the upload is stuck at {self._progress.shown}: {problem}. Run the same "
                    "command again to resume"
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
        """Send parts in parallel; return an error that a repetition may overcome, or None.

        parts: JSON of the parts, from the server: number, size_bytes and url.

        Raises any other error.
        """
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
            if not _is_transient(error):
                raise error
        return next((error for error in problems if isinstance(error, LorikeetError)), None)

    def _send(self, part: Json) -> None:
        """Send one part, to its URL at the store or, without one, to the server.

        part: JSON of the part, from the server: number, size_bytes and url.

        Raises LorikeetError if it is not taken, _Stopped if sending is stopped.
        """
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
            if not _is_transient(error):
                self._stop.set()  # the other parts would be sent in vain
            raise
        self._progress.has_arrived(number)

    def _send_to_store(
        self, url: str, number: int, chunks: Iterator[bytes], headers: Mapping[str, str]
    ) -> None:
        """Send a part to the store by its presigned URL.

        number: number of the part, for the progress bar.

        Raises ServerUnavailable: a later attempt with new URLs may still work.
        """
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
    """Raised when sending a part is stopped, by Ctrl-C or the failure of another part."""


def _is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed in a moment."""
    return isinstance(error, ServerUnavailable | _Stopped) or (
        isinstance(error, LorikeetError) and error.code in _TRANSIENT
    )


def _pause(failures: int) -> None:
    time.sleep(min(_LONGEST_PAUSE_S, _PAUSE_S * 2 ** (failures - 1)))
