"""Checks of answers with thinking and tool calls, whole and streamed, by each API's own client."""

import json
from functools import partial
from typing import Any

from tests.gateway.conftest import Gateway
from tests.gateway.test_bad_requests import TURN


def check_chat(
    gateway: Gateway, thought: str, expected: list[Any], most: int, **asked: Any
) -> None:
    """Check a chat's thinking and tool calls. Arguments of forced calls are streamed in pieces.

    expected: arguments of each call.
    most: number of pieces of the first call's arguments that only a forced call exceeds.
    asked: fields of the request, with tool_choice.
    """
    create: Any = partial(
        gateway.openai().chat.completions.create, model="tiny", messages=[TURN], **asked
    )
    (whole,) = create().choices
    assert whole.finish_reason == "tool_calls"
    assert not whole.message.content
    assert whole.message.to_dict()["reasoning_content"] == thought
    assert [json.loads(call.function.arguments) for call in whole.message.tool_calls] == expected
    said, arguments = "", dict[int, list[str]]()
    for chunk in create(stream=True):
        delta = chunk.choices[0].delta
        assert not delta.content
        said += delta.to_dict().get("reasoning_content", "")
        for call in delta.tool_calls or []:
            arguments.setdefault(call.index, []).append(call.function.arguments or "")
    assert said == thought
    assert [json.loads("".join(pieces)) for pieces in arguments.values()] == expected
    assert (len(arguments[0]) > most) == (asked["tool_choice"] != "auto")


def check_response(gateway: Gateway, expected: list[Any], **asked: Any) -> Any:
    """Check the reasoning and calls of a response, whole and streamed; return the whole output.

    expected: arguments of each call.
    """
    responses: Any = gateway.openai().responses
    asked |= {"model": "tiny", "input": "Go."}
    with responses.stream(**asked) as stream:
        streamed = stream.get_final_response().output
    output = responses.create(**asked).output
    for items in (output, streamed):
        assert [item.type for item in items] == ["reasoning", *["function_call"] * len(expected)]
        assert [json.loads(item.arguments) for item in items[1:]] == expected
    return output


def check_message(
    gateway: Gateway, thought: str, expected: list[Any], tool: dict[str, Any], **asked: Any
) -> None:
    """Check a message's thinking block and tool inputs, whole and streamed.

    expected: input of each call.
    tool: name and `parameters` of a function.
    """
    messages: Any = gateway.anthropic().messages
    asked |= {
        "model": "tiny",
        "max_tokens": 900,
        "messages": [TURN],
        "tools": [{"name": tool["name"], "input_schema": tool["parameters"]}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    with messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (messages.create(**asked), streamed):
        block, *uses = message.content
        assert (block.type, block.thinking) == ("thinking", thought)
        assert [use.input for use in uses if use.type == "tool_use"] == expected
        assert message.stop_reason == "tool_use"
