"""Chats of Qwen 3.5, with thinking that the prompt begins and tool calls in XML, in all APIs."""

from typing import Any

import pytest
from pydantic import BaseModel

from lorikeet.protocol.messages import Call
from tests.gateway.conftest import Gateway, Script
from tests.gateway.scripted_replica import ScriptedReplica
from tests.gateway.test_bad_requests import CHAT, COMPLETIONS, TURN
from tests.gateway.tool_answers import check_chat, check_message
from tests.replica.published_templates import QWEN3_5

EDIT: dict[str, Any] = {
    "name": "edit",
    "parameters": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "lines": {"type": "array", "items": {"type": "integer"}},
            "all": {"type": "boolean"},
        },
        "required": ["text"],
        "additionalProperties": False,
    },
}
TOOLS: list[Any] = [{"type": "function", "function": EDIT}]
GIVEN = {"text": 'if a < b:\n\tsay("</b>")', "lines": [3, 4], "all": True}
ONE = (
    f"<tool_call>\n<function=edit>\n<parameter=text>\n{GIVEN['text']}\n</parameter>\n"
    "<parameter=lines>\n[3, 4]\n</parameter>\n<parameter=all>\ntrue\n</parameter>\n"
    "</function>\n</tool_call>"
)
OTHER = "<tool_call>\n<function=edit>\n<parameter=text>\nx\n</parameter>\n</function>\n</tool_call>"
NAMED = {"type": "function", "function": {"name": "edit"}}
TEXTS = f"Hm.\n</think>\n\n{ONE}\n{OTHER}"


class Sum(BaseModel):
    total: int


@pytest.fixture
def gateway(shared: Gateway) -> Gateway:
    return shared


@pytest.fixture
def qwen(script: Script) -> ScriptedReplica:
    """Replica of the gateway with Qwen 3.5's chat template."""
    return script(TEXTS, QWEN3_5)


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
@pytest.mark.parametrize("strict", [False, True])
def test_a_chat_has_typed_calls_behind_its_thinking(
    gateway: Gateway, qwen: ScriptedReplica, choice: Any, strict: bool
) -> None:
    tools: list[Any] = [{"type": "function", "function": {**EDIT, "strict": strict}}]
    expected = [GIVEN, {"text": "x"}]
    if choice == NAMED:  # which asks for one call
        expected.pop()
        gateway.engines.replay = qwen.writes(f"Hm.\n</think>\n\n{ONE}")
    check_chat(gateway, "Hm.", expected, most=9, tools=tools, tool_choice=choice)
    assert qwen.prompts[0].endswith("<think>\n")


def test_calls_and_their_results_can_be_sent_back_in_chats_and_responses(
    gateway: Gateway, qwen: ScriptedReplica
) -> None:
    client = gateway.openai()
    message = client.chat.completions.create(model="tiny", messages=[TURN], tools=TOOLS).choices[0]
    calls = message.message.tool_calls or []
    results = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in calls]
    turns: Any = [TURN, message.message, *results]
    client.chat.completions.create(model="tiny", messages=turns, tools=TOOLS)
    said = f"<|im_start|>assistant\n<think>\n{TEXTS}".replace("\ntrue\n", "\nTrue\n")
    assert said in qwen.prompts[0]
    tools: list[Any] = [{"type": "function", **EDIT}]
    response = client.responses.create(model="tiny", input="Go.", tools=tools)
    assert [item.type for item in response.output] == ["reasoning", *["function_call"] * 2]
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "done"}
        for item in response.output
        if item.type == "function_call"
    ]
    items: Any = [{"role": "user", "content": "Go."}, *response.output, *outputs]
    client.responses.create(model="tiny", input=items, tools=tools)
    assert said in qwen.prompts[0]


@pytest.mark.parametrize("kind", ["auto", "any"])
def test_a_message_has_a_thinking_block_and_typed_inputs(
    gateway: Gateway, qwen: ScriptedReplica, kind: Any
) -> None:
    check_message(gateway, "Hm.", [GIVEN, {"text": "x"}], EDIT, tool_choice={"type": kind})


