"""Reasoning through HTTP, separate from the answer and given back to the template."""

from typing import Any

import pytest
from pydantic import BaseModel

from tests.gateway.conftest import Gateway, Script
from tests.gateway.official_types import validate_as
from tests.gateway.scripted_replica import ScriptedReplica
from tests.gateway.test_bad_requests import CHAT, COMPLETIONS, TURN, error_of
from tests.replica.published_templates import QWEN3, R1

RESPONSES = "/v1/responses"
THOUGHT = "Two and two\n\nmake <4>."
THINKS = f"<think>\n{THOUGHT}\n</think>\n\n"
NOW = '<tool_call>\n{"name": "time", "arguments": {"zone": "utc"}}\n</tool_call>'
TIME: dict[str, Any] = {"name": "time", "parameters": {"type": "object"}}
TOOLS: list[Any] = [{"type": "function", "function": TIME}]


class Sum(BaseModel):
    total: int


@pytest.fixture
def gateway(shared: Gateway) -> Gateway:
    return shared


@pytest.fixture
def qwen(script: Script) -> ScriptedReplica:
    """Replica of the gateway with Qwen 3's chat template."""
    return script(f"{THINKS}It is 4.", QWEN3)


def test_a_chat_has_reasoning_content_whole_and_streamed(
    gateway: Gateway, qwen: ScriptedReplica
) -> None:
    chats = gateway.openai().chat.completions
    asked: dict[str, Any] = {"model": "tiny", "messages": [TURN]}
    answer = chats.create(**asked)
    message = answer.choices[0].message
    assert (message.content, message.to_dict()["reasoning_content"]) == ("It is 4.", THOUGHT)
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    reasoning_tokens = answer.usage.completion_tokens_details.reasoning_tokens
    assert reasoning_tokens is not None
    assert 0 < reasoning_tokens < answer.usage.completion_tokens
    validate_as("ChatCompletion", answer.to_dict())
    thought = said = ""
    for chunk in chats.create(**asked, stream=True, stream_options={"include_usage": True}):
        validate_as("ChatCompletionChunk", chunk.to_dict())
        for choice in chunk.choices:
            more: Any = choice.delta.to_dict().get("reasoning_content", "")
            assert not (more and said), "thinking behind the answer"
            thought, said = thought + more, said + (choice.delta.content or "")
    assert (thought, said) == (THOUGHT, "It is 4.")


def test_reasoning_sent_back_is_shown_between_calls(
    gateway: Gateway, qwen: ScriptedReplica
) -> None:
    gateway.engines.replay = qwen.writes(THINKS + NOW)
    chats = gateway.openai().chat.completions
    (choice,) = chats.create(model="tiny", messages=[TURN], tools=TOOLS).choices
    calls = choice.message.tool_calls
    assert calls
    result: Any = {"role": "tool", "tool_call_id": calls[0].id, "content": "noon"}
    turns: Any = [TURN, choice.message, result]
    chats.create(model="tiny", messages=turns, tools=TOOLS)
    assert f"<|im_start|>assistant\n{THINKS}{NOW}" in qwen.prompts[0]
    chats.create(model="tiny", messages=[*turns, TURN], tools=TOOLS)
    assert THOUGHT not in qwen.prompts[0]  # the template drops it behind the next question


def test_thinking_can_be_switched_off(gateway: Gateway, qwen: ScriptedReplica) -> None:
    gateway.engines.replay = qwen.writes("<think>no")
    body = {"model": "tiny", "messages": [TURN], "chat_template_kwargs": {"enable_thinking": False}}
    message = gateway.post(CHAT, body).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "<think>no", "refusal": None}


@pytest.mark.parametrize("opened", ["<think>", ""])
def test_structured_output_follows_the_thinking(
    gateway: Gateway, script: Script, opened: str
) -> None:
    script(f'{opened}{{"total"?}}</think>\n\n{{"total": 4}}', QWEN3 if opened else R1)
    client = gateway.openai()
    chat = client.chat.completions.parse(model="tiny", messages=[TURN], response_format=Sum)
    assert chat.choices[0].message.parsed == Sum(total=4)
    response = client.responses.parse(model="tiny", input="2 + 2?", text_format=Sum)
    assert response.output_parsed == Sum(total=4)
    assert [item.type for item in response.output] == ["reasoning", "message"]


def test_forced_calls_follow_the_thinking(gateway: Gateway, qwen: ScriptedReplica) -> None:
    gateway.engines.replay = qwen.writes(f"<think>{NOW}</think>\n\n{NOW}")
    body = {"model": "tiny", "messages": [TURN], "tools": TOOLS, "tool_choice": "required"}
    (choice,) = gateway.post(CHAT, body).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == NOW
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "time", "arguments": '{"zone": "utc"}'}


