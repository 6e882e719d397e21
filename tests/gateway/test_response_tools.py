"""Tools that coding agents offer in /v1/responses: functions in namespaces, and other tools."""

import json
from typing import Any

import pytest

from tests.gateway.conftest import Gateway, Script
from tests.gateway.official_types import validate_as
from tests.gateway.scripted_replica import ScriptedReplica
from tests.gateway.test_bad_requests import error_of

RESPONSES = "/v1/responses"
LOOK: dict[str, Any] = {"type": "function", "name": "look", "parameters": {"type": "object"}}
AGENTS: dict[str, Any] = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [LOOK | {"name": "spawn"}, LOOK | {"name": "wait", "strict": False}],
}
SEARCH = {"type": "web_search", "external_web_access": True}
SPAWN = '<tool_call>\n{"name": "agents.spawn", "arguments": {"task": "rest"}}\n</tool_call>'


@pytest.fixture
def replica(script: Script) -> ScriptedReplica:
    return script(SPAWN)


@pytest.mark.parametrize("stream", [False, True])
def test_a_function_of_a_namespace_is_called(
    gateway: Gateway, replica: ScriptedReplica, stream: bool
) -> None:
    client = gateway.openai()
    asked: dict[str, Any] = {"model": "tiny", "input": "hi", "tools": [LOOK, AGENTS]}
    if stream:
        *_, last = client.responses.create(**asked, stream=True)
        assert last.type == "response.completed"
        (called,) = last.response.output
    else:
        (called,) = client.responses.create(**asked).output
    assert '"agents.spawn"' in replica.prompts[0]
    assert called.type == "function_call"
    assert (called.namespace, called.name) == ("agents", "spawn")
    output = {"type": "function_call_output", "call_id": called.call_id, "output": "it rests"}
    turns: Any = [{"role": "user", "content": "hi"}, called, output]
    client.responses.create(model="tiny", input=turns)
    assert f"<|assistant|>{SPAWN}<|eos|>" in replica.prompts[0]


@pytest.mark.parametrize("given", [{}, {"description": None}, {"description": "Other agents."}])
def test_an_answer_repeats_a_namespace_in_openais_form(
    gateway: Gateway, replica: ScriptedReplica, given: dict[str, str | None]
) -> None:
    agents = {name: value for name, value in AGENTS.items() if name != "description"} | given
    answer = gateway.post(RESPONSES, {"model": "tiny", "input": "hi", "tools": [agents]}).json()
    validate_as("Response", answer)
    assert answer["tools"][0]["description"] == (given.get("description") or "")


def test_functions_of_a_namespace_may_be_required(
    gateway: Gateway, replica: ScriptedReplica
) -> None:
    asked = {"model": "tiny", "input": "hi", "tools": [AGENTS], "tool_choice": "required"}
    answer = gateway.post(RESPONSES, asked).json()
    assert answer["output"][0]["namespace"] == "agents"
    (shown,) = answer["tools"]
    assert shown["tools"][0] == {**LOOK, "name": "spawn", "strict": False}


def test_tools_that_are_not_served_are_left_out_beside_functions(
    gateway: Gateway, replica: ScriptedReplica
) -> None:
    asked = {"model": "tiny", "input": "hi", "tools": [SEARCH, LOOK, SEARCH]}
    answer = gateway.post(RESPONSES, asked)
    assert answer.headers["x-lorikeet-ignored"] == "web_search"
    assert [tool["name"] for tool in answer.json()["tools"]] == ["look"]
    assert "web_search" not in replica.prompts[0]


@pytest.mark.parametrize(
    ("names", "mode", "shown", "forced"),
    [
        ([("function", "look")], "auto", ["look"], ()),
        ([("function", "look")], "required", ["look"], ("look",)),
        ([("function", "agents.wait")], "auto", ["agents.wait"], ()),
        ([("namespace", "agents")], "auto", ["agents.spawn", "agents.wait"], ()),
        ([("web_search", "x"), ("function", "look")], "auto", ["look"], ()),
    ],
)
def test_the_model_gets_the_allowed_tools_alone(
    gateway: Gateway, names: list[Any], mode: str, shown: list[str], forced: tuple[str, ...]
) -> None:
    allowed = [{"type": kind, "name": name} for kind, name in names]
    choice = {"type": "allowed_tools", "mode": mode, "tools": allowed}
    asked = {"model": "tiny", "input": "hi", "tools": [SEARCH, LOOK, AGENTS], "tool_choice": choice}
    answer = gateway.post(RESPONSES, asked).raise_for_status().json()
    used = gateway.engines.last.tools
    assert used is not None
    assert [tool["function"]["name"] for tool in used.tools] == shown
    assert used.forced == forced
    assert answer["tool_choice"]["mode"] == mode


@pytest.mark.parametrize(
    ("allowed", "says"),
    [
        ([], "allowed_tools"),
        ([{"type": "mcp", "server_label": "x"}], "(mcp): functions"),
        ([{"type": "function", "name": "other"}], "names of some"),
        ([{"type": "namespace", "name": "other"}], "names of some"),
        ([{"type": "function"}], "name"),
        (["look"], "allowed_tools"),
    ],
)
def test_bad_allowed_tools_are_refused(unchanged: Gateway, allowed: list[Any], says: str) -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    body = {"model": "tiny", "input": "hi", "tools": [LOOK, AGENTS], "tool_choice": choice}
    error = error_of(unchanged.post(RESPONSES, body), 400)
    assert error["param"] == "tool_choice"
    assert says in error["message"]


def test_deferred_functions_are_offered_since_tool_search_is_left_out(gateway: Gateway) -> None:
    tools = [{"type": "tool_search"}, LOOK | {"defer_loading": True}]
    asked = {"model": "tiny", "input": "hi", "tools": tools}
    answer = gateway.post(RESPONSES, asked).raise_for_status()
    assert gateway.engines.last.left_out == ("tool_search",)
    assert [tool["name"] for tool in answer.json()["tools"]] == ["look"]


def test_codexs_client_metadata_has_no_effect(gateway: Gateway) -> None:
    said = {"session_id": "1", "x-codex-turn-metadata": json.dumps({"turn": "x" * 1000})}
    body = {"model": "tiny", "input": "hi", "client_metadata": said}
    assert gateway.post(RESPONSES, body).is_success


@pytest.mark.parametrize(
    ("tools", "param", "says"),
    [
        ([AGENTS | {"tools": []}, SEARCH], "tools[1].type", "(web_search): functions"),
        ([AGENTS | {"tools": [{"type": "mcp"}]}], "tools[0].tools[0].type", "function"),
        ([AGENTS | {"name": "a.b"}], "tools[0].name", "pattern"),
        ([AGENTS | {"mood": "glad"}], "tools[0].mood", "mood"),
        ([LOOK | {"mood": "glad"}], "tools[0].mood", "mood"),
        ([{"type": "function", "function": LOOK}], "tools[0].function", "beside type"),
        ([{"type": "Web Search"}], "tools[0].type", "pattern"),
        ([{"type": 5}], "tools[0].type", "function"),
        (["look"], "tools[0]", "object"),
        ([AGENTS, AGENTS], "tools", "name of its own"),
        ([AGENTS | {"tools": [LOOK] * 128}, LOOK], "tools", "at most 128"),
    ],
)
def test_a_bad_tool_is_named(unchanged: Gateway, tools: list[Any], param: str, says: str) -> None:
    body = {"model": "tiny", "input": "hi", "tools": tools}
    error = error_of(unchanged.post(RESPONSES, body), 400)
    assert error["param"] == param
    assert says in error["message"]
