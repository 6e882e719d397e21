"""gpt-oss' Harmony through HTTP, in all three APIs, with the clients of OpenAI and Anthropic."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from lorikeet_engine.request import FinishReason
from tests.gateway.conftest import Gateway, Script
from tests.gateway.official_types import validate_as
from tests.gateway.scripted_replica import ScriptedReplica
from tests.gateway.test_bad_requests import CHAT, COMPLETIONS, TURN, error_of
from tests.replica.harmony_model import harmony_model

A = "<|start|>assistant"
THOUGHT, PREAMBLE = "Two and <4>.", "I look."
THINKS = f"<|channel|>analysis<|message|>{THOUGHT}<|end|>{A}"
SAYS = f"<|channel|>commentary<|message|>{PREAMBLE}<|end|>{A}"
ARGUMENTS = '{"zone":"utc"}'
CALLS = f"<|channel|>commentary to=functions.time <|constrain|>json<|message|>{ARGUMENTS}"
FINAL = "<|channel|>final<|message|>It is 4."
TIME: dict[str, Any] = {"name": "time", "parameters": {"type": "object"}}
TOOLS: list[Any] = [{"type": "function", "function": TIME}]
ASKED: dict[str, Any] = {"model": "tiny", "messages": [TURN]}
THINKING: Any = {"model": "tiny", "max_tokens": 999, "messages": [TURN]} | {
    "thinking": {"type": "adaptive"}
}


class Sum(BaseModel):
    total: int


@pytest.fixture
def gateway(shared: Gateway) -> Gateway:
    return shared


@pytest.fixture
def gpt_oss(script: Script, tmp_path: Path) -> ScriptedReplica:
    """Replica of the gateway with gpt-oss' chat template and marks."""
    return script(f"{THINKS}{FINAL}<|return|>", model=harmony_model(tmp_path / "model"))


def streamed_chat(gateway: Gateway, **more: Any) -> tuple[str, str, list[list[str]], str]:
    """Return thinking, text, calls and end of a streamed chat."""
    thought, said, calls, finish = "", "", [], ""
    for chunk in gateway.openai().chat.completions.create(**ASKED, **more, stream=True):
        validate_as("ChatCompletionChunk", chunk.to_dict())
        for choice in chunk.choices:
            thought += choice.delta.to_dict().get("reasoning_content", "")  # type: ignore[operator]
            said += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for part in choice.delta.tool_calls or ():
                assert part.function is not None
                if part.id:
                    calls.append([part.function.name or "", ""])
                calls[part.index][1] += part.function.arguments or ""
    return thought, said, calls, finish


def test_a_chat_has_thinking_apart_from_the_answer(
    gateway: Gateway, gpt_oss: ScriptedReplica
) -> None:
    answer = gateway.openai().chat.completions.create(**ASKED)
    validate_as("ChatCompletion", answer.to_dict())
    (choice,) = answer.choices
    message = choice.message.to_dict()
    assert (message["content"], message["reasoning_content"]) == ("It is 4.", THOUGHT)
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    thought = answer.usage.completion_tokens_details.reasoning_tokens
    encode = gpt_oss.encoder.backend.encode
    assert thought == len(encode(THINKS.removesuffix(A), add_special_tokens=False).ids)
    whole = encode(f"{THINKS}{FINAL}<|return|>", add_special_tokens=False).ids
    assert answer.usage.completion_tokens == len(whole)
    assert streamed_chat(gateway) == (THOUGHT, "It is 4.", [], "stop")


@pytest.mark.parametrize("end", ["<|call|>", ""])
def test_a_chat_has_preamble_and_call(gateway: Gateway, gpt_oss: ScriptedReplica, end: str) -> None:
    gateway.engines.replay = gpt_oss.writes(THINKS + SAYS + CALLS + end)
    (choice,) = gateway.openai().chat.completions.create(**ASKED, tools=TOOLS).choices
    message = choice.message
    assert (message.content, message.to_dict()["reasoning_content"]) == (PREAMBLE, THOUGHT)
    assert message.tool_calls
    (call,) = message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("time", ARGUMENTS)
    assert choice.finish_reason == "tool_calls"
    found = streamed_chat(gateway, tools=TOOLS)
    assert found == (THOUGHT, PREAMBLE, [["time", ARGUMENTS]], "tool_calls")
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "noon"}
    turns: Any = [TURN, message, result]
    gateway.openai().chat.completions.create(model="tiny", messages=turns, tools=TOOLS)
    shown = f"<|channel|>analysis<|message|>{THOUGHT}\n\n{PREAMBLE}<|end|>{A} to=functions.time"
    assert shown in gpt_oss.prompts[0]


