"""Chats of Ministral 3, with its thinking and tool calls, in all APIs."""

import json
from typing import Any

import pytest
from pydantic import BaseModel

from tests.gateway.conftest import Gateway, Script
from tests.gateway.scripted_replica import ScriptedReplica
from tests.gateway.test_bad_requests import CHAT, TURN
from tests.gateway.tool_answers import check_chat, check_message, check_response
from tests.replica.published_templates import FIRST_MINISTRAL_3, MINISTRAL_3

LOOK: dict[str, Any] = {
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {"at": {"type": "string"}},
        "required": ["at"],
        "additionalProperties": False,
    },
}
TOOLS: list[Any] = [{"type": "function", "function": LOOK}]
RESPONSE_TOOLS: list[Any] = [{"type": "function", **LOOK}]
GIVEN = [{"at": "a [ARGS] {in} braces"}, {"at": "it"}]
ONE, OTHER = (f"[TOOL_CALLS]look[ARGS]{json.dumps(given)}" for given in GIVEN)
THOUGHT = "Two and two\n\nmake [4]."
TEXTS = f"[THINK]{THOUGHT}[/THINK]{ONE}{OTHER}"
NAMED = {"type": "function", "function": {"name": "look"}}
MARKS = (
    *("[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]"),
    *("[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[ARGS]"),
    *("[THINK]", "[/THINK]", "[IMG]"),
)


class Sum(BaseModel):
    total: int


@pytest.fixture
def gateway(shared: Gateway) -> Gateway:
    return shared


@pytest.fixture(params=[MARKS, ()], ids=["special tokens", "letters"])
def ministral(request: pytest.FixtureRequest, script: Script) -> ScriptedReplica:
    """Replica of the gateway with the chat template of Ministral 3 Reasoning."""
    texts = TEXTS.replace("a [ARGS] {in}", "a {in}") if request.param else TEXTS
    return script(texts, MINISTRAL_3, marks=request.param)


def expected(scripted: ScriptedReplica) -> list[dict[str, str]]:
    """The calls' arguments; a string has no mark that is a special token."""
    special = "[ARGS]" in scripted.encoder.vocabulary.added
    return [{"at": "a {in} braces"}, GIVEN[1]] if special else [*GIVEN]


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
@pytest.mark.parametrize("strict", [False, True])
def test_a_chat_has_calls_behind_its_thinking(
    gateway: Gateway, ministral: ScriptedReplica, choice: Any, strict: bool
) -> None:
    calls = expected(ministral)
    if choice == NAMED:  # which asks for one call
        calls.pop()
        text = f"[THINK]{THOUGHT}[/THINK][TOOL_CALLS]look[ARGS]{json.dumps(calls[0])}"
        gateway.engines.replay = ministral.writes(text)
    tools = [{"type": "function", "function": {**LOOK, "strict": strict}}]
    check_chat(gateway, THOUGHT, calls, most=2, tools=tools, tool_choice=choice)
    assert "[AVAILABLE_TOOLS][{" in ministral.prompts[0]


def test_text_may_come_before_a_call(gateway: Gateway, ministral: ScriptedReplica) -> None:
    gateway.engines.replay = ministral.writes(f"[THINK]Hm.[/THINK]I look.{OTHER}")
    chats = gateway.openai().chat.completions
    (choice,) = chats.create(model="tiny", messages=[TURN], tools=TOOLS).choices
    assert choice.message.content == "I look."
    (call,) = choice.message.tool_calls or []
    assert json.loads(call.function.arguments) == GIVEN[1]


@pytest.mark.parametrize("template", [MINISTRAL_3, FIRST_MINISTRAL_3], ids=["newest", "first"])
def test_thinking_calls_and_results_can_be_sent_back(
    gateway: Gateway, script: Script, template: str
) -> None:
    if template is FIRST_MINISTRAL_3:
        template += "{{ tools | tojson if tools }}"
    text = f"[THINK]{THOUGHT}[/THINK]{OTHER}{OTHER}"
    scripted = script(text, template, marks=MARKS)
    said = f"[/INST]{text}<|eos|>[TOOL_RESULTS]done[/TOOL_RESULTS]"
    client = gateway.openai()
    message = client.chat.completions.create(model="tiny", messages=[TURN], tools=TOOLS).choices[0]
    calls = message.message.tool_calls or []
    results = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in calls]
    turns: Any = [TURN, message.message, *results]
    client.chat.completions.create(model="tiny", messages=turns, tools=TOOLS)
    assert said in scripted.prompts[0]
    response = client.responses.create(model="tiny", input="Go.", tools=RESPONSE_TOOLS)
    assert [item.type for item in response.output] == ["reasoning", *["function_call"] * 2]
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "done"}
        for item in response.output
        if item.type == "function_call"
    ]
    items: Any = [{"role": "user", "content": "Go."}, *response.output, *outputs]
    client.responses.create(model="tiny", input=items, tools=RESPONSE_TOOLS)
    assert said in scripted.prompts[0]
    asked: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 900,
        "tools": [{"name": "look", "input_schema": LOOK["parameters"]}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    anthropic = gateway.anthropic()
    answer = anthropic.messages.create(**asked, messages=[TURN])
    uses = [block.id for block in answer.content if block.type == "tool_use"]
    done: Any = [{"type": "tool_result", "tool_use_id": use, "content": "done"} for use in uses]
    past: Any = [TURN, {"role": "assistant", "content": answer.content}]
    anthropic.messages.create(**asked, messages=[*past, {"role": "user", "content": done}])
    assert said in scripted.prompts[0]


@pytest.mark.parametrize("kind", ["auto", "any"])
def test_a_message_has_a_thinking_block_and_inputs(
    gateway: Gateway, ministral: ScriptedReplica, kind: Any
) -> None:
    tool_choice = {"type": kind}
    check_message(gateway, THOUGHT, expected(ministral), LOOK, tool_choice=tool_choice)


def test_a_response_has_reasoning_and_calls(gateway: Gateway, ministral: ScriptedReplica) -> None:
    check_response(gateway, expected(ministral), tools=RESPONSE_TOOLS)


def test_structured_output_follows_the_thinking(
    gateway: Gateway, ministral: ScriptedReplica
) -> None:
    gateway.engines.replay = ministral.writes('[THINK]{"total"?}[/THINK]{"total": 4}')
    client = gateway.openai()
    chat = client.chat.completions.parse(model="tiny", messages=[TURN], response_format=Sum)
    assert chat.choices[0].message.parsed == Sum(total=4)
    response = client.responses.parse(model="tiny", input="2 + 2?", text_format=Sum)
    assert response.output_parsed == Sum(total=4)


def test_an_answer_without_thinking_is_text(gateway: Gateway, ministral: ScriptedReplica) -> None:
    gateway.engines.replay = ministral.writes("It is [4].")
    message = gateway.post(CHAT, {"model": "tiny", "messages": [TURN]}).json()["choices"][0]
    assert message["message"] == {"role": "assistant", "content": "It is [4].", "refusal": None}


def test_system_and_developer_messages_reach_the_template(
    gateway: Gateway, ministral: ScriptedReplica
) -> None:
    gateway.engines.replay = ministral.writes("It is 4.")
    brief, loud = ({"role": role, "content": "Be x."} for role in ("system", "developer"))
    said = {"role": "assistant", "content": "Hi"}
    for messages in ((brief, loud, TURN), (brief, TURN, loud), (brief, TURN, said, loud, TURN)):
        answer = gateway.post(CHAT, {"model": "tiny", "messages": list(messages)})
        assert answer.status_code == 200, answer.text
        assert ministral.prompts[0].count("Be x.") == 2
