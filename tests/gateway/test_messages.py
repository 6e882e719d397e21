"""/v1/messages through HTTP with Anthropic's client: requests, answers and refusals."""

from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from pydantic import BaseModel

from lorikeet.apis.answer import event_stream, whole_answer
from lorikeet.protocol.messages import Call, Endpoint, FinalUsage, Format, Refusal, StreamItem
from lorikeet.text.choice import Choice, Ending
from tests.apis.test_chat_answer import CALLS
from tests.gateway.conftest import Gateway, Played, chat, demo_encoder, header, repeat
from tests.gateway.scripted_replica import Script
from tests.gateway.test_bad_requests import error_of
from tests.waiting import eventually

anthropic = pytest.importorskip("anthropic")

MODEL = "acme/support"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USED = FinalUsage(25, 20, 7)
HELLO: Any = [{"role": "user", "content": "How is Paris?"}]
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "Return the weather.",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}},
}


def playing(
    text: str = "",
    calls: int = 0,
    finish: Ending | None = None,
    stop: str | None = None,
    usage: FinalUsage = USED,
) -> Callable[[Call], AsyncGenerator[StreamItem, None]]:
    """Return a replay of this text, then of this many deltas of calls."""
    ending = finish or (Ending.TOOL_CALLS if calls else Ending.STOP)

    async def play(call: Call) -> AsyncGenerator[StreamItem, None]:
        yield header(call)
        if call.stream:
            events = event_stream(call, Played(usage, stop))
            yield events.delta(0, text, None) + events.delta(0, "", ending, CALLS[:calls])
            yield usage
            yield events.end(usage)
        else:
            choice = Choice(text, ending, CALLS[:calls], stop=stop)
            yield usage
            yield whole_answer(call, [choice], usage)

    return play


def refusing(refusal: Refusal) -> Callable[[Call], AsyncGenerator[StreamItem, None]]:
    async def refuse(call: Call) -> AsyncGenerator[StreamItem, None]:
        yield header(call)
        yield refusal

    return refuse


@pytest.fixture
def gateway(shared: Gateway) -> Gateway:
    return shared


def test_a_message_is_answered(gateway: Gateway) -> None:
    message = gateway.anthropic().messages.create(
        model=MODEL,
        max_tokens=20,
        system="Be brief.",
        messages=[{"role": "user", "content": "Tell me a story"}],
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7},
        stop_sequences=["END", "\n\n"],
        metadata={"user_id": "user-1"},
    )
    (block,) = message.content
    assert (block.type, block.text, message.stop_reason) == ("text", "Tell me a story", "end_turn")
    assert (message.model, message.role, message.usage.input_tokens) == (MODEL, "assistant", 4)
    assert message.id == f"msg_{message._request_id}"
    call = gateway.engines.last
    assert (call.endpoint, call.max_tokens, call.stop) == (
        Endpoint.MESSAGES,
        20,
        ("END", "\n\n"),
    )
    sampling = call.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert [dict(turn) for turn in call.messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Tell me a story"},
    ]


@pytest.mark.parametrize("stop", [None, "END"])
def test_a_stream_equals_the_whole_message(gateway: Gateway, stop: str | None) -> None:
    gateway.engines.replay = playing("Let me look.", 5, stop=stop)
    client = gateway.anthropic()
    asked: Any = {"model": MODEL, "max_tokens": 20, "messages": HELLO, "tools": [WEATHER]}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text == "Let me look."
    assert streamed.to_dict(exclude_none=True) == whole.to_dict(exclude_none=True) | {
        "id": streamed.id
    }
    assert streamed.stop_reason == ("stop_sequence" if stop else "tool_use")
    assert streamed.stop_sequence == stop
    assert [block.type for block in streamed.content] == ["text", "tool_use", "tool_use"]
    usage = streamed.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (5, 20, 7)


