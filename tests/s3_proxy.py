"""A proxy before the tests' S3 server that can make trouble."""

import http.client
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

Trouble = Callable[[BaseHTTPRequestHandler], bool]
"""Deals with a request before (or instead of) its answer; True if that was the answer."""


class Proxy(BaseHTTPRequestHandler):
    """Passes every request on to the real server, except where the test makes trouble."""

    protocol_version = "HTTP/1.1"
    upstream = ""
    trouble: Trouble

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.forward = lambda: self._ask(body)
        if type(self).trouble(self):
            return
        status, headers, data = self.forward()
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in ("connection", "content-length", "transfer-encoding"):
                self.send_header(name, value)
        told = {name.lower(): value for name, value in headers}.get("content-length", "0")
        self.send_header("Content-Length", told if self.command == "HEAD" else str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _serve  # noqa: N815

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        server = http.client.HTTPConnection(self.upstream, timeout=30)
        try:
            headers = {name: value for name, value in self.headers.items() if name != "Expect"}
            server.request(self.command, self.path, body, headers)
            answer = server.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            server.close()

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def proxied(trouble: Trouble) -> Iterator[None]:
    """Stores that are opened inside reach their server through the troublesome proxy."""
    upstream = os.environ["AWS_ENDPOINT_URL_S3"].removeprefix("http://")
    handler = type("Handler", (Proxy,), {"upstream": upstream, "trouble": staticmethod(trouble)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True  # clients may keep their connections open
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.server_port}")
            yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