def test_deprecated_functions_are_called(gateway: Gateway, gpt_oss: ScriptedReplica) -> None:
    gateway.engines.replay = gpt_oss.writes(CALLS + "<|call|>")
    (choice,) = gateway.post(CHAT, {**ASKED, "functions": [TIME]}).json()["choices"]
    assert choice["message"]["function_call"] == {"name": "time", "arguments": ARGUMENTS}
    assert choice["finish_reason"] == "function_call"


def test_a_call_cut_by_the_token_limit_has_its_arguments_so_far(
    gateway: Gateway, gpt_oss: ScriptedReplica
) -> None:
    gateway.engines.replay = gpt_oss.writes(THINKS + CALLS[:-4], FinishReason.LENGTH)
    thought, said, calls, finish = streamed_chat(gateway, tools=TOOLS)
    assert (thought, said, calls, finish) == (THOUGHT, "", [["time", ARGUMENTS[:-4]]], "length")
    gateway.engines.replay = gpt_oss.writes(THINKS + CALLS[:20], FinishReason.LENGTH)
    assert streamed_chat(gateway, tools=TOOLS) == (THOUGHT, "", [], "length")


def test_tool_choice_none_shows_no_tools(gateway: Gateway, gpt_oss: ScriptedReplica) -> None:
    assert streamed_chat(gateway, tools=TOOLS, tool_choice="none")[1] == "It is 4."
    assert "namespace functions" not in gpt_oss.prompts[0]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}])
def test_a_demanded_call_follows_the_thinking(
    gateway: Gateway, gpt_oss: ScriptedReplica, choice: Any
) -> None:
    gateway.engines.replay = gpt_oss.writes(THINKS + CALLS)
    found = streamed_chat(gateway, tools=TOOLS, tool_choice=choice)
    assert found == (THOUGHT, "", [["time", ARGUMENTS]], "tool_calls")


def test_strict_tools_and_formats_follow_the_thinking(
    gateway: Gateway, gpt_oss: ScriptedReplica
) -> None:
    gateway.engines.replay = gpt_oss.writes(f'{THINKS}<|channel|>final<|message|>{{"total": 4}}')
    client = gateway.openai()
    chat = client.chat.completions.parse(**ASKED, response_format=Sum)
    assert chat.choices[0].message.parsed == Sum(total=4)
    response = client.responses.parse(model="tiny", input="2 + 2?", text_format=Sum)
    assert response.output_parsed == Sum(total=4)
    assert [item.type for item in response.output] == ["reasoning", "message"]
    message = gateway.anthropic().messages.parse(**THINKING, output_format=Sum)
    assert message.parsed_output == Sum(total=4)
    gateway.engines.replay = gpt_oss.writes(THINKS + SAYS + CALLS)
    strict = [{"type": "function", "function": {**TIME, "strict": True}}]
    strict[0]["function"]["parameters"] = {  # type: ignore[index]
        "type": "object",
        "properties": {"zone": {"type": "string"}},
        "required": ["zone"],
        "additionalProperties": False,
    }
    found = streamed_chat(gateway, tools=strict)
    assert found == (THOUGHT, PREAMBLE, [["time", ARGUMENTS]], "tool_calls")


def test_log_probabilities_are_those_of_the_text(
    gateway: Gateway, gpt_oss: ScriptedReplica
) -> None:
    gateway.engines.replay = gpt_oss.writes(THINKS + SAYS + CALLS + "<|call|>")
    body = {**ASKED, "tools": TOOLS, "logprobs": True}
    (choice,) = gateway.post(CHAT, body).json()["choices"]
    assert "".join(each["token"] for each in choice["logprobs"]["content"]) == PREAMBLE


def test_token_ids_are_those_of_all_messages(gateway: Gateway, gpt_oss: ScriptedReplica) -> None:
    body = {**ASKED, "return_token_ids": True, "logprobs": True}
    (choice,) = gateway.post(CHAT, body).json()["choices"]
    text = f"{THINKS}{FINAL}<|return|>"
    assert choice["token_ids"] == gpt_oss.encoder.backend.encode(text, add_special_tokens=False).ids
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    assert choice["message"]["content"] == "It is 4."


def test_a_completion_is_the_text_of_all_messages(
    gateway: Gateway, gpt_oss: ScriptedReplica
) -> None:
    answer = gateway.post(COMPLETIONS, {"model": "tiny", "prompt": "hi"}).json()
    assert answer["choices"][0]["text"].startswith("analysis" + THOUGHT)
    assert "<|" not in answer["choices"][0]["text"]


def test_a_choice_of_several_ends_on_its_own(gateway: Gateway, gpt_oss: ScriptedReplica) -> None:
    answer = gateway.post(CHAT, {**ASKED, "n": 3}).json()
    said = [choice["message"]["content"] for choice in answer["choices"]]
    assert said == ["It is 4."] * 3


