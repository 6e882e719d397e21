"""Connections of a key limited to one request, whose bodies never come; Serve has limits too."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.e2e.conftest import Service

pytestmark = pytest.mark.ray

CONNECTIONS = 2000  # more than the 1,792 that Serve gives a gateway of three replicas at once
CHAT = "/v1/chat/completions"


@contextmanager
def unfinished(url: httpx.URL, key: str) -> Iterator[None]:
    """Open connections with a request of which one byte in 1,000 has been sent."""
    head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {key}\r\n"
    opened: list[socket.socket] = []
    try:
        for _ in range(CONNECTIONS):
            opened.append(socket.create_connection((url.host, url.port or 80), timeout=30))
            opened[-1].sendall(f"{head}content-length: 1000\r\n\r\n{{".encode())
        yield
    finally:
        for each in opened:
            each.close()


def test_unfinished_bodies_keep_no_other_client_out(service: Service) -> None:
    tenant = {"tenant": "sluggish", "max_concurrent": 1}
    service.admin("POST", "/tenants", json=tenant).raise_for_status()
    made = service.admin("POST", "/tenants/sluggish/keys", json={}).raise_for_status()
    with (
        unfinished(httpx.URL(service.url), made.json()["key"]),
        httpx.Client(base_url=service.url, timeout=30) as other,
    ):
        for _ in range(5):
            assert other.get("/healthz").status_code == 200
            headers = {"authorization": f"Bearer {service.tenant_keys['kestrel']}"}
            body = {"model": "lorikeet-demo", "prompt": "a few words", "max_tokens": 2}
            answer = other.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
