"""Chats of Gemma 4, with its thinking and tool calls, in all APIs."""

import json
from typing import Any

import pytest
from openai import BadRequestError
from pydantic import BaseModel

from tests.gateway.conftest import Gateway, Script
from tests.gateway.scripted_replica import ScriptedReplica
from tests.gateway.test_bad_requests import CHAT, TURN
from tests.replica.test_thinking import GEMMA_4_TEMPLATE

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


def test_a_chat_has_calls_behind_its_thinking(gateway: Gateway, gemma: ScriptedReplica) -> None:
    chats = gateway.openai().chat.completions
    asked: dict[str, Any] = {"model": "tiny", "messages": [TURN], "tools": TOOLS}
    asked["reasoning_effort"] = "high"
    (whole,) = chats.create(**asked).choices
    assert whole.finish_reason == "tool_calls"
    assert not whole.message.content
    assert whole.message.to_dict()["reasoning_content"] == THOUGHT
    assert [json.loads(c.function.arguments) for c in whole.message.tool_calls or []] == GIVEN
    arguments: dict[int, str] = {}
    thought = ""
    for chunk in chats.create(**asked, stream=True):
        delta = chunk.choices[0].delta
        assert not delta.content
        more: Any = delta.to_dict().get("reasoning_content", "")
        thought += more
        for call in delta.tool_calls or []:
            arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    assert thought == THOUGHT
    assert [json.loads(each) for each in arguments.values()] == GIVEN
    assert "<|think|>" in gemma.prompts[0]
    assert "<|tool>declaration:look{" in gemma.prompts[0]


def test_a_message_has_a_thinking_block_and_inputs(
    gateway: Gateway, gemma: ScriptedReplica
) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 900,
        "messages": [TURN],
        "tools": [{"name": "look", "input_schema": LOOK["parameters"]}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    client = gateway.anthropic()
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (client.messages.create(**asked), streamed):
        thought, *uses = message.content
        assert thought.type == "thinking"
        assert thought.thinking == THOUGHT
        assert [use.input for use in uses if use.type == "tool_use"] == GIVEN
        assert message.stop_reason == "tool_use"
    assert gemma.prompts[0].endswith("<|turn>model\n")


def test_a_response_has_reasoning_and_calls(gateway: Gateway, gemma: ScriptedReplica) -> None:
    client = gateway.openai()
    asked: dict[str, Any] = {"model": "tiny", "input": "Go.", "tools": RESPONSE_TOOLS}
    asked["reasoning"] = {"effort": "high"}
    with client.responses.stream(**asked) as stream:
        streamed = stream.get_final_response().output
    for output in (client.responses.create(**asked).output, streamed):
        assert [item.type for item in output] == ["reasoning", *["function_call"] * 2]
        calls = [json.loads(item.arguments) for item in output if item.type == "function_call"]
        assert calls == GIVEN
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
    chats = gateway.openai().chat.completions
    asked: dict[str, Any] = {"model": "tiny", "messages": [TURN], "tools": tools}
    asked |= {"reasoning_effort": "high", "tool_choice": choice}
    (whole,) = chats.create(**asked).choices
    assert whole.finish_reason == "tool_calls"
    assert whole.message.to_dict()["reasoning_content"] == THOUGHT
    assert [json.loads(c.function.arguments) for c in whole.message.tool_calls or []] == expected
    arguments: dict[int, list[str]] = {}
    for chunk in chats.create(**asked, stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            arguments.setdefault(call.index, []).append(call.function.arguments or "")
    assert [json.loads("".join(parts)) for parts in arguments.values()] == expected
    assert (len(arguments[0]) > 9) == (choice != "auto")


def test_forced_calls_come_in_responses_and_messages(
    gateway: Gateway, gemma: ScriptedReplica
) -> None:
    openai, anthropic = gateway.openai(), gateway.anthropic()
    respond: dict[str, Any] = {"model": "tiny", "input": "Go.", "reasoning": {"effort": "high"}}
    respond |= {"tools": [{"type": "function", **DEEP}], "tool_choice": "required"}
    with openai.responses.stream(**respond) as stream:
        streamed = stream.get_final_response().output
    for output in (openai.responses.create(**respond).output, streamed):
        calls = [json.loads(item.arguments) for item in output if item.type == "function_call"]
        assert calls == GIVEN
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
