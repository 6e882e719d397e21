"""OpenAI's deprecated functions are handled as tools and answered in their own shape."""

from typing import Any

import pytest

from tests.gateway.conftest import Gateway, Script, chat
from tests.gateway.scripted_replica import ScriptedReplica
from tests.gateway.test_bad_requests import CHAT, TURN, error_of

LOOK = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}}}
CALLED = '<tool_call>\n{"name": "look", "arguments": {"at": 3}}\n</tool_call>'
PAST = {
    "role": "assistant",
    "content": None,
    "function_call": {"name": "look", "arguments": '{"at": 3}'},
}
SEEN = {"role": "function", "name": "look", "content": "a tree"}


@pytest.fixture
def gateway(shared: Gateway) -> Gateway:
    return shared


@pytest.fixture
def replica(script: Script) -> ScriptedReplica:
    return script(CALLED)


@pytest.mark.parametrize(
    "choice", [{}, {"function_call": "auto"}, {"function_call": {"name": "look"}}]
)
def test_a_function_is_called(
    gateway: Gateway, replica: ScriptedReplica, choice: dict[str, Any]
) -> None:
    answer = gateway.openai().chat.completions.create(**chat("tiny"), functions=[LOOK], **choice)
    (made,) = answer.choices
    assert made.finish_reason == "function_call"
    assert made.message.tool_calls is None
    assert made.message.content is None
    assert made.message.function_call is not None
    assert made.message.function_call.name == "look"
    assert made.message.function_call.arguments == '{"at": 3}'
    assert '{"name": "look"' in replica.prompts[0]


def test_a_call_is_streamed(gateway: Gateway, replica: ScriptedReplica) -> None:
    stream = gateway.openai().chat.completions.create(**chat("tiny"), functions=[LOOK], stream=True)
    choices = [chunk.choices[0] for chunk in stream]
    calls = [c.delta.function_call for c in choices if c.delta.function_call is not None]
    assert calls[0].name == "look"
    assert "".join(call.arguments or "" for call in calls) == '{"at": 3}'
    assert choices[-1].finish_reason == "function_call"
    assert all(c.delta.tool_calls is None for c in choices)


def test_none_may_be_called(gateway: Gateway, replica: ScriptedReplica) -> None:
    body = chat("tiny", functions=[LOOK], function_call="none")
    answer = gateway.post(CHAT, body).json()
    assert answer["choices"][0]["message"]["content"] == CALLED
    assert "look" not in replica.prompts[0]


def test_past_calls_and_their_answers_go_to_the_template(
    gateway: Gateway, replica: ScriptedReplica
) -> None:
    body = {"model": "tiny", "messages": [TURN, PAST, SEEN], "functions": [LOOK]}
    assert gateway.post(CHAT, body).is_success
    (prompt,) = replica.prompts
    assert f"<|assistant|>{CALLED}<|eos|>" in prompt
    assert "<tool_response>\na tree\n</tool_response>" in prompt
    _, called, answered = gateway.engines.last.messages
    assert called["tool_calls"][0]["id"] == answered["tool_call_id"]


TOOL = {"type": "function", "function": LOOK}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [LOOK], "tools": [TOOL]}, "functions"),
        ({"functions": [LOOK, LOOK]}, "functions"),
        ({"functions": [LOOK], "function_call": {"name": "other"}}, "function_call"),
        ({"function_call": {"name": "look"}}, "function_call"),
        ({"function_call": "required"}, "function_call"),
        ({"functions": 1}, "functions"),
        ({"messages": [TURN, SEEN]}, "messages"),
        ({"messages": [TURN, PAST, SEEN | {"name": "other"}]}, "messages"),
        ({"messages": [TURN, PAST, {"role": "function", "content": "x"}]}, "messages[2].name"),
        (
            {"messages": [TURN | {"function_call": PAST["function_call"]}]},
            "messages[0].function_call",
        ),
    ],
)
def test_inconsistent_functions_are_refused_by_name(
    unchanged: Gateway, fields: dict[str, Any], param: str
) -> None:
    error = error_of(unchanged.post(CHAT, chat("tiny") | fields), 400)
    assert (error["code"], error["param"]) == ("invalid_value", param)
