"""OpenAI's supported fields: their values at the replica, bounds and refusals."""

from typing import Any

import pytest

from lorikeet.protocol.messages import Call, Format, ToolUse
from lorikeet_engine.request import LogprobsMode
from tests.gateway.conftest import Gateway, chat
from tests.gateway.test_bad_requests import CHAT, COMPLETIONS, TURN, error_of

PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
WEATHER = {"type": "function", "function": {"name": "get-weather_2", "parameters": PLACE}}
TIME = {"type": "function", "function": {"name": "time", "description": "Now.", "strict": True}}
TOOLS = [WEATHER, TIME]
SCHEMA = {"name": "place", "schema": PLACE, "strict": True}
CALL = {"id": "c1", "type": "function", "function": {"name": "time", "arguments": '{"at": 1}'}}
ASKED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
ANSWERED = {"role": "tool", "tool_call_id": "c1", "content": "noon"}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*map(named, names)]}}


@pytest.fixture
def gateway(shared: Gateway) -> Gateway:
    return shared


def sent(gateway: Gateway, path: str = CHAT, **fields: Any) -> Call:
    """Return the Call of a chat or completion with these fields."""
    body = chat() if path == CHAT else {"model": "tiny", "prompt": "a"}
    answer = gateway.post(path, body | fields)
    assert answer.status_code == 200, answer.text
    return gateway.engines.last


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("value", [-2, -0.5, 0, 2])
def test_penalties_and_biases_reach_the_engine(gateway: Gateway, path: str, value: float) -> None:
    bias = {"5": -100, "0": 100, "2147483647": value}
    sampling = sent(
        gateway, path, presence_penalty=value, frequency_penalty=-value, logit_bias=bias
    ).sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (value, -value)
    assert sampling.logit_bias == ((5, -100), (0, 100), (2**31 - 1, value))


def test_logprobs_reach_the_engine(gateway: Gateway) -> None:
    assert sent(gateway).sampling.logprobs is None
    assert sent(gateway, logprobs=False, top_logprobs=0).sampling.logprobs is None
    assert sent(gateway, logprobs=True).sampling.logprobs == 0
    assert sent(gateway, logprobs=True, top_logprobs=20).sampling.logprobs == 20
    assert sent(gateway, COMPLETIONS).sampling.logprobs is None
    assert sent(gateway, COMPLETIONS, logprobs=0).sampling.logprobs == 0
    assert sent(gateway, COMPLETIONS, logprobs=True).sampling.logprobs == 0
    assert sent(gateway, logprobs=True).sampling.logprobs_mode is LogprobsMode.RAW
    asked = {"logprobs": True, "logprobs_mode": "processed_logprobs"}
    assert sent(gateway, **asked).sampling.logprobs_mode is LogprobsMode.PROCESSED
    assert sent(gateway, COMPLETIONS, logprobs=False).sampling.logprobs is None
    assert sent(gateway, COMPLETIONS, logprobs=5).sampling.logprobs == 5


def test_prompt_logprobs_reach_the_engine(gateway: Gateway) -> None:
    scored = sent(gateway, prompt_logprobs=3, logprobs=True, top_logprobs=9)
    assert (scored.prompt_logprobs, scored.sampling.prompt_logprobs) == (3, 3)
    echoed = sent(gateway, COMPLETIONS, echo=True, logprobs=2)
    assert (echoed.prompt_logprobs, echoed.sampling.prompt_logprobs) == (None, 2)
    assert echoed.sampling.keep_stop_token
    both = sent(gateway, COMPLETIONS, echo=True, logprobs=2, prompt_logprobs=0)
    assert (both.prompt_logprobs, both.sampling.prompt_logprobs) == (0, 2)
    for fields in ({}, {"echo": True}, {"logprobs": 2}):
        plain = sent(gateway, COMPLETIONS, **fields).sampling
        assert (plain.prompt_logprobs, plain.keep_stop_token) == (None, False)


def test_formats_reach_the_replica(gateway: Gateway) -> None:
    assert sent(gateway, response_format={"type": "text"}).format is None
    anything = sent(gateway, response_format={"type": "json_object"}).format
    assert anything == Format('{"type": "object"}')
    strict = {"type": "json_schema", "json_schema": SCHEMA}
    assert sent(gateway, response_format=strict).format == Format(
        '{"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}'
    )
    bare = {"type": "json_schema", "json_schema": {"name": "any", "description": "Any."}}
    assert sent(gateway, response_format=bare).format == Format("{}")


