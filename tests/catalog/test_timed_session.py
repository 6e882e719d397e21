"""A store that sends a byte now and then is given up like a silent one; a slow one is read."""

import hashlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from lorikeet.catalog.store import s3, timed_session
from lorikeet.catalog.store.object_store import ObjectStore, open_store
from lorikeet.catalog.store.timed_session import TimedBody
from lorikeet.errors import StoreError
from tests.s3_proxy import proxied

MIB = 2**20
FAILS_WITHIN_S = 10


@pytest.fixture
def url(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(timed_session, "WINDOW_S", 0.3)
    monkeypatch.setattr(s3, "_RETRY_WINDOW_S", 1.0)
    return f"{s3_bucket}/{uuid.uuid4().hex}"


@contextmanager
def dripping(
    drips: Callable[[BaseHTTPRequestHandler], bool], piece: int = 1, after: int = 0
) -> Iterator[None]:
    """Send the bodies of the chosen answers in pieces, fifty a second, beyond the first bytes."""
    ended = threading.Event()

    def drip(request: BaseHTTPRequestHandler) -> bool:
        if not drips(request):
            return False
        status, _, body = request.forward()  # type: ignore[attr-defined]
        request.send_response(status)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body[:after])
        try:
            for at in range(after, len(body), piece):
                request.wfile.write(body[at : at + piece])
                if ended.wait(0.02):
                    break
        except OSError:
            pass  # the store has given this connection up
        request.close_connection = True
        return True

    with proxied(drip):
        try:
            yield
        finally:
            ended.set()


def is_read(request: BaseHTTPRequestHandler) -> bool:
    return request.command == "GET"


@pytest.mark.parametrize(
    "read",
    [
        lambda store, _: store.get("blob"),
        lambda store, _: store.first("b"),
        lambda store, _: list(store.list("b")),
        lambda store, folder: store.download("blob", folder / "out"),
    ],
    ids=["get", "first", "list", "download"],
)
def test_an_answer_of_a_byte_now_and_then_fails_within_seconds(
    url: str, tmp_path: Path, read: Callable[[ObjectStore, Path], object]
) -> None:
    open_store(url).put_if_absent("blob", os.urandom(2000))
    with dripping(is_read):
        began_s = time.monotonic()
        with pytest.raises(StoreError, match=r"Read timeout|no data received"):
            read(open_store(url), tmp_path)
        assert time.monotonic() - began_s < FAILS_WITHIN_S


def test_a_download_that_begins_to_drip_resumes_on_another_connection(
    url: str, tmp_path: Path
) -> None:
    (tmp_path / "in").write_bytes(data := os.urandom(3 * MIB))
    open_store(url).put_file("blob", tmp_path / "in")
    begun: list[str] = []

    def the_first(request: BaseHTTPRequestHandler) -> bool:
        if "Range" in request.headers:
            begun.append(request.headers["Range"])
        return len(begun) == 1

    with dripping(the_first, after=MIB):
        digest = open_store(url).download("blob", tmp_path / "out")
    assert digest == hashlib.sha256(data).hexdigest()
    assert begun == [f"bytes=0-{3 * MIB - 1}", f"bytes={MIB}-{3 * MIB - 1}"]


def test_a_slow_but_steady_answer_is_read_to_its_end(url: str) -> None:
    open_store(url).put_if_absent("blob", data := os.urandom(2**18))
    with dripping(is_read, piece=2**12):  # 200 KiB/s at most, over several windows
        assert open_store(url).get("blob") == data


class Quick:
    """Body that is there at once."""

    def read1(self, most: int) -> bytes:
        return b"x"


def test_a_reader_that_pauses_is_no_slow_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_session, "WINDOW_S", 0.05)
    body = TimedBody(Quick(), "http://127.0.0.1/blob")
    for _ in range(4):
        assert body.read(1) == b"x"
        time.sleep(0.05)