def test_responses_have_reasoning_items_that_can_be_sent_back(
    gateway: Gateway, qwen: ScriptedReplica
) -> None:
    gateway.engines.replay = qwen.writes(THINKS + NOW)
    client = gateway.openai()
    tools: list[Any] = [{"type": "function", **TIME}]
    answer = client.responses.create(model="tiny", input="When?", tools=tools)
    validate_as("Response", answer.to_dict())
    assert answer.usage is not None
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    with client.responses.stream(model="tiny", input="When?", tools=tools) as stream:
        thought = ""
        for event in stream:
            validate_as("ResponseStreamEvent", event.to_dict())
            if event.type == "response.reasoning_text.delta":
                thought += event.delta
        streamed = stream.get_final_response().output
    assert thought == THOUGHT
    reasoning, called = streamed
    assert reasoning.type == "reasoning"
    assert reasoning.content
    assert reasoning.content[0].text == THOUGHT
    assert called.type == "function_call"
    result = {"type": "function_call_output", "call_id": called.call_id, "output": "noon"}
    turns: Any = [{"role": "user", "content": "When?"}, *streamed, result]
    client.responses.create(model="tiny", input=turns, tools=tools)
    assert f"<|im_start|>assistant\n{THINKS}{NOW}" in qwen.prompts[0]


def test_empty_reasoning_changes_no_turn(gateway: Gateway, qwen: ScriptedReplica) -> None:
    said = {"role": "assistant", "content": "Hi."}
    empty = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    of_user = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    body = {"model": "tiny", "input": [TURN, empty, said, of_user, TURN]}
    assert gateway.post(RESPONSES, body).is_success
    assert [dict(message) for message in gateway.engines.last.messages] == [TURN, said, TURN]


def test_vllms_include_reasoning_leaves_it_out(gateway: Gateway, qwen: ScriptedReplica) -> None:
    body = {"model": "tiny", "messages": [TURN], "include_reasoning": False}
    answer = gateway.post(CHAT, body).json()
    message = {"role": "assistant", "content": "It is 4.", "refusal": None}
    assert answer["choices"][0]["message"] == message
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 999, "messages": [TURN]}


def test_a_message_has_its_thinking_in_a_block(gateway: Gateway, qwen: ScriptedReplica) -> None:
    pytest.importorskip("anthropic")
    gateway.engines.replay = qwen.writes(THINKS + NOW)
    tools = [{"name": "time", "input_schema": TIME["parameters"]}]
    asked: Any = {**ASKED, "tools": tools, "thinking": {"type": "adaptive"}}
    client = gateway.anthropic()
    answer = client.messages.create(**asked)
    validate_as("Message", answer.to_dict())
    for event in client.messages.create(**asked, stream=True):
        validate_as("RawMessageStreamEvent", event.to_dict())
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message().content
    thought, used = streamed
    assert (thought.type, thought.thinking) == ("thinking", THOUGHT)
    assert answer.usage.output_tokens_details is not None
    assert 0 < answer.usage.output_tokens_details.thinking_tokens < answer.usage.output_tokens
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "noon"}
    turns: Any = [
        TURN,
        {"role": "assistant", "content": streamed},
        {"role": "user", "content": [result]},
    ]
    client.messages.create(**asked | {"messages": turns})
    assert f"<|im_start|>assistant\n{THINKS}{NOW}" in qwen.prompts[0]


@pytest.mark.parametrize(
    "fields", [{}, {"thinking": {"type": "disabled"}}, {"thinking": {"type": "between_tools"}}]
)
def test_the_template_enables_thinking_if_a_message_asks_for_it(
    gateway: Gateway, qwen: ScriptedReplica, fields: dict[str, Any]
) -> None:
    asked: Any = {**ASKED, **fields}
    answer = gateway.post("/v1/messages", asked)
    assert answer.is_success
    assert "x-lorikeet-ignored" not in answer.headers
    thinks = fields.get("thinking") == {"type": "between_tools"}
    assert qwen.prompts[0].endswith("<think>\n\n</think>\n\n") != thinks
    assert (answer.json()["content"][0]["type"] == "thinking") == thinks


@pytest.mark.parametrize("fields", [{}, {"thinking": {"type": "adaptive", "display": "omitted"}}])
def test_thinking_is_left_out_unless_requested(
    gateway: Gateway, script: Script, fields: dict[str, Any]
) -> None:
    script(f"{THOUGHT}</think>\n\nIt is 4.", R1)
    answer = gateway.post("/v1/messages", {**ASKED, **fields}).json()
    assert answer["content"] == [{"type": "text", "text": "It is 4."}]
    assert answer["usage"]["output_tokens_details"]["thinking_tokens"] > 0


def test_plain_completions_stay_as_they_were_written(
    gateway: Gateway, qwen: ScriptedReplica
) -> None:
    answer = gateway.post(COMPLETIONS, {"model": "tiny", "prompt": "2 + 2 =", "max_tokens": 99})
    body = answer.json()
    assert body["choices"][0]["text"] == f"{THINKS}It is 4."
    assert "completion_tokens_details" not in body["usage"]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_only_assistants_messages_have_reasoning(unchanged: Gateway, name: str) -> None:
    turn = {**TURN, name: "Hm."}
    error = error_of(unchanged.post(CHAT, {"model": "tiny", "messages": [turn]}), 400)
    assert error["param"] == f"messages[0].{name}"
