"""Steps of a generate request through GenerateEndpoint, without a server."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from lorikeet.apis.body import B
from lorikeet.apis.chat.request import ChatRequest
from lorikeet.apis.completions.request import CompletionRequest
from lorikeet.apis.request import ApiRequest
from lorikeet.apis.responses.request import ResponsesRequest
from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import Scope
from lorikeet.catalog.store.local import LocalStore
from lorikeet.errors import InvalidInput, InvalidKey, RateLimited, UnknownModel
from lorikeet.gateway.auth import RequestAuthenticator
from lorikeet.gateway.body import LARGE_BYTES, LargeBodies
from lorikeet.gateway.catalog_view import GatewayCatalogView
from lorikeet.gateway.generate import GenerateEndpoint
from lorikeet.gateway.pushing.pushed_versions import PushedVersions
from lorikeet.gateway.services import ServedModel, Services
from lorikeet.gateway.stored_responses import StoredResponses
from lorikeet.request_log.request_log import RequestLog
from lorikeet.tenancy.limit_shares import LimitShares
from lorikeet.tenancy.monthly_budget import MonthlyBudget
from lorikeet.tenancy.rate_limiter import RateLimiter
from lorikeet.tenancy.read_limiter import ReadLimiter
from tests.gateway.conftest import LIMITS, SHAPE, ReplayEngines, chat, encoders_of

KINDS = {
    ChatRequest: chat("tiny"),
    CompletionRequest: {"model": "tiny", "prompt": "hello there"},
    ResponsesRequest: {"model": "tiny", "input": "hello there"},
}


class NotingBodies(LargeBodies):
    """LargeBodies that records the tenants whose bodies it parses."""

    def __init__(self) -> None:
        super().__init__()
        self.tenants: list[str] = []

    async def parse_json(self, request: Request, body: bytes, schema: type[B], tenant: str) -> B:
        self.tenants.append(tenant)
        return await super().parse_json(request, body, schema, tenant)


class Walks:
    """A gateway whose tenant may send one request a minute, or `requests_per_min`."""

    def __init__(self, folder: Path, requests_per_min: int = 1) -> None:
        catalog = AdapterCatalog.init(LocalStore(folder))
        catalog.create_tenant("acme", requests_per_min=requests_per_min, actor="test")
        _, self.key = catalog.create_key("acme", {Scope.INFER}, actor="test")
        catalog.reader.refresh()
        self.engines, self.bodies = ReplayEngines(), NotingBodies()
        self._services = Services(
            catalog,
            {"tiny": ServedModel(SHAPE)},
            LIMITS,
            self.engines,
            encoders_of(self.engines),
        )

    def answer(
        self, kind: type[ApiRequest], *bodies: Any, key: str | None = None
    ) -> list[dict[str, Any]]:
        """Return the answers to requests that are sent one after the other."""

        async def answers() -> list[dict[str, Any]]:
            endpoint = self._endpoint(kind)
            return [await _one(endpoint, key or self.key, body) for body in bodies]

        return asyncio.run(answers())

    def answer_at_once(self, count: int, size: int, max_requests: int) -> list[dict[str, Any]]:
        """Return the answers to `count` concurrent chats of `size` bytes."""

        async def answers() -> list[dict[str, Any]]:
            endpoint = self._endpoint(ChatRequest, max_requests)
            each = (_one(endpoint, self.key, chat("tiny"), size) for _ in range(count))
            return await asyncio.gather(*each)

        return asyncio.run(answers())

    def _endpoint(
        self, kind: type[ApiRequest], max_requests: int | None = None
    ) -> GenerateEndpoint:
        services = self._services
        return GenerateEndpoint(
            kind,
            services,
            RequestAuthenticator(
                services,
                GatewayCatalogView(services.catalog.reader, interval_s=3600.0),
                PushedVersions(),
            ),
            RateLimiter(LimitShares("g0", 1, 0.0), MonthlyBudget(None), max_requests),
            RequestLog(services.peers),
            StoredResponses(services.responses, services.metrics),
            ReadLimiter(),
            self.bodies,
        )


async def _one(endpoint: GenerateEndpoint, key: str, body: Any, size: int = 0) -> dict[str, Any]:
    messages = [{"type": "http.request", "body": json.dumps(body).encode().ljust(size)}]
    sent: list[Any] = []

    async def receive() -> Any:
        if messages:
            return messages.pop()
        return await asyncio.Event().wait()  # the client stays

    async def send(message: Any) -> None:
        sent.append(message)

    request = Request(
        {
            "type": "http",
            "method": "POST",
            "path": "/",
            "headers": [(b"authorization", f"Bearer {key}".encode())],
            "state": {"request_id": "a" * 32},
        },
        receive,
    )
    response = await endpoint.answer(request)
    assert not sent  # a refusal has its own status
    await response(request.scope, receive, send)
    return dict(json.loads(sent[1]["body"]))


@pytest.fixture
def walks(tmp_path: Path) -> Walks:
    return Walks(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_request_takes_the_same_steps(walks: Walks, kind: type[ApiRequest]) -> None:
    (answer,) = walks.answer(kind, KINDS[kind])
    assert "hello there" in str(answer.get("choices") or answer["output"])
    (base_model, call) = walks.engines.calls[-1]
    assert base_model == "tiny"
    assert (call.tenant, call.scheduling.tenant) == ("acme", "acme")
    assert walks.bodies.tenants == ["acme"]


def test_a_bad_key_is_refused_first(walks: Walks) -> None:
    with pytest.raises(InvalidKey):
        walks.answer(ChatRequest, "no object", key="lk_nobody")


def test_limits_are_checked_before_the_body(walks: Walks) -> None:
    with pytest.raises(RateLimited):
        walks.answer(ChatRequest, chat("tiny"), "no object")
    assert len(walks.engines.calls) == 1


def test_the_body_is_parsed_before_its_model_is_looked_up(walks: Walks) -> None:
    with pytest.raises(InvalidInput, match="n"):
        walks.answer(ChatRequest, chat("acme/absent", n=0))
    assert not walks.engines.calls


def test_an_unknown_model_reaches_no_replica(walks: Walks) -> None:
    with pytest.raises(UnknownModel):
        walks.answer(ChatRequest, chat("acme/absent"))
    assert not walks.engines.calls


def test_large_bodies_waiting_to_be_parsed_do_not_count_as_arriving(tmp_path: Path) -> None:
    walks = Walks(tmp_path, requests_per_min=100)
    answers = walks.answer_at_once(9, LARGE_BYTES, max_requests=10)  # waits for 5 bodies
    assert len(answers) == len(walks.engines.calls) == 9
