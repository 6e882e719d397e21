"""Tenants' data appears in their own answers and in nothing else that the service writes.

Markers are planted in all kinds of requests, good and bad. All written data is then searched for
them: logs of Ray, of Serve and of our processes, metrics, the store, the cache, admins' answers,
and clients' errors.
"""

import json
import os
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import ray

from demo.tasks import TASKS
from lorikeet.catalog.store.object_store import open_store
from tests.e2e.conftest import Service
from tests.e2e.faulty_replica import faults
from tests.e2e.test_metrics import read

IN_OWN_ERRORS = {"schema's bad type", "schema's bad reference"}
"""Markers allowed in errors: a faulty schema is quoted to its sender."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MODEL = TASKS[0].model
TENANT = TASKS[0].tenant


class Markers:
    """Random words, one for each place in a request."""

    def __init__(self) -> None:
        self._planted: dict[str, str] = {}

    def __call__(self, place: str) -> str:
        return self._planted.setdefault(place, f"zq{secrets.token_hex(8)}")

    def found_in(self, data: bytes) -> set[str]:
        return {place for place, word in self._planted.items() if word.encode() in data}

    def plant(self, place: str, word: str) -> None:
        self._planted[place] = word


@pytest.fixture(scope="module")
def planted(service: Service) -> "Planted":
    """Markers, after all requests have been sent and have ended."""
    return Planted(service)


class Planted:
    """Markers, and the errors that the service returned."""

    def __init__(self, service: Service) -> None:
        self.mark = mark = Markers()
        self.errors: list[tuple[str, bytes]] = []
        self.key = service.tenant_keys[TENANT]
        for tenant, key in service.tenant_keys.items():
            mark.plant(f"{tenant}'s key", key)
        mark.plant("the admin's key", service.admin_key)
        headers = {"authorization": f"Bearer {self.key}"}
        with httpx.Client(base_url=service.url, timeout=60, headers=headers) as client:
            for path, body in well_formed(mark):
                self._send(client, path, json.dumps(body).encode())
            for path, body in refused(mark):
                self._send(client, path, json.dumps(body).encode(), 400)
            for path, content in malformed(mark):
                self._send(client, path, content, 400)
            with faults(requests="raise"):
                body = {"model": MODEL, "prompt": mark("prompt of a request that breaks")}
                self._send(client, COMPLETIONS, json.dumps(body).encode(), 500)
                self._send(client, COMPLETIONS, json.dumps(body | {"stream": True}).encode(), 500)
            self._cancel(client)
            self._send_keys_wrong(service)

    def _send(
        self, client: httpx.Client, path: str, content: bytes, status: int | None = None
    ) -> None:
        headers = {
            "x-session-id": self.mark("session header"),
            "x-request-id": self.mark("request id header"),
            "user-agent": self.mark("user agent"),
            "cookie": self.mark("cookie"),
            "traceparent": self.mark("trace header"),
        }
        answer = client.post(path, content=content, headers=headers)
        if status is not None:
            assert answer.status_code == status, answer.text
        if answer.is_error:
            self.errors.append((answer.text, answer.content + repr(answer.headers).encode()))

    def _cancel(self, client: httpx.Client) -> None:
        body = {"model": MODEL, "prompt": self.mark("prompt of a request that is cancelled")}
        body |= {"max_tokens": 400, "stream": True, "ignore_eos": True, "n": 4}
        with client.stream("POST", COMPLETIONS, json=body) as answer:
            next(answer.iter_bytes())

    def _send_keys_wrong(self, service: Service) -> None:
        """Send keys in unsupported places, and unknown keys."""
        unknown = self.mark("an unknown key")
        for where in (
            {"headers": {"authorization": f"Bearer {unknown}"}},
            {"headers": {"authorization": f"Basic {unknown}"}},
            {"headers": {"authorization": unknown, "x-api-key": unknown}},
            {"params": {"api_key": self.key, "key": unknown}},
        ):
            for url in (f"{service.url}/v1/models", f"{service.admin_url}/admin/v1/keys"):
                answer = httpx.get(url, timeout=30, **where)
                assert answer.status_code == 401
                self.errors.append((answer.text, answer.content))


def well_formed(mark: Markers) -> Iterator[tuple[str, dict[str, object]]]:
    """Requests that are answered, though some features may be refused."""
    chat = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": mark("system message")},
            {"role": "user", "content": mark("user message")},
        ],
        "stop": [mark("stop string")],
        "user": mark("user"),
        "metadata": {"note": mark("metadata")},
        "max_tokens": 8,
    }
    yield CHAT, chat
    yield CHAT, chat | {"stream": True}
    yield CHAT, chat | {"tools": [tool(mark)], "tool_choice": "auto"}
    yield CHAT, chat | {"messages": conversation(mark), "tools": [tool(mark)]}
    yield CHAT, chat | {"response_format": json_schema(mark)}
    yield COMPLETIONS, {"model": MODEL, "prompt": mark("prompt"), "max_tokens": 8, "n": 2}


def refused(mark: Markers) -> Iterator[tuple[str, dict[str, object]]]:
    """Requests that each have one invalid value."""
    message = {"role": "user", "content": mark("message of a refused request")}
    chat = {"model": MODEL, "messages": [message]}
    bad = mark("bad value")
    yield CHAT, chat | {"messages": bad}
    yield CHAT, chat | {"messages": [bad]}
    yield CHAT, chat | {"messages": [message | {"role": bad}]}
    yield CHAT, chat | {"messages": [message | {"content": [{"type": bad}]}]}
    yield CHAT, chat | {"messages": [message | {"content": {"text": bad}}]}
    yield CHAT, chat | {"temperature": bad}
    yield CHAT, chat | {"stop": [bad, 5]}
    yield CHAT, chat | {"stop": [bad * 100]}
    yield CHAT, chat | {"user": [bad]}
    yield CHAT, chat | {"metadata": {"note": [bad]}}
    yield CHAT, chat | {"n": bad}
    yield CHAT, chat | {"stream": bad}
    yield CHAT, chat | {"stream": True, "stream_options": bad}
    yield CHAT, chat | {"audio": bad}
    yield CHAT, chat | {"logit_bias": bad}
    yield CHAT, chat | {"tools": [{"type": bad, "function": {"name": bad}}]}
    yield CHAT, chat | {"tools": bad}
    yield CHAT, chat | {"tools": [tool(mark)], "tool_choice": bad}
    yield CHAT, chat | {"response_format": {"type": bad}}
    yield CHAT, chat | {"response_format": bad_schema(mark)}
    yield COMPLETIONS, {"model": MODEL, "prompt": [bad, 5]}
    yield COMPLETIONS, {"model": MODEL, "prompt": {"text": bad}}
    yield COMPLETIONS, {"model": MODEL, "prompt": bad * 2000}


def malformed(mark: Markers) -> Iterator[tuple[str, bytes]]:
    """Bodies that are not valid JSON or not valid UTF-8."""
    word = mark("malformed body").encode()
    yield CHAT, b'{"model": "%s' % word
    yield CHAT, word
    yield CHAT, b'{"messages": [%s]}' % word
    yield CHAT, b'["%s"]' % word
    yield COMPLETIONS, b'{"prompt": "%s\xff\xfe"}' % word
    yield COMPLETIONS, b'{"prompt": "%s\\ud800"}' % word


def tool(mark: Markers) -> dict[str, object]:
    properties = {mark("tool's parameter").replace("-", "_"): {"type": "string"}}
    function = {
        "name": mark("tool's name"),
        "description": mark("tool's description"),
        "parameters": {"type": "object", "properties": properties},
    }
    return {"type": "function", "function": function}


def conversation(mark: Markers) -> list[dict[str, object]]:
    function = {
        "name": mark("tool's name"),
        "arguments": json.dumps({"text": mark("tool call's arguments")}),
    }
    call = {"id": mark("tool call's id"), "type": "function", "function": function}
    return [
        {"role": "user", "content": mark("user message")},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": mark("tool call's id"), "content": mark("tool's answer")},
    ]


def json_schema(mark: Markers) -> dict[str, object]:
    properties = {mark("schema's property"): {"enum": [mark("schema's value")]}}
    schema = {"type": "object", "properties": properties}
    named = {"name": mark("schema's name"), "schema": schema}
    return {"type": "json_schema", "json_schema": named}


def bad_schema(mark: Markers) -> dict[str, object]:
    schema = {"type": mark("schema's bad type"), "$ref": mark("schema's bad reference")}
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


def test_no_error_quotes_the_request(planted: Planted) -> None:
    quoting = {
        text: found
        for text, data in planted.errors
        if (found := planted.mark.found_in(data) - IN_OWN_ERRORS)
    }
    assert quoting == {}


def test_logs_cache_and_store_contain_nothing_of_the_requests(
    service: Service, planted: Planted
) -> None:
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    events = b"".join(file.read_bytes() for file in logs.glob("worker-*.err"))
    assert b'"event": "generate_failed"' in events, "our own events are looked for elsewhere"
    places = {"logs": logs, "cache": Path(os.environ["LORIKEET_CACHE_DIR"])}
    found = {}
    for name, folder in places.items():
        files = [file for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]
        assert files
        for file in files:
            if marks := planted.mark.found_in(file.read_bytes()):
                found[f"{name}: {file.relative_to(folder)}"] = marks
    store = open_store(service.catalog)
    for key in store.list(""):
        if marks := planted.mark.found_in(store.get(key)):
            found[f"store: {key}"] = marks
    assert found == {}


def test_metrics_and_admin_answers_contain_nothing_of_the_requests(
    service: Service, planted: Planted
) -> None:
    said = {path: service.admin("GET", path).content for path in ("/status", "/log", "/keys")}
    said["/metrics"] = read(service)
    for node in ray.nodes():
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        said[url] = httpx.get(url, timeout=30).content
    assert all(said.values())
    assert {
        place: marks for place, data in said.items() if (marks := planted.mark.found_in(data))
    } == {}


def test_a_tenants_cached_prompt_is_never_found_by_another_tenant(service: Service) -> None:
    """Compare requests of two tenants with the same adapter and prompt.

    With a shared cache a tenant could guess another's prompts: a hit is faster and is counted
    in usage.
    """
    shared = next(task for task in TASKS if task.shared)
    other = next(tenant for tenant in service.tenant_keys if tenant != shared.tenant)
    prompt = secrets.token_hex(200)

    def cached(tenant: str) -> tuple[str, int]:
        answer = service.client(tenant).completions.with_raw_response.create(
            model=shared.model, prompt=prompt, max_tokens=1
        )
        details = answer.parse().usage.prompt_tokens_details
        return answer.headers["x-lorikeet-replica"], details.cached_tokens

    assert cached(shared.tenant)[1] == 0
    found: set[str] = set()
    everywhere = {replica["replica"] for replica in service.replicas()}
    with ThreadPoolExecutor(24) as pool:
        for _ in range(10):
            own = list(pool.map(cached, [shared.tenant] * 24))
            found |= {replica for replica, tokens in own if tokens > 0}
            if found == everywhere:
                break
    assert found == everywhere, "its own tenant finds it, on whichever replica"
    assert cached(other)[1] == 0
