"""Stored responses: continued, looked up, deleted and expired."""

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from lorikeet.apis.responses.answer import ResponseEventStream
from lorikeet.catalog.store.local import LocalStore
from lorikeet.errors import StoreError
from lorikeet.gateway import stored_responses
from lorikeet.gateway.app import create_app
from lorikeet.gateway.services import Services
from lorikeet.protocol.messages import Call, FinalUsage, Refusal
from lorikeet.response_store import (
    MAX_CONVERSATIONS,
    MAX_STORED_BYTES,
    PREFIX,
    ResponseStore,
    StoredResponse,
    clean_up,
)
from lorikeet.text.choice import Ending
from tests.gateway.conftest import (
    LIMITS,
    Gateway,
    Items,
    ReplayEngines,
    demo_encoder,
    header,
    listening,
    repeat,
    serving,
)
from tests.gateway.scripted_replica import Script, ScriptedReplica
from tests.gateway.test_bad_requests import error_of
from tests.waiting import eventually

RESPONSES = "/v1/responses"
LIFETIME_S = 3600.0
LOOK: dict[str, Any] = {"type": "function", "name": "look", "parameters": {"type": "object"}}
LAST = ("response.completed", "response.incomplete")
ASK = {"model": "tiny", "input": "one two"}


class Away(LocalStore):
    """A store that can be made unreachable or slow. reads: number of responses read."""

    fails = False
    slow_s = 0.0
    reads = 0

    def get(self, key: str) -> bytes:
        self.reads += key.startswith(PREFIX)
        return super().get(key)

    def put_if_absent(self, key: str, data: bytes) -> None:
        if self.fails and key.startswith(PREFIX):
            raise StoreError("the store is away")
        time.sleep(self.slow_s)
        super().put_if_absent(key, data)


class Clock:
    """Unix time that a test moves."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Away:
    return Away(tmp_path_factory.mktemp("responses") / "store")


@pytest.fixture(scope="module")
def _storing(
    tmp_path_factory: pytest.TempPathFactory, store: Away, clock: Clock
) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    with serving(folder, store, LIFETIME_S, clock) as running:
        yield running


@pytest.fixture
def storing(_storing: Gateway, store: Away, clock: Clock) -> Gateway:
    """Return the module's gateway, with no response stored and a reachable store."""
    vars(_storing.engines).update(vars(ReplayEngines()))
    vars(store).update(fails=False, slow_s=0.0, reads=0)
    clock.ahead_s = 0.0
    for key in list(store.list(PREFIX)):
        store.delete(key)
    return _storing


@pytest.fixture
def replica(storing: Gateway, tmp_path: Path) -> ScriptedReplica:
    scripted = ScriptedReplica(tmp_path)
    storing.engines.replay = scripted.writes("so it is")
    return scripted


def said(call: Call) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in call.messages]


