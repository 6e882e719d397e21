"""Chats of Gemma 4, with its thinking and tool calls, in all APIs."""

from typing import Any

import pytest
from openai import BadRequestError
from pydantic import BaseModel

from tests.gateway.conftest import Gateway, Script
from tests.gateway.scripted_replica import ScriptedReplica
from tests.gateway.test_bad_requests import CHAT, TURN
from tests.gateway.tool_answers import check_chat, check_message, check_response
from tests.replica.published_templates import GEMMA_4_TEMPLATE

LOOK: dict[str, Any] = {
    "name": "look",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}
TOOLS: list[Any] = [{"type": "function", "function": LOOK}]
RESPONSE_TOOLS: list[Any] = [{"type": "function", **LOOK}]
GIVEN: list[dict[str, Any]] = [{"at": 'a "{in}", <b>'}, {"deep": {"n": [1, -2.5, True, None]}}]
CALLS = (
    '<|tool_call>call:look{at:<|"|>a "{in}", <b><|"|>}<tool_call|>'
    "<|tool_call>call:look{deep:{n:[1,-2.5,true,null]}}<tool_call|>"
)
THOUGHT = "Two and two\n\nmake <4>."
TEXT = f"<|channel>thought\n{THOUGHT}\n<channel|>{CALLS}"
MARKS = (
    *("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>", "<tool|>"),
    *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'),
)


class Sum(BaseModel):
    total: int


@pytest.fixture
def gateway(shared: Gateway) -> Gateway:
    return shared


@pytest.fixture(params=[MARKS, ()], ids=["special tokens", "letters"])
def gemma(request: pytest.FixtureRequest, script: Script) -> ScriptedReplica:
    """Replica of the gateway with the chat template of Gemma 4."""
    return script(TEXT, GEMMA_4_TEMPLATE, marks=request.param)


def test_a_message_has_a_thinking_block_and_inputs(
    gateway: Gateway, gemma: ScriptedReplica
) -> None:
    check_message(gateway, THOUGHT, GIVEN, LOOK)
    assert gemma.prompts[0].endswith("<|turn>model\n")


def test_a_response_has_reasoning_and_calls(gateway: Gateway, gemma: ScriptedReplica) -> None:
    check_response(gateway, GIVEN, tools=RESPONSE_TOOLS, reasoning={"effort": "high"})
    assert "<|think|>" in gemma.prompts[0]


def test_calls_and_results_can_be_sent_back(gateway: Gateway, gemma: ScriptedReplica) -> None:
    chats = gateway.openai().chat.completions
    asked: dict[str, Any] = {"model": "tiny", "tools": TOOLS, "reasoning_effort": "high"}
    message: Any = chats.create(**asked, messages=[TURN]).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "done"} for call in message.tool_calls
    ]
    gateway.engines.replay = gemma.writes("<|channel>thought\nSo.\n<channel|>It is done.")
    (answer,) = chats.create(**asked, messages=[TURN, message, *results]).choices
    assert answer.message.content == "It is done."
    done = '<|tool_response>response:tool{value:<|"|>done<|"|>}<tool_response|>'
    assert gemma.prompts[0].endswith(TEXT + done + done)


def test_structured_output_follows_the_thinking(gateway: Gateway, gemma: ScriptedReplica) -> None:
    gateway.engines.replay = gemma.writes('<|channel>thought\n{"total"?}\n<channel|>{"total": 4}')
    chat = gateway.openai().chat.completions.parse(
        model="tiny", messages=[TURN], response_format=Sum, reasoning_effort="low"
    )
    assert chat.choices[0].message.parsed == Sum(total=4)


def test_an_answer_without_thinking_is_text(gateway: Gateway, gemma: ScriptedReplica) -> None:
    gateway.engines.replay = gemma.writes("It is <4>.")
    message = gateway.post(CHAT, {"model": "tiny", "messages": [TURN]}).json()["choices"][0]
    assert message["message"] == {"role": "assistant", "content": "It is <4>.", "refusal": None}
    assert gemma.prompts[0].endswith("<|channel>thought\n<channel|>")


DEEP: dict[str, Any] = {
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {
            "at": {"type": "string"},
            "deep": {"type": "object", "additionalProperties": {"type": "array"}},
        },
        "additionalProperties": False,
    },
}
NAMED = {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
@pytest.mark.parametrize("strict", [False, True])
def test_forced_and_strict_calls_are_held_and_streamed_behind_thinking(
    gateway: Gateway, gemma: ScriptedReplica, choice: Any, strict: bool
) -> None:
    expected = list(GIVEN)
    if choice == NAMED:  # which asks for one call
        del expected[1:]
        gateway.engines.replay = gemma.writes(TEXT[: TEXT.index("<tool_call|>") + 12])
    tools: list[Any] = [{"type": "function", "function": {**DEEP, "strict": strict}}]
    asked = {"tools": tools, "tool_choice": choice, "reasoning_effort": "high"}
    check_chat(gateway, THOUGHT, expected, most=9, **asked)
    assert "<|think|>" in gemma.prompts[0]
    assert "<|tool>declaration:look{" in gemma.prompts[0]


def test_forced_calls_come_in_responses_and_messages(
    gateway: Gateway, gemma: ScriptedReplica
) -> None:
    tools = [{"type": "function", **DEEP}]
    asked: dict[str, Any] = {"tools": tools, "reasoning": {"effort": "high"}}
    check_response(gateway, GIVEN, tool_choice="required", **asked)
    anthropic = gateway.anthropic()
    ask: dict[str, Any] = {"model": "tiny", "max_tokens": 900, "messages": [TURN]}
    ask |= {"tools": [{"name": "look", "input_schema": DEEP["parameters"]}]}
    ask |= {"tool_choice": {"type": "any"}}
    gateway.engines.replay = gemma.writes(CALLS)
    with anthropic.messages.stream(**ask) as events:
        last = events.get_final_message()
    for message in (anthropic.messages.create(**ask), last):
        assert [use.input for use in message.content if use.type == "tool_use"] == GIVEN
        assert message.stop_reason == "tool_use"


def test_a_schema_that_cannot_be_held_is_refused_by_its_tool_place_and_remedy(
    gateway: Gateway, gemma: ScriptedReplica
) -> None:
    assert gemma.encoder.takes_tools
    many = {"type": "array", "items": {"type": "array", "uniqueItems": True}}
    parameters = {"type": "object", "properties": {"at": many}}
    tools: list[Any] = [
        {"type": "function", "function": {"name": "look", "parameters": parameters}}
    ]
    with pytest.raises(BadRequestError) as refused:
        gateway.openai().chat.completions.create(
            model="tiny", messages=[TURN], tools=tools, tool_choice="required"
        )
    said = str(refused.value)
    assert "the tool look: " in said
    assert "at $.properties.at.items: uniqueItems on an array cannot be held" in said
    assert "remove it" in said