def test_a_tool_is_called_and_its_result_sent_back(gateway: Gateway) -> None:
    gateway.engines.replay = playing("Let me look.", 3)
    client = gateway.anthropic()
    first = client.messages.create(model=MODEL, max_tokens=20, messages=HELLO, tools=[WEATHER])
    said, used = first.content
    assert (used.type, used.name, used.input) == ("tool_use", "weather", {"place": "Paris"})
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "sunny"}
    failed = result | {"content": [{"type": "text", "text": "no network"}], "is_error": True}
    turns: Any = [
        *HELLO,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, failed, {"type": "text", "text": "So?"}]},
    ]
    client.messages.create(model=MODEL, max_tokens=20, messages=turns, tools=[WEATHER])
    user, assistant, *results, question = (dict(turn) for turn in gateway.engines.last.messages)
    assert (user["content"], assistant["content"]) == ("How is Paris?", said.text)
    (called,) = assistant["tool_calls"]
    assert called["function"] == {"name": "weather", "arguments": {"place": "Paris"}}
    assert results == [
        {"role": "tool", "content": "sunny", "tool_call_id": called["id"]},
        {"role": "tool", "content": "Error: no network", "tool_call_id": called["id"]},
    ]
    assert question == {"role": "user", "content": "So?"}
    tools = gateway.engines.last.tools
    assert tools is not None
    (shown,) = tools.tools
    assert shown["function"]["parameters"] == WEATHER["input_schema"]
    order = [name for name in ("name", "description", "parameters") if name in shown["function"]]
    assert list(shown["function"])[: len(order)] == order, "as a chat's: templates write them so"


@pytest.mark.parametrize(
    ("choice", "forced", "parallel"),
    [
        ({"type": "auto"}, (), True),
        ({"type": "auto", "disable_parallel_tool_use": True}, (), False),
        ({"type": "any"}, ("weather", "time"), True),
        ({"type": "any", "disable_parallel_tool_use": True}, ("weather", "time"), False),
        ({"type": "tool", "name": "time"}, ("time",), False),
    ],
)
def test_a_tool_choice_becomes_the_chats(
    gateway: Gateway, choice: Any, forced: tuple[str, ...], parallel: bool
) -> None:
    tools: Any = [WEATHER, {"name": "time", "input_schema": {"type": "object"}, "strict": True}]
    gateway.anthropic().messages.create(
        model=MODEL, max_tokens=20, messages=HELLO, tools=tools, tool_choice=choice
    )
    used = gateway.engines.last.tools
    assert used is not None
    assert (used.forced, used.parallel, used.strict) == (forced, parallel, True)


def test_the_choice_none_shows_no_tools(gateway: Gateway) -> None:
    gateway.anthropic().messages.create(
        model=MODEL, max_tokens=20, messages=HELLO, tools=[WEATHER], tool_choice={"type": "none"}
    )
    assert gateway.engines.last.tools is None


def test_an_answer_can_be_constrained_to_a_schema(gateway: Gateway) -> None:
    class Event(BaseModel):
        name: str

    message = gateway.anthropic().messages.parse(
        model=MODEL,
        max_tokens=20,
        messages=[{"role": "user", "content": '{"name": "fair"}'}],
        output_format=Event,
    )
    assert message.parsed_output == Event(name="fair")
    held = gateway.engines.last.format
    assert isinstance(held, Format)
    assert '"name"' in held.text
    turns: Any = [*HELLO, {"role": "assistant", "content": message.content}, *HELLO]
    assert gateway.anthropic().messages.create(model=MODEL, max_tokens=5, messages=turns).content


@pytest.mark.parametrize(
    ("fields", "template_args"),
    [
        ({}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}),
        ({"thinking": {"type": "adaptive"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}),
    ],
)
def test_thinking_and_effort_go_to_the_chat_template(
    gateway: Gateway, fields: dict[str, Any], template_args: dict[str, Any]
) -> None:
    gateway.anthropic().messages.create(model=MODEL, max_tokens=2000, messages=HELLO, **fields)
    assert gateway.engines.last.template_args == template_args


def test_turns_of_one_role_are_joined_with_their_past_thinking(gateway: Gateway) -> None:
    cached = {"type": "ephemeral", "ttl": "1h"}
    turns: Any = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": cached}]},
        {"role": "user", "content": "b"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "y"},
                {"type": "text", "text": "c"},
                {"type": "text", "text": "d"},
            ],
        },
        {"role": "system", "content": "Hurry."},
        {"role": "user", "content": "e"},
        {"role": "assistant", "content": []},
    ]
    system: Any = [{"type": "text", "text": "Be ", "cache_control": cached}]
    gateway.anthropic().beta.messages.create(
        model=MODEL,
        max_tokens=20,
        messages=turns,
        system=[*system, {"type": "text", "text": "kind."}],
        betas=["context-management-2025-06-27"],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    )
    call = gateway.engines.last
    assert [(turn["role"], turn["content"]) for turn in call.messages] == [
        ("system", "Be kind."),
        ("user", "a\n\nb"),
        ("assistant", "cd"),
        ("system", "Hurry."),
        ("user", "e"),
    ]
    assert call.generation_prompt
    assert not call.continue_final


