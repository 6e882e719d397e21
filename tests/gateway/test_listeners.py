"""Paths that a gateway's two listeners pass on, and start and end of the admin listener."""

import asyncio
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.testclient import TestClient, WebSocketDenialResponse

from loadtest.ports import free_port
from lorikeet.addresses import Address
from lorikeet.errors import InvalidSetting
from lorikeet.gateway import listeners
from lorikeet.gateway.app import RequestMiddleware
from lorikeet.gateway.error_responses import add_error_handlers
from lorikeet.gateway.listeners import AdminListener, PublicListener
from tests.gateway.conftest import listening
from tests.waiting import eventually

# Each request comes on a connection of its own, or would stay with the gateway it met first.
CLIENT = httpx.Client(headers={"connection": "close"}, timeout=30)
PUBLIC = ("/healthz", "/readyz", "/health", "/v1/models", "/v1/a/b", "/ui", "/ui/page.js")
NOT_PUBLIC = (
    "/", "/v1", "/v1x", "/admin", "/admin/v1/status", "/metrics", "/uix", "/docs", "/openapi.json",
    "//admin/v1/status", "//v1/models", "/healthz/", "/V1/models", "/admin/v1/status?/v1/",
    "/admin/../v1/models", "/./v1/models",
)  # fmt: skip


@pytest.fixture
def address() -> Address:
    return Address("127.0.0.1", free_port())