@pytest.mark.usefixtures("replica")
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_continues_a_stored_one_without_its_instructions(
    storing: Gateway, stream: bool
) -> None:
    client = storing.openai()
    asked: Any = {"model": "tiny", "stream": stream}

    def create(**more: Any) -> Any:
        answer = client.responses.create(**asked, **more)
        return [*answer][-1].response if stream else answer

    first = create(input="one two", instructions="Be brief.")
    assert first.store is True
    second = create(input="three", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    create(input="four", previous_response_id=second.id, instructions="Be kind.")
    assert said(storing.engines.last) == [
        ("system", "Be kind."),
        ("user", "one two"),
        ("assistant", "so it is"),
        ("user", "three"),
        ("assistant", "so it is"),
        ("user", "four"),
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tools_output_answers_a_call_of_the_response_before(
    storing: Gateway, replica: ScriptedReplica, stream: bool
) -> None:
    called = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
    storing.engines.replay = replica.writes(called)
    client = storing.openai()
    asked: Any = {"model": "tiny", "input": "hi", "tools": [LOOK], "stream": stream}
    answer: Any = client.responses.create(**asked)
    first = [*answer][-1].response if stream else answer
    output: Any = {
        "type": "function_call_output",
        "call_id": first.output[0].call_id,
        "output": "nothing",
    }
    client.responses.create(model="tiny", input=[output], previous_response_id=first.id)
    _, assistant, tool = storing.engines.last.messages
    assert assistant["tool_calls"][0]["function"] == {"name": "look", "arguments": {"at": "é"}}
    assert tool["content"] == "nothing"
    wrong = {"model": "tiny", "input": [output | {"call_id": "other"}]}
    refused = storing.post(RESPONSES, wrong | {"previous_response_id": first.id})
    assert error_of(refused, 400)["param"] == "input"


def reference(item_id: str) -> dict[str, str]:
    return {"type": "item_reference", "id": item_id}


@pytest.mark.usefixtures("replica")
@pytest.mark.parametrize("stream", [False, True])
def test_an_item_reference_stands_for_a_stored_item(
    storing: Gateway, store: Away, stream: bool
) -> None:
    client = storing.openai()

    def create(*items: Any) -> Any:
        answer: Any = client.responses.create(model="tiny", input=[*items], stream=stream)
        return [*answer][-1].response if stream else answer

    def user(text: str) -> Any:
        return {"role": "user", "content": text}

    first = create(user("one two"))
    (asked,) = client.responses.input_items.list(first.id)
    second = create(reference(asked.id), reference(first.output[0].id), user("three"))
    listed = [item.id for item in client.responses.input_items.list(second.id, order="asc")]
    assert listed[:2] == [asked.id, first.output[0].id]
    store.reads = 0
    create(*map(reference, listed), reference(second.output[0].id), user("four"))
    assert store.reads == 1, "the last one's response has the others too"
    assert said(storing.engines.last) == [
        ("user", "one two"),
        ("assistant", "so it is"),
        ("user", "three"),
        ("assistant", "so it is"),
        ("user", "four"),
    ]


@pytest.mark.usefixtures("replica")
def test_an_item_is_referenced_once(storing: Gateway) -> None:
    client = storing.openai()
    asked: Any = client.responses.create(model="tiny", input="one two")
    twice: Any = [reference(asked.output[0].id)] * 2
    with pytest.raises(openai.BadRequestError, match="several item_references: want one"):
        client.responses.create(model="tiny", input=twice)


@pytest.mark.usefixtures("replica")
def test_a_tools_output_answers_a_call_that_is_referenced(
    storing: Gateway, replica: ScriptedReplica
) -> None:
    called = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
    storing.engines.replay = replica.writes(called)
    client = storing.openai()
    tools: Any = [LOOK]
    (call,) = client.responses.create(model="tiny", input="hi", tools=tools).output
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "nothing"}
    turns: Any = [{"role": "user", "content": "hi"}, reference(call.id), output]
    client.responses.create(model="tiny", input=turns, tools=tools)
    _, assistant, tool = storing.engines.last.messages
    assert assistant["tool_calls"][0]["function"] == {"name": "look", "arguments": {"at": "é"}}
    assert tool["content"] == "nothing"


def test_items_of_a_few_conversations_can_be_referenced(storing: Gateway) -> None:
    answers = [storing.post(RESPONSES, ASK).json() for _ in range(MAX_CONVERSATIONS + 1)]
    items = [reference(answer["output"][0]["id"]) for answer in answers]
    assert storing.post(RESPONSES, ASK | {"input": items[1:]}).is_success
    asked = len(storing.engines.calls)
    refused = storing.post(RESPONSES, ASK | {"input": items})
    assert "send some of them in full" in error_of(refused, 400)["message"]
    assert len(storing.engines.calls) == asked


@pytest.mark.usefixtures("replica")
@pytest.mark.parametrize("stream", [False, True])
def test_a_stored_response_is_returned_unchanged_until_it_is_deleted(
    storing: Gateway, stream: bool
) -> None:
    client = storing.openai()
    answer: Any = client.responses.create(model="tiny", input="one two", stream=stream)
    created = [*answer][-1].response if stream else answer
    assert client.responses.retrieve(created.id) == created
    client.responses.delete(created.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(created.id)


@pytest.mark.usefixtures("replica")
def test_input_items_come_in_pages_the_newest_first(storing: Gateway) -> None:
    client = storing.openai()
    turns: Any = [{"role": "user", "content": str(index)} for index in range(3)]
    first = client.responses.create(model="tiny", input=turns)
    second = client.responses.create(model="tiny", input="4", previous_response_id=first.id)
    items = client.responses.input_items.list

    def texts(page: Any) -> list[str]:
        return [item.content[0].text for item in page]

    assert texts(items(second.id, limit=2)) == [
        "4",
        "so it is",
        "2",
        "1",
        "0",
    ]  # asks for all fields
    page = items(second.id, limit=2, order="asc")
    assert (texts(page.data), page.has_more) == (["0", "1"], True)
    behind = items(second.id, after=page.data[-1].id, order="asc")
    assert (texts(behind.data), behind.has_more) == (["2", "so it is", "4"], False)
    with pytest.raises(openai.BadRequestError):
        items(second.id, after="msg_0")


def test_a_response_stored_by_one_gateway_is_found_by_another(
    storing: Gateway, store: Away, clock: Clock
) -> None:
    response_id = storing.post(RESPONSES, ASK).json()["id"]
    stored = ResponseStore(store, LIFETIME_S, clock)
    services = Services(storing.catalog, {}, LIMITS, storing.engines, responses=stored)
    with listening(create_app(services)) as url:
        other = Gateway(url, storing.catalog, storing.engines, "", storing.folder, storing.keys)
        path = f"{RESPONSES}/{response_id}"
        assert other.request("GET", path, storing.keys["acme"]).json()["id"] == response_id


def test_foreign_deleted_old_and_unknown_responses_look_alike(
    storing: Gateway, clock: Clock
) -> None:
    ids = [storing.post(RESPONSES, ASK).json()["id"] for _ in range(2)]
    acme, globex = storing.keys["acme"], storing.keys["globex"]
    foreign = storing.request("GET", f"{RESPONSES}/{ids[0]}", globex)
    unknown = storing.request("GET", f"{RESPONSES}/resp_{'0' * 32}", acme)
    unlike = storing.request("GET", f"{RESPONSES}/resp_..%2Fx", acme)
    assert storing.request("DELETE", f"{RESPONSES}/{ids[0]}", globex).status_code == 404
    assert storing.request("DELETE", f"{RESPONSES}/{ids[0]}", acme).is_success
    deleted = storing.request("GET", f"{RESPONSES}/{ids[0]}", acme)
    clock.ahead_s = LIFETIME_S - 60
    assert storing.request("GET", f"{RESPONSES}/{ids[1]}", acme).is_success
    clock.ahead_s = LIFETIME_S
    old = storing.request("GET", f"{RESPONSES}/{ids[1]}", acme)
    alike = {answer.content for answer in (foreign, unknown, deleted, old)}
    assert len(alike) == 1
    assert unlike.status_code == 404
    assert error_of(old, 404)["code"] == "not_found"


def test_an_unknown_previous_response_has_openais_error(storing: Gateway, clock: Clock) -> None:
    stored = storing.post(RESPONSES, ASK).json()
    clock.ahead_s = LIFETIME_S
    for previous in (stored["id"], f"resp_{'0' * 32}", "x"):
        client = storing.openai()
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="tiny", input="hi", previous_response_id=previous)
        assert refused.value.code == "previous_response_not_found"
        assert refused.value.param == "previous_response_id"
    for item in (stored["output"][0]["id"], f"msg_{'0' * 32}_0", "x"):
        error = error_of(storing.post(RESPONSES, ASK | {"input": [reference(item)]}), 404)
        assert (error["code"], error["param"]) == ("not_found", "input")


@pytest.mark.parametrize("stream", [False, True])
def test_answers_say_that_they_are_not_stored_while_the_store_is_unreachable(
    tmp_path: Path, stream: bool
) -> None:
    store = Away(tmp_path / "store")
    with serving(tmp_path, store, LIFETIME_S) as gateway:
        gateway.engines.replay = ScriptedReplica(tmp_path).writes("so it is")
        store.fails = True
        answer: Any = gateway.openai().responses.create(model="tiny", input="hi", stream=stream)
        got = [*answer][-1].response if stream else answer
        metrics = gateway.request("GET", "/metrics", gateway.admin_key).text
    assert (got.output_text, got.store) == ("so it is", False)
    assert not list(store.list(PREFIX))
    assert re.search(r"^lorikeet_responses_not_stored_total.* 1(\.0)?$", metrics, re.MULTILINE)


@pytest.mark.usefixtures("replica")
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_cannot_be_stored_as_turns_is_not_lost(
    storing: Gateway, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("arguments that are no JSON")

    monkeypatch.setattr(stored_responses, "_stored", fail)
    answer: Any = storing.openai().responses.create(model="tiny", input="hi", stream=stream)
    got = [*answer][-1].response if stream else answer
    assert (got.output_text, got.store) == ("so it is", False)


def test_the_answer_of_a_second_attempt_is_stored_under_its_id(store: Away, clock: Clock) -> None:
    responses = ResponseStore(store, LIFETIME_S, clock)
    name = f"resp_{'a' * 32}-1"
    saved = StoredResponse(int(time.time()), {"id": name, "output": []}, [])
    responses.save("acme", saved)
    assert responses.get("acme", name) == saved


def test_a_hanging_store_delays_an_answer_only_for_a_while(
    storing: Gateway, store: Away, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(stored_responses, "SAVE_S", 0.05)
    monkeypatch.setattr(store, "put_if_absent", lambda *_: hangs.wait(20))
    answer = storing.post(RESPONSES, ASK)
    hangs.set()
    assert answer.json()["store"] is False


def test_a_conversation_that_is_too_long_is_answered_and_not_stored(
    storing: Gateway, store: Away
) -> None:
    text = "x" * (MAX_STORED_BYTES // 2)
    storing.engines.replay = Script(repeat, demo_encoder(), max_context=MAX_STORED_BYTES)
    answer = storing.post(RESPONSES, ASK | {"input": text})  # the replica repeats it
    assert answer.json()["store"] is False
    assert not list(store.list(PREFIX))


def test_an_answer_that_is_too_long_to_be_stored_is_not_even_parsed() -> None:
    unread: Any = None
    long = b"event: x\ndata: " + b"x" * (MAX_STORED_BYTES + 1) + b"\n\n"
    with pytest.raises(StoreError, match="is not stored"):
        stored_responses._stored(unread, unread, unread, long)


@pytest.mark.usefixtures("replica")
def test_a_stream_may_be_continued_as_soon_as_its_last_event_is_there(
    storing: Gateway, store: Away
) -> None:
    store.slow_s = 0.2
    with storing.openai().responses.create(model="tiny", input="hi", stream=True) as stream:
        (stored,) = [list(store.list(PREFIX)) for event in stream if event.type in LAST]
    assert stored


async def fails(call: Call) -> Items:
    yield header(call)
    yield ResponseEventStream(call).delta(0, "so far")
    yield FinalUsage(1, 0, 1)
    yield Refusal("generation_failed", "the step failed")


async def pauses(call: Call) -> Items:
    yield header(call)
    yield ResponseEventStream(call).delta(0, "so far", Ending.STOP)
    await asyncio.sleep(20)


def test_a_failed_answer_is_not_stored(storing: Gateway, store: Away) -> None:
    storing.engines.replay = fails
    *_, last = storing.openai().responses.create(model="tiny", input="hi", stream=True)
    assert last.type == "response.failed"
    assert not list(store.list(PREFIX))


def test_an_answer_whose_client_disconnected_is_not_stored(storing: Gateway, store: Away) -> None:
    storing.engines.replay = pauses
    with storing.openai().responses.create(model="tiny", input="hi", stream=True) as stream:
        next(iter(stream))
    assert eventually(lambda: bool(storing.engines.closed))
    assert not list(store.list(PREFIX))


def test_store_false_stores_nothing_and_may_continue(storing: Gateway, store: Away) -> None:
    stored = storing.post(RESPONSES, ASK).json()
    fields = {"store": False, "previous_response_id": stored["id"]}
    answer = storing.post(RESPONSES, ASK | fields).json()
    assert answer["store"] is False
    assert len(list(store.list(PREFIX))) == 1


def test_a_stored_response_is_sent_whole_and_counts_as_a_request(storing: Gateway) -> None:
    storing.add_tenant("small")
    small = storing.keys["small"]
    path = f"{RESPONSES}/{storing.post(RESPONSES, ASK, tenant='small').json()['id']}"
    refused = storing.request("GET", path, small, params={"stream": "true"})
    assert error_of(refused, 400)["param"] == "stream"
    storing.admin("PATCH", "/tenants/small", {"requests_per_min": 1})
    asked = [storing.request("GET", path, small).status_code for _ in range(3)]
    assert asked[-1] == 429


@pytest.mark.parametrize("below", ["", "/input_items"])
def test_why_explains_a_lookup(storing: Gateway, below: str) -> None:
    path, acme = f"{RESPONSES}/{storing.post(RESPONSES, ASK).json()['id']}", storing.keys["acme"]

    def why(method: str, at: str, status: int) -> dict[str, Any]:
        answer = storing.request(method, at, acme)
        assert answer.status_code == status
        asked = f"/v1/requests/{answer.headers['x-request-id']}"
        assert storing.request("GET", asked, storing.keys["globex"]).status_code == 404
        found: dict[str, Any] = storing.request("GET", asked, acme).json()
        return found

    route = f"{RESPONSES}/{{response_id}}"
    found = why("GET", path + below, 200)
    assert (found["request"], found["outcome"]) == (f"GET {route}{below}", "finished")
    assert (found["tenant"], found["model"]) == ("acme", "")
    assert [stage["stage"] for stage in found["stages"]] == ["validate"]
    found = why("DELETE", path, 200)
    assert (found["request"], found["outcome"]) == (f"DELETE {route}", "finished")
    found = why("GET", path + below, 404)
    assert (found["outcome"], found["code"]) == ("refused", "not_found")


def test_errors_name_the_setting_where_storing_is_off(gateway: Gateway) -> None:
    answer = gateway.post(RESPONSES, ASK)
    assert answer.json()["store"] is False
    assert not list(gateway.catalog.store.list(PREFIX))
    path, acme = f"{RESPONSES}/{answer.json()['id']}", gateway.keys["acme"]
    for method, at in (("GET", path), ("DELETE", path), ("GET", f"{path}/input_items")):
        message = error_of(gateway.request(method, at, acme), 404)["message"]
        assert "LORIKEET_RESPONSES_LIFETIME_H" in message
    stored = answer.json()
    for named, fields in {
        "previous_response_id": {"previous_response_id": stored["id"]},
        "input": {"input": [reference(stored["output"][0]["id"])]},
    }.items():
        error = error_of(gateway.post(RESPONSES, ASK | fields), 400)
        assert (error["code"], error["param"]) == ("unsupported_parameter", named)
        assert "LORIKEET_RESPONSES_LIFETIME_H" in error["message"]
    assert "item_reference" in error["message"]


def test_cleaning_up_deletes_expired_responses(storing: Gateway, store: Away, clock: Clock) -> None:
    storing.post(RESPONSES, ASK)

    def swept(**options: bool) -> int:
        return len(list(clean_up(store, LIFETIME_S, clock(), **options)))

    assert swept(dry_run=False) == 0
    clock.ahead_s = LIFETIME_S + 1
    assert swept(dry_run=True) == swept(dry_run=False) == 1
    assert not list(store.list(PREFIX))