def test_an_answer_continues_a_last_message_of_the_assistant(gateway: Gateway) -> None:
    turns: Any = [*HELLO, {"role": "assistant", "content": "It is"}]
    gateway.anthropic().messages.create(model=MODEL, max_tokens=20, messages=turns)
    call = gateway.engines.last
    assert call.continue_final
    assert not call.generation_prompt
    assert call.messages[-1]["content"] == "It is"


def test_max_tokens_may_be_0(gateway: Gateway) -> None:
    gateway.engines.replay = playing("", finish=Ending.LENGTH)
    message = gateway.anthropic().messages.create(model=MODEL, max_tokens=0, messages=HELLO)
    assert gateway.engines.last.max_tokens == 0
    assert message.content == []


def offered(gateway: Gateway, *messages: Any, tools: list[Any], **more: Any) -> list[str]:
    body = {"model": MODEL, "max_tokens": 9, "messages": list(messages), "tools": tools, **more}
    gateway.post(MESSAGES, body).raise_for_status()
    used = gateway.engines.last.tools
    return [tool["function"]["name"] for tool in used.tools] if used else []


def turn(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


SEARCH_TOOL: dict[str, Any] = {"name": "ToolSearch", "input_schema": {"type": "object"}}
DEFERRED: dict[str, Any] = WEATHER | {"defer_loading": True}
ASKED = turn("user", {"type": "text", "text": "How is Paris?"})
SEARCHED = turn("assistant", {"type": "tool_use", "id": "t1", "name": "ToolSearch", "input": {}})


def test_a_deferred_tool_is_offered_once_a_search_of_the_clients_has_found_it(
    gateway: Gateway,
) -> None:
    """Claude Code's first request, and the request that follows its search."""
    tools = [SEARCH_TOOL, DEFERRED]
    assert offered(gateway, ASKED, tools=tools) == ["ToolSearch"]
    reference = {"type": "tool_reference", "tool_name": WEATHER["name"]}
    found = {"type": "tool_result", "tool_use_id": "t1", "content": [reference]}
    names = offered(gateway, ASKED, SEARCHED, turn("user", found), tools=tools)
    assert names == ["ToolSearch", WEATHER["name"]]
    assert gateway.engines.last.messages[-1]["content"] == f"You can now call {WEATHER['name']}."
    used = gateway.engines.last.tools
    assert used is not None
    assert "defer_loading" not in str(used.tools)


def test_a_reference_to_a_tool_that_is_not_declared_offers_nothing(gateway: Gateway) -> None:
    text = {"type": "text", "text": "found:"}
    content = [text, {"type": "tool_reference", "tool_name": "gone"}]
    found = {"type": "tool_result", "tool_use_id": "t1", "content": content}
    names = offered(gateway, ASKED, SEARCHED, turn("user", found), tools=[SEARCH_TOOL])
    assert names == ["ToolSearch"]
    assert gateway.engines.last.messages[-1]["content"] == "found:\nYou can now call gone."


def test_tools_are_offered_and_withdrawn_in_mid_conversation(gateway: Gateway) -> None:
    """Anthropic's mid-conversation tool changes, which Claude Code sends for late MCP servers."""
    named = {"type": "tool_reference", "name": WEATHER["name"]}
    added = turn("system", {"type": "tool_addition", "tool": named})
    removed = turn("system", {"type": "tool_removal", "tool": named})
    tools = [SEARCH_TOOL, DEFERRED]
    assert WEATHER["name"] in offered(gateway, ASKED, added, tools=tools)
    assert [message["role"] for message in gateway.engines.last.messages] == ["user"]
    assert WEATHER["name"] not in offered(gateway, ASKED, added, removed, tools=tools)
    assert offered(gateway, ASKED, removed, tools=[WEATHER, SEARCH_TOOL]) == ["ToolSearch"]


def test_anthropics_own_tools_are_left_out_beside_the_clients(gateway: Gateway) -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    body = {"model": MODEL, "messages": [ASKED], "tools": [search, WEATHER]}
    for path, more in ((MESSAGES, {"max_tokens": 9}), (COUNT, {})):
        gateway.post(path, body | more).raise_for_status()
        call = gateway.engines.last
        assert call.left_out == ("web_search_20250305",)
        assert call.tools is not None
        assert [tool["function"]["name"] for tool in call.tools.tools] == [WEATHER["name"]]
    forced = body | {"max_tokens": 9, "tool_choice": {"type": "tool", "name": "web_search"}}
    assert "name of one of the tools" in error_of(gateway.post(MESSAGES, forced), 400)["message"]


def test_deferred_tools_are_all_offered_if_anthropics_search_is_to_find_them(
    gateway: Gateway,
) -> None:
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    assert offered(gateway, ASKED, tools=[search, DEFERRED]) == [WEATHER["name"]]


def test_only_the_tools_that_are_not_deferred_count_towards_the_limit(gateway: Gateway) -> None:
    many = [WEATHER | {"name": f"t{i}", "defer_loading": i >= 128} for i in range(300)]
    gateway.engines.replay = Script(repeat, demo_encoder(), max_context=2**17)
    assert len(offered(gateway, ASKED, tools=many)) == 128
    body = {"model": MODEL, "max_tokens": 9, "messages": [ASKED], "tools": [*many, WEATHER]}
    assert "at most 128" in error_of(gateway.post(MESSAGES, body), 400)["message"]


def test_count_tokens_counts_the_prompt_of_the_same_message(gateway: Gateway) -> None:
    client = gateway.anthropic()
    prompt: Any = {"model": MODEL, "messages": HELLO, "system": "Be brief.", "tools": [WEATHER]}
    counted = client.messages.count_tokens(**prompt).input_tokens
    assert not gateway.engines.calls
    client.messages.create(max_tokens=9, **prompt)
    assert counted == gateway.engines.last_work.prompt_tokens


def test_a_count_is_a_request_that_takes_no_tokens(own_gateway: Gateway) -> None:
    # one request, which every gateway's share of a limit allows
    own_gateway.admin("PATCH", "/tenants/acme", {"requests_per_min": 1, "tokens_per_min": 1_000})
    body = chat(content="word " * 500)  # more than a minute's tokens
    answer = own_gateway.post(COUNT, body)
    assert answer.json()["input_tokens"] > 1_000
    left = "x-ratelimit-remaining-"
    assert int(answer.headers[f"{left}tokens"]) >= 100
    assert answer.headers[f"{left}requests"] == "0"
    assert error_of(own_gateway.post(COUNT, body), 429)["type"] == "rate_limit_error"
    assert explained(own_gateway, answer.headers["x-request-id"])["outcome"] == "finished"


def explained(gateway: Gateway, request_id: str) -> dict[str, Any]:
    """Return a request's record once it has ended, a moment after its last byte."""

    def ask() -> dict[str, Any]:
        why = gateway.request("GET", f"/v1/requests/{request_id}", gateway.keys["acme"])
        assert why.is_success
        return dict(why.json())

    assert eventually(lambda: ask()["outcome"] != "running")
    return ask()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]},
            "custom",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type (bash_20250124)"),
        ({"tools": [WEATHER | {"input_examples": [{"place": "x"}]}]}, "into the description"),
        (
            {
                "messages": [
                    turn("user", {"type": "tool_addition", "tool": {"type": "mcp_toolset"}})
                ]
            },
            "tool (mcp_toolset)",
        ),
        ({"container": "c1"}, "runs no code"),
        (
            {"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]},
            "send what they offer",
        ),
        ({"inference_geo": "eu"}, "operator"),
        ({"speed": "fast"}, "as fast as it can be"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "compact_20260112"),
        ({"stop": ["x"]}, "stop_sequences"),
        ({"logprobs": True}, "logprobs"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0] (image): want text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            "(document)",
        ),
        ({"system": [{"type": "image"}]}, "system (image): want text alone"),
    ],
)
def test_an_unsupported_field_is_refused_by_name(
    unchanged: Gateway, fields: dict[str, Any], said: str
) -> None:
    asked = {"model": MODEL, "messages": HELLO} | fields
    for path, more in ((MESSAGES, {"max_tokens": 9}), (COUNT, {})):
        error = error_of(unchanged.post(path, asked | more), 400)
        assert (error["code"], error["type"]) == ("unsupported_parameter", "invalid_request_error")
        assert said in error["message"]