@pytest.mark.parametrize(
    ("fields", "use"),
    [
        ({}, ToolUse((WEATHER, TIME))),
        ({"tool_choice": "auto"}, ToolUse((WEATHER, TIME))),
        ({"tool_choice": "none", "parallel_tool_calls": False}, None),
        ({"tool_choice": "required"}, ToolUse((WEATHER, TIME), ("get-weather_2", "time"))),
        ({"parallel_tool_calls": False}, ToolUse((WEATHER, TIME), parallel=False)),
        ({"tool_choice": named("time")}, ToolUse((WEATHER, TIME), ("time",), parallel=False)),
        ({"tool_choice": allowed("auto", "time")}, ToolUse((TIME,))),
        ({"tool_choice": allowed("required", "time")}, ToolUse((TIME,), ("time",))),
        (
            {"tool_choice": allowed("required", "time", "get-weather_2")},
            ToolUse((WEATHER, TIME), ("get-weather_2", "time")),
        ),
    ],
)
def test_tools_reach_the_replica_as_they_were_written(
    gateway: Gateway, fields: dict[str, Any], use: ToolUse | None
) -> None:
    assert sent(gateway, tools=TOOLS, **fields).tools == use


def test_calls_of_tools_and_their_answers_go_to_the_template(gateway: Gateway) -> None:
    call = sent(gateway, messages=[TURN | {"name": "ann"}, ASKED, ANSWERED])
    function = {"name": "time", "arguments": {"at": 1}}
    assert call.messages == (
        {"role": "user", "content": "hi", "name": "ann"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "noon", "tool_call_id": "c1"},
    )


def test_tools_count_as_prompt(gateway: Gateway) -> None:
    def tokens(**fields: Any) -> int:
        sent(gateway, **fields)
        return gateway.engines.last_work.prompt_tokens

    plain = tokens()
    big = {**WEATHER, "function": {**WEATHER["function"], "description": "x" * 2000}}  # type: ignore[dict-item]
    assert tokens(tools=[big]) > plain + 500
    assert tokens(tools=[big], tool_choice="none") == plain
    assert tokens(messages=[TURN, ASKED, ANSWERED]) > tokens(messages=[TURN, TURN, TURN]) + 10


def test_echo_and_best_of_equal_to_n_reach_the_replica(gateway: Gateway) -> None:
    assert sent(gateway, COMPLETIONS, echo=True, n=2, best_of=2).echo
    assert not sent(gateway, COMPLETIONS, echo=False, best_of=1).echo