def test_thinking_that_is_switched_off_is_closed_in_the_prompt(
    gateway: Gateway, qwen: ScriptedReplica
) -> None:
    gateway.engines.replay = qwen.writes("It is 4.")
    body = {"model": "tiny", "messages": [TURN], "chat_template_kwargs": {"enable_thinking": False}}
    message = gateway.post(CHAT, body).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "It is 4.", "refusal": None}
    assert qwen.prompts[0].endswith("<think>\n\n</think>\n\n")
    asked = {"model": "tiny", "max_tokens": 90, "messages": [TURN]}
    (block,) = gateway.post("/v1/messages", asked).json()["content"]
    assert block == {"type": "text", "text": "It is 4."}


@pytest.mark.parametrize(
    ("effort", "end"), [("none", "<think>\n\n</think>\n\n"), ("low", "<think>\n")]
)
def test_an_effort_of_none_switches_thinking_off(
    gateway: Gateway, qwen: ScriptedReplica, effort: Any, end: str
) -> None:
    gateway.engines.replay = qwen.writes("It is 4.")
    client = gateway.openai()
    chats = client.chat.completions.with_raw_response
    chat = chats.create(model="tiny", messages=[TURN], reasoning_effort=effort)
    assert qwen.prompts[0].endswith(end)
    ignored = None if effort == "none" else "reasoning_effort"
    assert chat.headers.get("x-lorikeet-ignored") == ignored
    client.responses.create(model="tiny", input="2 + 2?", reasoning={"effort": effort})
    assert qwen.prompts[0].endswith(end)
    asked = {"enable_thinking": True}
    body = {"model": "tiny", "messages": [TURN], "chat_template_kwargs": asked}
    gateway.post(CHAT, {**body, "reasoning_effort": effort})
    assert qwen.prompts[0].endswith("<think>\n")


@pytest.mark.parametrize(
    ("fields", "asked", "thinks"),
    [
        ({}, None, False),
        ({}, True, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, False, False),
        ({"thinking": {"type": "disabled"}}, True, True),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, True, None),
    ],
)
def test_a_templates_switch_for_thinking_has_precedence_in_messages(
    gateway: Gateway,
    qwen: ScriptedReplica,
    fields: dict[str, Any],
    asked: bool | None,
    thinks: bool | None,
) -> None:
    gateway.engines.replay = qwen.writes("It is 4." if thinks is False else "Hm.</think>It is 4.")
    body = {"model": "tiny", "max_tokens": 2000, "messages": [TURN], **fields}
    if asked is not None:
        body["chat_template_kwargs"] = {"enable_thinking": asked}
    content = gateway.post("/v1/messages", body).json()["content"]
    assert qwen.prompts[0].endswith("<think>\n\n</think>\n\n" if thinks is False else "<think>\n")
    kinds = ["thinking", "text"] if thinks else ["text"]
    assert [block["type"] for block in content] == kinds
    assert content[-1]["text"] == "It is 4."


def test_structured_output_follows_the_thinking(gateway: Gateway, qwen: ScriptedReplica) -> None:
    gateway.engines.replay = qwen.writes('Two and two.\n</think>\n\n{"total": 4}')
    client = gateway.openai()
    chat = client.chat.completions.parse(model="tiny", messages=[TURN], response_format=Sum)
    assert chat.choices[0].message.parsed == Sum(total=4)
    response = client.responses.parse(model="tiny", input="2 + 2?", text_format=Sum)
    assert response.output_parsed == Sum(total=4)


def test_plain_completions_stay_as_they_were_written(
    gateway: Gateway, qwen: ScriptedReplica
) -> None:
    answer = gateway.post(COMPLETIONS, {"model": "tiny", "prompt": "go", "max_tokens": 900})
    assert answer.json()["choices"][0]["text"] == TEXTS


def test_a_forced_call_that_is_cut_off_keeps_its_arguments_so_far(
    gateway: Gateway, qwen: ScriptedReplica
) -> None:
    def cut(call: Call) -> str:
        return f"Hm.\n</think>\n\n{ONE.partition(' < b')[0]}"

    qwen.check = lambda *_: None  # type: ignore[method-assign]
    gateway.engines.replay = qwen.plays(cut)
    body = {"model": "tiny", "messages": [TURN], "tools": TOOLS, "tool_choice": "required"}
    (choice,) = gateway.post(CHAT, body).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"text": "if a'
