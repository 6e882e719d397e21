"""Proxy in front of the tests' S3 server that injects faults."""

import http.client
import os
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

Fault = Callable[[BaseHTTPRequestHandler], bool]
"""Hook called before a request is forwarded; True if the hook has answered the request."""


class Proxy(BaseHTTPRequestHandler):
    """Handler that forwards requests to the real server unless the fault answers them."""

    protocol_version = "HTTP/1.1"
    upstream = ""
    fault: Fault

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.forward = lambda: self._ask(body)
        if type(self).fault(self):
            return
        status, headers, data = self.forward()
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in ("connection", "content-length", "transfer-encoding"):
                self.send_header(name, value)
        length = {name.lower(): value for name, value in headers}.get("content-length", "0")
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(data)))
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
def proxied(fault: Fault, certificate: Path | None = None) -> Iterator[None]:
    """Route stores that are opened inside the `with` block through a proxy with this fault.

    certificate: PEM file of a key and a certificate for 127.0.0.1, with which the proxy serves TLS;
    None for plain HTTP.
    """
    upstream = os.environ["AWS_ENDPOINT_URL_S3"].removeprefix("http://")
    handler = type("Handler", (Proxy,), {"upstream": upstream, "fault": staticmethod(fault)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True  # clients may keep their connections open
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        # Each connection's thread shakes hands at its first read: in `accept`, one would block all.
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as environment:
            scheme = "http" if certificate is None else "https"
            environment.setenv("AWS_ENDPOINT_URL_S3", f"{scheme}://127.0.0.1:{server.server_port}")
            if certificate is not None:
                environment.setenv("AWS_CA_BUNDLE", str(certificate))
            yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
