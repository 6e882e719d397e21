"""Chats of GLM 4.7, with thinking that the prompt begins and tool calls of its own, in all APIs."""

import json
from typing import Any

import pytest

from tests.gateway.conftest import Gateway, Script
from tests.gateway.scripted_replica import ScriptedReplica
from tests.gateway.test_bad_requests import TURN
from tests.gateway.test_xml_calls import EDIT, GIVEN, NAMED
from tests.gateway.tool_answers import check_chat, check_message, check_response

GLM_4_7 = """
{%- if tools -%}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}
Call as <tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value>...</tool_call>
{%- endif -%}
{%- for m in messages -%}
    {%- if m.role == 'tool' -%}
        <|observation|><tool_response>{{ m.content }}</tool_response>
    {%- elif m.role == 'assistant' -%}
        <|assistant|>{{ '<think>' + m.reasoning_content if m.reasoning_content }}</think>
        {{- m.content -}}
        {%- for call in m.tool_calls or [] -%}
            <tool_call>{{ call.function.name }}
            {%- for k, v in call.function.arguments.items() -%}
                <arg_key>{{ k }}</arg_key><arg_value>
                {{- v if v is string else v | tojson }}</arg_value>
            {%- endfor %}</tool_call>
        {%- endfor -%}
    {%- else -%}<|{{ m.role }}|>{{ m.content }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|assistant|>{{ '</think>' if enable_thinking is false else '<think>' }}
{%- endif -%}
"""
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>")
MARKS += ("<arg_value>", "</arg_value>", "<|system|>", "<|user|>", "<|assistant|>")
ONE = (
    f"<tool_call>edit<arg_key>text</arg_key><arg_value>{GIVEN['text']}</arg_value>"
    "<arg_key>lines</arg_key><arg_value>[3, 4]</arg_value>"
    "<arg_key>all</arg_key><arg_value>true</arg_value></tool_call>"
)
OTHER = "<tool_call>edit<arg_key>text</arg_key><arg_value>x</arg_value></tool_call>"
BOTH = f"Hm.</think>{ONE}{OTHER}"
EXPECTED = [GIVEN, {"text": "x"}]


@pytest.fixture
def gateway(shared: Gateway) -> Gateway:
    return shared


@pytest.fixture(params=[MARKS, ()], ids=["special tokens", "letters"])
def glm(request: pytest.FixtureRequest, script: Script) -> ScriptedReplica:
    """Replica of the gateway with a chat template that writes as GLM 4.7's."""
    return script(BOTH, GLM_4_7, marks=request.param)


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
@pytest.mark.parametrize("strict", [False, True])
def test_a_chat_has_typed_calls_behind_its_thinking(
    gateway: Gateway, glm: ScriptedReplica, choice: Any, strict: bool
) -> None:
    tools: list[Any] = [{"type": "function", "function": {**EDIT, "strict": strict}}]
    expected = list(EXPECTED)
    if choice == NAMED:  # which asks for one call
        expected.pop()
        gateway.engines.replay = glm.writes(f"Hm.</think>{ONE}")
    check_chat(gateway, "Hm.", expected, most=9, tools=tools, tool_choice=choice)
    assert glm.prompts[0].endswith("<|assistant|><think>")


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_response_has_reasoning_and_calls_that_can_be_sent_back(
    gateway: Gateway, glm: ScriptedReplica, choice: Any
) -> None:
    asked: dict[str, Any] = {"tools": [{"type": "function", **EDIT}], "tool_choice": choice}
    output = check_response(gateway, EXPECTED, **asked)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "done"}
        for item in output[1:]
    ]
    turns: Any = [{"role": "user", "content": "Go."}, *output, *results]
    gateway.openai().responses.create(model="tiny", input=turns, **asked)
    assert f"<|assistant|><think>{BOTH}" in glm.prompts[0]


@pytest.mark.parametrize("kind", ["auto", "any"])
def test_a_message_has_a_thinking_block_and_inputs(
    gateway: Gateway, glm: ScriptedReplica, kind: Any
) -> None:
    check_message(gateway, "Hm.", EXPECTED, EDIT, tool_choice={"type": kind})


def test_thinking_that_is_switched_off_is_closed_in_the_prompt(
    gateway: Gateway, glm: ScriptedReplica
) -> None:
    gateway.engines.replay = glm.writes(ONE)
    chats = gateway.openai().chat.completions
    tools: list[Any] = [{"type": "function", "function": EDIT}]
    asked: dict[str, Any] = {"model": "tiny", "messages": [TURN], "tools": tools}
    (whole,) = chats.create(**asked, tool_choice="required", reasoning_effort="none").choices
    assert [json.loads(c.function.arguments) for c in whole.message.tool_calls or []] == [GIVEN]
    assert glm.prompts[0].endswith("<|assistant|></think>")