def test_the_tool_runner_works_though_threads_are_refused(gateway: Gateway) -> None:
    def play(call: Call) -> AsyncGenerator[StreamItem, None]:
        return playing("Sunny.", 0 if call.messages[-1]["role"] == "tool" else 3)(call)

    @anthropic.beta_tool
    def weather(place: str) -> str:
        """Return the weather."""
        return f"sunny in {place}"

    gateway.engines.replay = play
    runner = gateway.anthropic().beta.messages.tool_runner(
        model=MODEL, max_tokens=20, messages=HELLO, tools=[weather]
    )
    assert runner.until_done().content[0].text == "Sunny."
    assert gateway.engines.last.messages[-1]["content"] == "sunny in Paris"
    body = {"model": MODEL, "max_tokens": 9, "messages": HELLO, "thread": {"type": "create"}}
    assert error_of(gateway.post(MESSAGES, body), 400)["code"] == "thread_unsupported_request"


def result_of(tool_use_id: str, **fields: Any) -> dict[str, Any]:
    block = {"type": "tool_result", "tool_use_id": tool_use_id, **fields}
    return {"role": "user", "content": [block]}


USE = {"type": "tool_use", "id": "u1", "name": "weather", "input": {}}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": None}, "max_tokens: Field required"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content: want at least one"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: Field required"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "want a message of the user"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content[0].text"),
        (
            {"messages": [{"role": "user", "content": [USE]}]},
            "no tool_use block in a message of the",
        ),
        ({"messages": [*HELLO, {"role": "assistant", "content": [USE]}]}, "the tool_result of the"),
        ({"messages": [result_of("u1")]}, "has a tool_result without an earlier tool_use"),
        (
            {
                "messages": [
                    *HELLO,
                    {"role": "assistant", "content": [USE]},
                    result_of("u1", text="a"),
                ]
            },
            "content[0].text: want it not in a tool_result",
        ),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": "It is "}]},
            "ends with whitespace",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice: want tools with it"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "name of one of the"),
        ({"tools": [WEATHER, WEATHER]}, "tools: want a name of its own"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"temperature": 3}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"context_management": {"edits": 5}}, "context_management"),
    ],
)
def test_a_wrong_field_is_named(unchanged: Gateway, fields: dict[str, Any], said: str) -> None:
    asked = {"model": MODEL, "messages": HELLO, "max_tokens": 9} | fields
    error = error_of(unchanged.post(MESSAGES, asked), 400)
    assert (error["code"], error["type"]) == ("invalid_value", "invalid_request_error")
    assert said in error["message"]