def with_schema(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": SCHEMA | fields}}


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f"} | fields}]}


def calling(**fields: Any) -> dict[str, Any]:
    return {"messages": [TURN, {"role": "assistant", "tool_calls": [CALL | fields]}]}


INVALID: list[tuple[dict[str, Any], str, str]] = [
    ({"presence_penalty": -2.1}, "presence_penalty", "greater than or equal to -2"),
    ({"frequency_penalty": 2.1}, "frequency_penalty", "less than or equal to 2"),
    ({"presence_penalty": True}, "presence_penalty", "number"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"2147483648": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "-100 to 100"),
    ({"logit_bias": {"1": "1"}}, "logit_bias", "-100 to 100"),
    ({"logit_bias": [1]}, "logit_bias", "object"),
    ({"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias", "at most 1024"),
    ({"logprobs": 1}, "logprobs", "boolean"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "greater"),
    ({"top_logprobs": 1}, "top_logprobs", "logprobs to be true"),
    ({"prompt_logprobs": 101}, "prompt_logprobs", "less than or equal to 100"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "greater"),
    ({"prompt_logprobs": True}, "prompt_logprobs", "integer"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "stream to be false"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "want it"),
    (
        {"response_format": {"type": "json_object", "json_schema": SCHEMA}},
        "response_format.json_schema",
        "only there",
    ),
    (with_schema(name="a b"), "response_format.json_schema.name", "pattern"),
    (with_schema(name="a" * 65), "response_format.json_schema.name", "pattern"),
    (with_schema(schema=[]), "response_format.json_schema.schema", "object"),
    (with_schema(strict=1), "response_format.json_schema.strict", "boolean"),
    ({"tools": {}}, "tools", "array"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
    ({"tools": [{"type": 5, "function": {"name": "f"}}]}, "tools[0].type", "function"),
    (function(name="é"), "tools[0].function.name", "pattern"),
    (function(parameters="x"), "tools[0].function.parameters", "object"),
    (function(description=5), "tools[0].function.description", "string"),
    ({"tools": [named(f"f{i}") for i in range(129)]}, "tools", "at most 128"),
    ({"tools": [TIME, TIME]}, "tools", "name of its own"),
    ({"tools": TOOLS, "tool_choice": named("other")}, "tool_choice", "one of the tools"),
    ({"tools": TOOLS, "tool_choice": allowed("auto", "other")}, "tool_choice", "of the tools"),
    ({"tools": TOOLS, "tool_choice": allowed("auto")}, "tool_choice", "allowed_tools"),
    ({"tools": TOOLS, "tool_choice": allowed("none", "time")}, "tool_choice", "allowed_tools"),
    ({"tool_choice": allowed("auto", "time")}, "tool_choice", "tools"),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "required"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "name"),
    ({"tool_choice": "required"}, "tool_choice", "tools"),
    ({"tool_choice": named("f")}, "tool_choice", "tools"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls", "tools"),
    ({"messages": [TURN | {"tool_calls": [CALL]}]}, "messages[0].tool_calls", "assistant"),
    ({"messages": [TURN | {"tool_call_id": "c1"}]}, "messages[0].tool_call_id", "tool's"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content", "required"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "tool's"),
    ({"messages": [ANSWERED, ASKED]}, "messages", "messages[0] answers no tool call"),
    ({"messages": [TURN | {"name": ""}]}, "messages[0].name", "at least 1"),
    (calling(id=""), "messages[1].tool_calls[0].id", "at least 1"),
    (calling(type="custom"), "messages[1].tool_calls[0].type", "function"),
    (
        calling(function={"name": "f", "arguments": {}}),
        "messages[1].tool_calls[0].function.arguments",
        "JSON text of an object",
    ),
]


@pytest.mark.parametrize(("fields", "param", "says"), INVALID, ids=range(len(INVALID)))
def test_a_bad_value_of_a_chat_is_named(
    unchanged: Gateway, fields: dict[str, Any], param: str, says: str
) -> None:
    error = error_of(unchanged.post(CHAT, chat() | fields), 400)
    assert (error["code"], error["param"]) == ("invalid_value", param)
    assert says in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"logprobs": 6}, "logprobs", "less than or equal to 5"),
        ({"logprobs": -1}, "logprobs", "greater"),
        ({"logprobs": "1"}, "logprobs", "integer"),
        ({"echo": 1}, "echo", "boolean"),
        ({"prompt_logprobs": 101}, "prompt_logprobs", "less than or equal to 100"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "stream to be false"),
        ({"n": 3, "best_of": 2}, "best_of", "at least n (3)"),
        ({"best_of": 0}, "best_of", "greater"),
    ],
)
def test_a_bad_value_of_a_completion_is_named(
    unchanged: Gateway, fields: dict[str, Any], param: str, says: str
) -> None:
    body = {"model": "tiny", "prompt": "a"} | fields
    error = error_of(unchanged.post(COMPLETIONS, body), 400)
    assert (error["code"], error["param"]) == ("invalid_value", param)
    assert says in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice"),
        (CHAT, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0]"),
        (CHAT, {"messages": [TURN | {"audio": {"id": "a"}}]}, "messages[0].audio"),
        (COMPLETIONS, {"echo": True, "logprobs": 0, "stream": True}, "echo"),
        (COMPLETIONS, {"n": 2, "best_of": 3}, "best_of"),
    ],
)
def test_unsupported_combinations_are_refused_by_name(
    unchanged: Gateway, path: str, fields: dict[str, Any], param: str
) -> None:
    body = (chat() if path == CHAT else {"model": "tiny", "prompt": "a"}) | fields
    error = error_of(unchanged.post(path, body), 400)
    assert (error["code"], error["param"]) == ("unsupported_parameter", param)


def test_tools_formats_and_logprobs_may_be_asked_for_together(gateway: Gateway) -> None:
    call = sent(gateway, tools=TOOLS, logprobs=True, response_format={"type": "json_object"})
    assert call.tools is not None
    assert call.format is not None
    assert call.sampling.logprobs == 0
