"""An answer can be sent back as a turn with everything that client libraries add to it."""

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.gateway.conftest import Gateway, Script
from tests.gateway.scripted_replica import ScriptedReplica
from tests.gateway.test_bad_requests import CHAT, TURN, error_of

CALL = '<tool_call>\n{"name": "Order", "arguments": {"amount": 7}}\n</tool_call>'


class Order(BaseModel):
    amount: int


TOOLS: Any = [openai.pydantic_function_tool(Order)]


@pytest.fixture
def gateway(shared: Gateway) -> Gateway:
    return shared


@pytest.fixture
def replica(script: Script) -> ScriptedReplica:
    return script(CALL)


def call_is_shown(gateway: Gateway, replica: ScriptedReplica, message: Any) -> bool:
    """Assert that the model sees a chat message with a function call exactly as it wrote it."""
    call_id = message.tool_calls[0].id
    turns = [TURN, message, {"role": "tool", "tool_call_id": call_id, "content": "done"}]
    gateway.openai().chat.completions.create(model="tiny", messages=turns)
    return f"<|assistant|>{CALL}<|eos|>" in replica.prompts[0]


def test_a_parsed_call_of_a_chat_can_be_sent_back(
    gateway: Gateway, replica: ScriptedReplica
) -> None:
    chats = gateway.openai().chat.completions
    answer = chats.parse(model="tiny", messages=[TURN], tools=TOOLS)
    assert call_is_shown(gateway, replica, answer.choices[0].message)


def test_a_streamed_call_can_be_sent_back(gateway: Gateway, replica: ScriptedReplica) -> None:
    chats = gateway.openai().chat.completions
    with chats.stream(model="tiny", messages=[TURN], tools=TOOLS) as stream:
        stream.until_done()
    message = stream.get_final_completion().choices[0].message
    assert message.tool_calls
    assert message.tool_calls[0].model_dump()["index"] == 0
    assert call_is_shown(gateway, replica, message)


def test_a_parsed_text_of_a_chat_can_be_sent_back(
    gateway: Gateway, replica: ScriptedReplica
) -> None:
    gateway.engines.replay = replica.writes('{"amount": 7}')
    chats = gateway.openai().chat.completions
    answer = chats.parse(model="tiny", messages=[TURN], response_format=Order)
    chats.create(model="tiny", messages=[TURN, answer.choices[0].message, TURN])
    assert '<|assistant|>{"amount": 7}<|eos|>' in replica.prompts[0]


def test_a_parsed_call_of_a_response_can_be_sent_back(
    gateway: Gateway, replica: ScriptedReplica
) -> None:
    client = gateway.openai()
    (called,) = client.responses.parse(model="tiny", input="hi", tools=TOOLS).output
    assert called.type == "function_call"
    output = {"type": "function_call_output", "call_id": called.call_id, "output": "done"}
    turns: Any = [TURN, called.model_dump(), output]
    client.responses.create(model="tiny", input=turns)
    assert f"<|assistant|>{CALL}<|eos|>" in replica.prompts[0]


def test_fields_that_litellm_adds_to_a_message_are_ignored(
    gateway: Gateway, replica: ScriptedReplica
) -> None:
    said = {"role": "assistant", "content": "hi", "provider_specific_fields": {"refusal": None}}
    assert gateway.post(CHAT, {"model": "tiny", "messages": [TURN, said, TURN]}).is_success


def test_a_call_without_arguments_may_have_empty_text(
    gateway: Gateway, replica: ScriptedReplica
) -> None:
    function = {"name": "Order", "arguments": ""}
    called = {
        "role": "assistant",
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    turns = [TURN, called, {"role": "tool", "tool_call_id": "c", "content": "done"}]
    assert gateway.post(CHAT, {"model": "tiny", "messages": turns}).is_success
    assert '{"name": "Order", "arguments": {}}' in replica.prompts[0]


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ('{"amount": 7, "city": "Ly', '{"amount": 7, "city": "Ly"}'),
        ('{"amount": 7, "ci', '{"amount": 7}'),
        ("{", "{}"),
        ("[1, 2]", r'"[1, 2]"'),
        ("seven", '"seven"'),
        ('{"a":' * 300 + "1" + "}" * 300, None),
    ],
    ids=["cut in a value", "cut in a key", "cut at once", "a list", "no JSON", "nested deeply"],
)
def test_a_call_whose_arguments_are_no_object_can_be_sent_back(
    gateway: Gateway, replica: ScriptedReplica, sent: str, shown: str | None
) -> None:
    function = {"name": "Order", "arguments": sent}
    called = {
        "role": "assistant",
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    turns = [TURN, called, {"role": "tool", "tool_call_id": "c", "content": "invalid JSON"}]
    assert gateway.post(CHAT, {"model": "tiny", "messages": turns}).is_success
    written = shown or json.dumps(sent)
    assert f'{{"name": "Order", "arguments": {written}}}' in replica.prompts[0]


def test_a_response_call_that_was_cut_off_can_be_sent_back(
    gateway: Gateway, replica: ScriptedReplica
) -> None:
    called = {"type": "function_call", "call_id": "c", "name": "Order", "arguments": '{"amount": 7'}
    output = {"type": "function_call_output", "call_id": "c", "output": "invalid JSON"}
    body = {"model": "tiny", "input": [TURN, called, output]}
    assert gateway.post("/v1/responses", body).is_success
    assert '{"name": "Order", "arguments": {"amount": 7}}' in replica.prompts[0]


def test_vllms_field_reasoning_is_accepted(gateway: Gateway) -> None:
    said = {"role": "assistant", "content": "4", "reasoning": "2 and 2."}
    assert gateway.post(CHAT, {"model": "tiny", "messages": [TURN, said, TURN]}).is_success
    assert gateway.engines.last.messages[1]["reasoning_content"] == "2 and 2."


def test_a_refusal_part_counts_as_text(gateway: Gateway) -> None:
    said = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}
    assert gateway.post(CHAT, {"model": "tiny", "messages": [TURN, said, TURN]}).is_success
    assert gateway.engines.last.messages[1] == {"role": "assistant", "content": "I will not."}


def test_other_fields_of_a_message_are_refused(unchanged: Gateway) -> None:
    said = {"role": "assistant", "content": "hi", "mood": "glad"}
    refused = unchanged.post(CHAT, {"model": "tiny", "messages": [TURN, said, TURN]})
    assert error_of(refused, 400)["param"] == "messages[1].mood"