@pytest.mark.parametrize(
    ("refusal", "status", "kind", "message"),
    [
        (Refusal("overloaded", "later", retry_after_s=3), 529, "overloaded_error", "later"),
        (Refusal("adapter_load_failed", "broken", "model"), 503, "api_error", "broken"),
        (Refusal("generation_failed", "the step failed"), 500, "api_error", "the step failed"),
        (
            Refusal("context_length_exceeded", "shorten it", "messages"),
            400,
            "invalid_request_error",
            "prompt is too long: shorten it",
        ),
    ],
)
def test_clients_know_errors_by_their_class(
    gateway: Gateway, refusal: Refusal, status: int, kind: str, message: str
) -> None:
    gateway.engines.replay = refusing(refusal)
    classes = {
        529: anthropic.OverloadedError,
        503: anthropic.ServiceUnavailableError,
        500: anthropic.InternalServerError,
        400: anthropic.BadRequestError,
    }
    with pytest.raises(classes[status]) as refused:
        gateway.anthropic().messages.create(model=MODEL, max_tokens=9, messages=HELLO)
    error = refused.value
    assert (error.status_code, error.type, error.api_message) == (status, kind, message)
    assert (error.error_code, error.request_id) == (refusal.code, error.body["request_id"])
    if refusal.retry_after_s:
        assert error.response.headers["retry-after"] == "3"


def test_refusals_before_the_body_have_the_same_shape(own_gateway: Gateway) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 9, "messages": HELLO}
    with pytest.raises(anthropic.AuthenticationError, match="unknown or was revoked"):
        own_gateway.anthropic(api_key="lk_made-up").messages.create(**asked)
    bearer = own_gateway.anthropic(api_key=None, auth_token=own_gateway.keys["acme"])
    assert bearer.messages.create(**asked).content
    with pytest.raises(anthropic.NotFoundError, match="acme/nothing"):
        own_gateway.anthropic().messages.create(**asked | {"model": "acme/nothing"})
    large: Any = [{"role": "user", "content": "x" * 2**23}]
    with pytest.raises(anthropic.ContentTooLargeError):
        own_gateway.anthropic().messages.create(**asked | {"messages": large})
    own_gateway.admin("PATCH", "/tenants/acme", {"requests_per_min": 1})
    own_gateway.anthropic().messages.create(**asked)
    with pytest.raises(anthropic.RateLimitError) as limited:
        own_gateway.anthropic().messages.create(**asked)
    assert int(limited.value.response.headers["retry-after"]) >= 1


