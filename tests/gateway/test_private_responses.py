"""A tenant's stored responses cannot be read, deleted or continued by other tenants.

The OpenAPI document lists all parameters and fields that may name something. One that is in neither
table here fails the first test: add it to the table that applies.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from lorikeet.catalog.records import Scope
from lorikeet.gateway.routes.openapi import document
from tests.gateway.conftest import Gateway
from tests.gateway.test_matrix import appearance

Named = tuple[str, str, str]
"""Method and path of a route, and the parameter of its path or the field of its body."""
RESPONSES = "/v1/responses"
RESPONSE = "/v1/responses/{response_id}"
COUNT = "/v1/responses/input_tokens"


@dataclass(frozen=True)
class Stored:
    """Ids of a stored response."""

    request: str
    item: str

    @property
    def response(self) -> str:
        return f"resp_{self.request}"


NOBODYS = Stored("0" * 32, f"msg_{'0' * 32}_0")


def asked_to_go_on(path: str = RESPONSES, **fields: Any) -> tuple[str, Any]:
    return path, {"model": "tiny", "input": "go on"} | fields


NAMING: Mapping[Named, Callable[[Stored], tuple[str, Any]]] = {
    ("GET", RESPONSE, "response_id"): lambda one: (f"{RESPONSES}/{one.response}", None),
    ("DELETE", RESPONSE, "response_id"): lambda one: (f"{RESPONSES}/{one.response}", None),
    ("GET", f"{RESPONSE}/input_items", "response_id"): lambda one: (
        f"{RESPONSES}/{one.response}/input_items",
        None,
    ),
    ("GET", "/v1/requests/{request_id}", "request_id"): lambda one: (
        f"/v1/requests/{one.request}",
        None,
    ),
    ("POST", RESPONSES, "previous_response_id"): lambda one: asked_to_go_on(
        previous_response_id=one.response
    ),
    ("POST", RESPONSES, "id"): lambda one: asked_to_go_on(
        input=[{"type": "item_reference", "id": one.item}]
    ),
    ("POST", COUNT, "previous_response_id"): lambda one: asked_to_go_on(
        COUNT, previous_response_id=one.response
    ),
    ("POST", COUNT, "id"): lambda one: asked_to_go_on(
        COUNT, input=[{"type": "item_reference", "id": one.item}]
    ),
}
"""Path and body of a request that names a stored response or item, by parameter or field."""
NAMING_NOTHING: set[Named] = {
    ("GET", "/v1/models/{model}", "model"),  # tested by test_matrix.py
    *(  # the tenant's own, tested by test_matrix.py
        (method, path, "file_id")
        for path in ("/v1/files/{file_id}", "/v1/files/{file_id}/content")
        for method in ("GET", "DELETE")
        if (method, path) != ("DELETE", "/v1/files/{file_id}/content")
    ),
    ("POST", "/v1/batches", "input_file_id"),
    ("GET", "/v1/batches/{batch_id}", "batch_id"),
    ("POST", "/v1/batches/{batch_id}/cancel", "batch_id"),
    *(  # the tenant's own, tested by test_matrix.py
        (method, "/v1/adapters/{name}/versions/{digest}", name)
        for method in ("GET", "PUT")
        for name in ("name", "digest")
    ),
    *(("POST", path, "call_id") for path in (RESPONSES, COUNT)),
    *(
        ("POST", path, name)
        for path in (
            *("/v1/chat/completions", "/v1/embeddings"),
            *("/v1/classify", "/v1/score", "/v1/pooling", "/classify", "/score", "/pooling"),
        )
        for name in ("id", "tool_call_id")
    ),
    *(
        ("POST", path, name)
        for path in ("/v1/messages", "/v1/messages/count_tokens")
        for name in ("id", "tool_use_id")
    ),
    ("POST", "/v1/messages", "user_id"),
}
"""Parameters and fields that name something in the same request, or of the client's own."""


def names_in(schema: Any, seen: set[str]) -> Iterator[str]:
    """Yield the names of fields at any depth that may be ids."""
    if isinstance(schema, list):
        for part in schema:
            yield from names_in(part, seen)
    elif isinstance(schema, dict):
        if isinstance(reference := schema.get("$ref"), str) and reference not in seen:
            seen.add(reference)
            yield from names_in(
                document()["components"]["schemas"][reference.rpartition("/")[2]], seen
            )
        for name in schema.get("properties", ()):
            if name == "id" or name.endswith("_id"):
                yield name
        for part in schema.values():
            yield from names_in(part, seen)


def named_in_the_document() -> Iterator[Named]:
    for path, operations in document()["paths"].items():
        for method, operation in operations.items():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path":
                    yield method.upper(), path, parameter["name"]
            for name in names_in(operation.get("requestBody"), set()):
                yield method.upper(), path, name


@pytest.fixture(scope="module")
def others(unchanged: Gateway) -> list[str]:
    """Return keys of the other tenant."""
    _, reading = unchanged.catalog.create_key("globex", {Scope.READ_ONLY}, actor="test")
    return [unchanged.keys["globex"], reading]


def store(gateway: Gateway, text: str, tenant: str = "acme") -> Stored:
    answer = gateway.post(RESPONSES, {"model": "tiny", "input": text}, tenant)
    return Stored(answer.headers["x-request-id"], answer.json()["output"][0]["id"])


def test_every_parameter_that_may_name_something_is_in_a_table() -> None:
    assert set(named_in_the_document()) == NAMING.keys() | NAMING_NOTHING


@pytest.mark.parametrize("named", NAMING, ids=" ".join)
def test_another_tenants_response_looks_missing(
    unchanged: Gateway, others: list[str], named: Named
) -> None:
    secret = secrets.token_hex(16)
    stored, (method, _, _) = store(unchanged, secret), named

    def ask(key: str, one: Stored) -> Any:
        path, body = NAMING[named](one)
        return unchanged.request(method, path, key, json=body)

    calls = len(unchanged.engines.calls)
    for key in others:
        answers = [(ask(key, one), one) for one in (stored, NOBODYS)]
        seen = [appearance(answer, one.request) for answer, one in answers]
        assert seen[0] == seen[1]
        assert answers[0][0].is_client_error
        assert not any(secret in answer.text for answer, _ in answers)
    assert len(unchanged.engines.calls) == calls
    assert ask(unchanged.keys["acme"], stored).is_success, "it is there as before"


def test_another_tenants_item_cannot_be_referenced(unchanged: Gateway) -> None:
    theirs, own = (store(unchanged, "hello", tenant) for tenant in ("acme", "globex"))
    items = [{"type": "item_reference", "id": one.item} for one in (theirs, own)]
    _, body = asked_to_go_on(previous_response_id=own.response, input=items)
    calls = len(unchanged.engines.calls)
    assert unchanged.post(RESPONSES, body, "globex").status_code == 404
    assert len(unchanged.engines.calls) == calls
    assert unchanged.post(RESPONSES, body | {"input": items[1:]}, "globex").is_success