def application(name: str) -> FastAPI:
    """Answers any path: with its name, the size of the body, and after how long it was told to."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.add_middleware(RequestMiddleware)
    add_error_handlers(app)

    @app.api_route("/{path:path}", methods=["GET", "PUT"])
    async def answer(request: Request, wait_s: float = 0) -> dict[str, object]:
        size = sum([len(chunk) async for chunk in request.stream()])
        await asyncio.sleep(wait_s)
        return {"name": name, "bytes": size}

    return app


def test_a_websocket_is_refused_by_426() -> None:
    with pytest.raises(WebSocketDenialResponse) as refused:
        TestClient(application("a")).websocket_connect("/v1/responses").__enter__()
    assert refused.value.status_code == 426
    assert refused.value.headers["upgrade"] == "HTTP/1.1"
    assert refused.value.json()["error"]["code"] == "upgrade_required"


@contextmanager
def gateway(name: str, address: Address) -> Iterator[str]:
    """A gateway with both listeners; the address of its public one."""
    app = application(name)
    AdminListener(address).open_with(app)
    with listening(PublicListener(app)) as url:
        yield url


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/v1/models", lambda error: error["code"]),
        ("/v1/messages", lambda error: error["details"]["error_code"]),
    ],
)
def test_a_request_that_the_end_of_its_gateway_cuts_gets_its_apis_error(
    path: str,
    code: Callable[[Any], str],
    address: Address,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listeners, "_LAST_REQUESTS_S", 0.1)
    with ThreadPoolExecutor(1) as pool:
        with gateway("a", address):
            cut = pool.submit(CLIENT.get, f"http://{address}{path}?wait_s=20")
            time.sleep(0.5)  # until the request has arrived
        answer = cut.result()
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert code(answer.json()["error"]) == "unavailable"


@pytest.mark.parametrize("path", PUBLIC)
def test_tenants_reach_their_api(path: str, address: Address) -> None:
    with gateway("a", address) as public:
        assert CLIENT.get(public + path).json()["name"] == "a"


def test_tenants_reach_only_their_own_paths(address: Address) -> None:
    with gateway("a", address) as public:
        for path in NOT_PUBLIC:
            status, body, ids = raw_get(public, path)
            assert status == 404, path
            assert b'"code":"not_found"' in body
            assert len(ids) == 1


def test_tenants_reach_further_paths_if_these_are_given() -> None:
    with listening(PublicListener(application("a"), paths={"/tokenize"})) as url:
        assert [raw_get(url, path)[0] for path in ("/tokenize", "/tokenize/", "/uix")] == [
            *(200, 404, 404),
        ]
    with listening(PublicListener(application("a"), prefixes={"/api/v1/"})) as url:
        paths = "/api/v1/asample", "/api/v1/samplers/a", "/v1/models", "/api/v2/asample", "/uix"
        assert [raw_get(url, path)[0] for path in paths] == [200, 200, 200, 404, 404]


def raw_get(url: str, path: str) -> tuple[int, bytes, list[str]]:
    """The answer to a path that is sent as it stands."""
    connection = http.client.HTTPConnection(httpx.URL(url).netloc.decode())
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read(), answer.headers.get_all("x-request-id", [])


def test_the_admin_listener_serves_every_path(address: Address) -> None:
    with gateway("a", address):
        for path in (*PUBLIC, "/admin/v1/status", "/metrics"):
            answer = CLIENT.get(f"http://{address}{path}")
            assert answer.json()["name"] == "a"
            assert len(answer.headers.get_list("x-request-id")) == 1


def test_a_path_is_judged_without_its_root_path(address: Address) -> None:
    async def ask(path: str) -> int:
        transport = httpx.ASGITransport(PublicListener(application("a")), root_path="/two")
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
            return (await client.get(path)).status_code

    assert asyncio.run(ask("/two/v1/models")) == 200
    assert asyncio.run(ask("/two/admin/v1/status")) == 404


def test_connections_are_refused_before_the_start_and_after_the_end(address: Address) -> None:
    listener = AdminListener(address)
    with pytest.raises(httpx.ConnectError):
        CLIENT.get(f"http://{address}/")
    app = application("a")
    listener.open_with(app)
    with listening(PublicListener(app)):
        assert CLIENT.get(f"http://{address}/").is_success
    with pytest.raises(httpx.ConnectError):
        CLIENT.get(f"http://{address}/")


def test_an_address_in_use_is_refused_with_the_remedy(address: Address) -> None:
    with (
        socket.create_server(address),
        pytest.raises(InvalidSetting, match=f"LORIKEET_ADMIN_ADDRESS={address}: .*in use: stop"),
    ):
        AdminListener(address)


def test_an_address_of_another_machine_is_refused(address: Address) -> None:
    with pytest.raises(InvalidSetting, match="another address of this machine"):
        AdminListener(Address("198.51.100.1", address.port))


def test_gateways_of_one_host_share_the_address(address: Address) -> None:
    with ExitStack() as second, gateway("a", address):
        second.enter_context(gateway("b", address))
        names = {CLIENT.get(f"http://{address}/").json()["name"] for _ in range(24)}
        assert names == {"a", "b"}


def test_an_ending_gateway_finishes_its_requests_and_its_successor_takes_new_ones(
    address: Address,
) -> None:
    url, ended = f"http://{address}/?wait_s=1", []
    with ExitStack() as second:
        with gateway("a", address):
            asked = threading.Thread(target=lambda: ended.append(CLIENT.get(url).json()["name"]))
            asked.start()
            until_connected(address)
            second.enter_context(gateway("b", address))
        asked.join()
        assert ended == ["a"]
        assert {CLIENT.get(f"http://{address}/").json()["name"] for _ in range(16)} == {"b"}


def until_connected(address: Address) -> None:
    """Until somebody's connection to it is established."""
    from psutil import CONN_ESTABLISHED, Process

    while not any(
        each.status == CONN_ESTABLISHED and each.laddr == tuple(address)
        for each in Process().net_connections("tcp")
    ):
        pass


def test_large_bodies_pass(address: Address) -> None:
    with gateway("a", address):
        answer = CLIENT.put(f"http://{address}/admin/v1/upload", content=bytes(16 << 20))
    assert answer.json()["bytes"] == 16 << 20


def test_an_address_may_be_ipv6(address: Address) -> None:
    six = Address("::1", address.port)
    try:
        socket.create_server(six, family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with gateway("a", six):
        assert CLIENT.get(f"http://{six}/metrics").json()["name"] == "a"


def test_a_full_gateway_still_answers_health_checks() -> None:
    app = application("a")
    with listening(PublicListener(app, max_requests=2)) as public:
        slow = [
            threading.Thread(target=CLIENT.get, args=[f"{public}/v1/models?wait_s=4"])
            for _ in range(2)
        ]
        for each in slow:
            each.start()
        assert eventually(lambda: CLIENT.get(f"{public}/v1/models").status_code == 503)
        refused = CLIENT.get(f"{public}/v1/models")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "overloaded"
        assert len(refused.headers["x-request-id"]) == 32
        assert CLIENT.get(f"{public}/healthz").status_code == 200
        for each in slow:
            each.join()
        assert CLIENT.get(f"{public}/v1/models").status_code == 200