def test_a_response_has_reasoning_message_and_call_items(
    gateway: Gateway, gpt_oss: ScriptedReplica
) -> None:
    gateway.engines.replay = gpt_oss.writes(THINKS + SAYS + CALLS + "<|call|>")
    client = gateway.openai()
    tools: Any = [{"type": "function", **TIME}]
    answer = client.responses.create(model="tiny", input="When?", tools=tools)
    validate_as("Response", answer.to_dict())
    with client.responses.stream(model="tiny", input="When?", tools=tools) as stream:
        for event in stream:
            validate_as("ResponseStreamEvent", event.to_dict())
        streamed = stream.get_final_response().output
    for output in (answer.output, streamed):
        assert [item.type for item in output] == ["reasoning", "message", "function_call"]
        thought, said, called = (item.to_dict() for item in output)
        assert thought["content"][0]["text"] == THOUGHT  # type: ignore[index]
        assert said["content"][0]["text"] == PREAMBLE  # type: ignore[index]
        assert (called["name"], called["arguments"]) == ("time", ARGUMENTS)
    last: Any = streamed[-1]
    result = {"type": "function_call_output", "call_id": last.call_id, "output": "noon"}
    turns: Any = [{"role": "user", "content": "When?"}, *streamed, result]
    client.responses.create(model="tiny", input=turns, tools=tools, reasoning={"effort": "high"})
    assert f"{THOUGHT}\n\n{PREAMBLE}<|end|>{A} to=functions.time" in gpt_oss.prompts[0]
    assert "Reasoning: high" in gpt_oss.prompts[0]


def test_a_message_has_thinking_text_and_tool_use_blocks(
    gateway: Gateway, gpt_oss: ScriptedReplica
) -> None:
    gateway.engines.replay = gpt_oss.writes(THINKS + SAYS + CALLS + "<|call|>")
    asked = {**THINKING, "tools": [{"name": "time", "input_schema": {"type": "object"}}]}
    client = gateway.anthropic()
    answer = client.messages.create(**asked)
    validate_as("Message", answer.to_dict())
    for event in client.messages.create(**asked, stream=True):
        validate_as("RawMessageStreamEvent", event.to_dict())
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (answer, streamed):
        thought, said, used = message.content
        assert (thought.type, thought.thinking) == ("thinking", THOUGHT)
        assert (said.type, said.text) == ("text", PREAMBLE)
        assert (used.type, used.name, used.input) == ("tool_use", "time", json.loads(ARGUMENTS))
        assert message.stop_reason == "tool_use"
    used = streamed.content[-1]
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "noon"}
    turns = [
        TURN,
        {"role": "assistant", "content": streamed.content},
        {"role": "user", "content": [result]},
    ]
    client.messages.create(**asked | {"messages": turns})
    assert f"{THOUGHT}\n\n{PREAMBLE}<|end|>{A} to=functions.time" in gpt_oss.prompts[0]


def test_thinking_after_text_gets_a_block_of_its_own(
    gateway: Gateway, gpt_oss: ScriptedReplica
) -> None:
    gateway.engines.replay = gpt_oss.writes(SAYS + THINKS + FINAL)
    with gateway.anthropic().messages.stream(**THINKING) as stream:
        content = stream.get_final_message().content
    assert [block.type for block in content] == ["text", "thinking", "text"]
    assert (content[0].text, content[2].text) == (PREAMBLE, "It is 4.")
    whole = gateway.anthropic().messages.create(**THINKING).content
    assert [block.type for block in whole] == ["thinking", "text"]
    assert whole[1].text == f"{PREAMBLE}\n\nIt is 4."
    events = gateway.openai().responses.create(model="tiny", input="?", stream=True)
    (done,) = (event.response for event in events if event.type == "response.completed")
    assert [item.type for item in done.output] == ["message", "reasoning", "message"]


def test_thinking_that_cannot_be_switched_off_is_named(
    gateway: Gateway, gpt_oss: ScriptedReplica
) -> None:
    answer = gateway.post(CHAT, {**ASKED, "reasoning_effort": "none"})
    assert answer.headers["x-lorikeet-ignored"] == "reasoning_effort"
    assert "Reasoning: low" in gpt_oss.prompts[0]


def test_the_models_own_tools_are_refused_by_name(
    gateway: Gateway, gpt_oss: ScriptedReplica
) -> None:
    body = {**ASKED, "chat_template_kwargs": {"builtin_tools": ["python"]}}
    answer = gateway.post(CHAT, body)
    assert "builtin_tools" in error_of(answer, 400)["message"]
