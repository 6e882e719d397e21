"""Messages and variables for chat templates of Harmony, the format of gpt-oss."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lorikeet.errors import UnsupportedParameter

EFFORT = "reasoning_effort"
_BUILTIN_TOOLS = "builtin_tools"
_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""Effort that the model knows for each effort of the APIs that it does not know."""

_Message = Mapping[str, Any]


def harmony_variables(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return variables for the template with the nearest reasoning effort that the model knows.

    Raises UnsupportedParameter for the model's built-in tools, which no part of the service runs.

    given: variables of the request.
    """
    if given.get(_BUILTIN_TOOLS):
        raise UnsupportedParameter(
            f"{_BUILTIN_TOOLS}: the model's browser and python are not run here: leave it out, or "
            "send functions in tools and run them yourself",
            param="chat_template_kwargs",
        )
    effort = given.get(EFFORT)
    known = _EFFORTS.get(effort, effort) if isinstance(effort, str) else effort
    return {**given, **({} if effort is None else {EFFORT: known})}


def harmony_messages(messages: Sequence[_Message]) -> list[_Message]:
    """Return messages in the form that gpt-oss' template reads.

    Thinking is named `thinking`. The template takes no text beside the thinking before a call, so
    the text is added to the thinking. Of a message's calls the template shows the first alone, so
    each call gets a message, followed by its results.
    """
    shown = list[_Message]()
    rest = iter(messages)
    message = next(rest, None)
    while message is not None:
        results = list[_Message]()
        following = next(rest, None)
        while following is not None and following["role"] == "tool":
            results.append(following)
            following = next(rest, None)
        shown += _with_results(_with_thinking(message), results)
        message = following
    return shown


def harmony_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools in the form that gpt-oss' template reads.

    The template fails on a function without a description, and beside an `enum` or `oneOf` on a
    default that is no text, so the text of its JSON takes the default's place.
    """
    return [{**tool, "function": _described(tool["function"])} for tool in tools]


def _described(function: Mapping[str, Any]) -> dict[str, Any]:
    shown = {**function, "description": function.get("description") or ""}
    parameters = function.get("parameters") or {}
    if not (properties := parameters.get("properties")):
        return shown
    named = {name: _with_text_default(schema) for name, schema in properties.items()}
    return {**shown, "parameters": {**parameters, "properties": named}}


def _with_text_default(schema: Any) -> Any:
    if not isinstance(schema, Mapping) or not (schema.get("enum") or schema.get("oneOf")):
        return schema
    if isinstance(schema.get("default", ""), str):
        return schema
    return {**schema, "default": json.dumps(schema["default"])}


def _with_thinking(message: _Message) -> _Message:
    thought = message.get("reasoning_content")
    if not thought:
        return message
    if not message.get("tool_calls") or not message["content"]:
        return {**message, "thinking": thought}
    return {**message, "thinking": f"{thought}\n\n{message['content']}", "content": ""}


def _with_results(message: _Message, results: Sequence[_Message]) -> Iterator[_Message]:
    """Yield a message as one message for each of its calls, each followed by the call's results.

    results: the tools' results after the message; those of no call of the message come last.
    """
    calls = message.get("tool_calls") or ()
    if len(calls) < 2:
        yield message
        yield from results
        return
    called = {call["id"] for call in calls}
    for index, call in enumerate(calls):
        before = message if index == 0 else {"role": "assistant", "content": ""}
        yield {**before, "tool_calls": [call]}
        yield from (each for each in results if each["tool_call_id"] == call["id"])
    yield from (each for each in results if each["tool_call_id"] not in called)