def test_a_missing_route_or_model_has_the_same_shape(unchanged: Gateway) -> None:
    key = unchanged.keys["acme"]
    for method, path, status in (
        ("POST", f"{MESSAGES}/batches", 404),
        ("GET", MESSAGES, 405),
        ("GET", f"{COUNT}/x", 404),
    ):
        error_of(unchanged.request(method, path, key), status)
    version = {"anthropic-version": "2023-06-01"}
    answer = unchanged.request("POST", "/v1/v1/messages", key, more_headers=version)
    assert "base_url has /v1 twice" in error_of(answer, 404)["message"]
    assert answer.json()["error"]["type"] == "not_found_error"


def test_a_failure_in_mid_stream_is_the_last_event(gateway: Gateway) -> None:
    async def fail(call: Call) -> AsyncGenerator[StreamItem, None]:
        yield header(call)
        yield event_stream(call, Played(FinalUsage(5, 3, 7))).delta(0, "so far")
        yield Refusal("generation_failed", "the step failed")

    gateway.engines.replay = fail
    heard = []
    with pytest.raises(anthropic.APIStatusError, match="the step failed") as failed:
        heard += gateway.anthropic().messages.create(
            model=MODEL, max_tokens=9, messages=HELLO, stream=True
        )
    assert (failed.value.type, failed.value.error_code) == ("api_error", "generation_failed")


def test_why_and_usage_know_a_message_by_its_own_id(own_gateway: Gateway) -> None:
    own_gateway.engines.replay = playing("sunny")
    message = own_gateway.anthropic().messages.create(model=MODEL, max_tokens=9, messages=HELLO)
    why = explained(own_gateway, message.id)
    assert message.id.endswith(why["id"])
    assert why["tokens"] == {"prompt": 25, "cached": 20, "output": 7, "from_host": 0}


def test_limits_hold_for_messages_as_for_chats(own_gateway: Gateway) -> None:
    own_gateway.admin("PATCH", "/tenants/acme", {"tokens_per_min": 6_000})
    own_gateway.engines.replay = playing("sunny", usage=FinalUsage(25, 20, 60_000))
    client = own_gateway.anthropic()
    client.messages.create(model=MODEL, max_tokens=60, messages=HELLO)

    def over() -> bool:  # settled a moment after the answer has ended
        try:
            client.messages.create(model=MODEL, max_tokens=1, messages=HELLO)
        except anthropic.RateLimitError as error:
            return "6000 tokens per minute" in str(error)
        return False

    assert eventually(over)


def test_models_are_listed_in_the_shape_of_the_clients_api(unchanged: Gateway) -> None:
    client = unchanged.anthropic()
    page = client.models.list()
    assert [model.id for model in page] == [MODEL, "tiny", "wider"]
    assert not page.has_next_page()
    assert [model.max_input_tokens for model in page] == [4096, 4096, None]
    model = client.models.retrieve(MODEL)
    assert (model.id, model.type, model.lifecycle) == (MODEL, "model", "active")
    assert model.max_input_tokens == 4096
    assert model.created_at.timestamp() > 1_600_000_000
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("globex/nothing")


def test_a_user_keeps_to_one_version(own_gateway: Gateway) -> None:
    own_gateway.register("acme/support", seed=1)
    own_gateway.admin("POST", "/adapters/acme/support/promote", {"version": 2, "share": 0.5})
    client = own_gateway.anthropic()

    def version(user: str) -> int:
        metadata: Any = {"user_id": user}
        client.messages.create(model=MODEL, max_tokens=9, messages=HELLO, metadata=metadata)
        adapter = own_gateway.engines.last.adapter
        assert adapter is not None
        return adapter.version

    seen = {user: {version(user) for _ in range(3)} for user in map(str, range(12))}
    assert all(len(versions) == 1 for versions in seen.values())
    assert {1, 2} == set().union(*seen.values())
