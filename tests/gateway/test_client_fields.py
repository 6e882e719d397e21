"""Effects through HTTP of fields that clients send beyond OpenAI's core."""

import json
from typing import Any

import pytest

from lorikeet.protocol.messages import Call, Format, FormatKind, Refusal
from lorikeet.text.grammars.answer_grammar import answer_grammar
from tests.gateway.conftest import Gateway, Items, Script, chat, header
from tests.gateway.scripted_replica import DEMO, ScriptedReplica
from tests.gateway.test_bad_requests import CHAT, COMPLETIONS, TURN, error_of
from tests.gateway.test_openai_fields import PLACE, sent

ASIDE = (
    "{% if aside %}[{{ aside }}]{% endif %}"
    "{% if reasoning_effort %}<{{ reasoning_effort }}>{% endif %}"
)


@pytest.fixture
def gateway(shared: Gateway) -> Gateway:
    return shared


@pytest.fixture
def replica(script: Script) -> ScriptedReplica:
    """Replica of the gateway whose template reads `aside` and `reasoning_effort`."""
    template = (DEMO / "chat_template.jinja").read_text() + ASIDE
    return script("fine", template)


def test_a_templates_variables_reach_it_and_others_are_named(
    gateway: Gateway, replica: ScriptedReplica
) -> None:
    asked = {"chat_template_kwargs": {"aside": "psst", "bos": 1}, "verbosity": "low"}
    answer = gateway.openai().chat.completions.with_raw_response.create(
        **chat("tiny", "hi"), reasoning_effort="high", extra_body=asked
    )
    assert replica.prompts == ["<|bos|><|user|>hi<|eos|><|assistant|>[psst]<high>"]
    assert answer.headers["x-lorikeet-ignored"] == "verbosity, bos"
    plain = gateway.post(CHAT, chat("tiny", "hi", reasoning_effort="low"))
    assert replica.prompts == ["<|bos|><|user|>hi<|eos|><|assistant|><low>"]
    assert "x-lorikeet-ignored" not in plain.headers


OTHERS: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "hi", "reasoning": {"effort": "low"}},
    "/v1/messages": {**chat("tiny", "hi"), "max_tokens": 9, "output_config": {"effort": "low"}},
}


@pytest.mark.parametrize("path", OTHERS)
def test_a_templates_variables_reach_it_from_other_apis_too(
    gateway: Gateway, replica: ScriptedReplica, path: str
) -> None:
    body = {"model": "tiny", **OTHERS[path]}
    gateway.post(path, body)
    assert replica.prompts == ["<|bos|><|user|>hi<|eos|><|assistant|><low>"]
    asked = {"aside": "psst", "bos": 1, "reasoning_effort": "max"}
    answer = gateway.post(path, body | {"chat_template_kwargs": asked})
    assert replica.prompts == ["<|bos|><|user|>hi<|eos|><|assistant|>[psst]<max>"]
    assert "bos" in answer.headers["x-lorikeet-ignored"].split(", ")


@pytest.mark.parametrize("path", OTHERS)
def test_a_templates_variables_are_part_of_a_prompt_whose_tokens_are_counted(
    gateway: Gateway, replica: ScriptedReplica, path: str
) -> None:
    body = {**OTHERS[path], "model": "acme/support", "chat_template_kwargs": {"bos": 1}}
    body.pop("max_tokens", None)
    counter = "count_tokens" if path == "/v1/messages" else "input_tokens"
    plain = gateway.post(f"{path}/{counter}", body)
    assert plain.headers["x-lorikeet-ignored"].split(", ")[-1] == "bos"
    more = gateway.post(f"{path}/{counter}", body | {"chat_template_kwargs": {"aside": "psst"}})
    aside = replica.encoder.backend.encode("[psst]", add_special_tokens=False)
    assert more.json()["input_tokens"] == plain.json()["input_tokens"] + len(aside)


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
def test_formats_that_a_schema_only_describes_are_named(
    gateway: Gateway, replica: ScriptedReplica, path: str
) -> None:
    schema = {"type": "string", "format": "nanoid", "pattern": "^[a-z]{3}$"}
    gateway.engines.replay = replica.writes('"abc"')
    fields: dict[str, Any]
    if path == CHAT:
        form: dict[str, Any] = {"name": "x", "schema": schema}
        fields = chat("tiny", response_format={"type": "json_schema", "json_schema": form})
    elif path == "/v1/responses":
        form = {"type": "json_schema", "name": "x", "schema": schema}
        fields = {"model": "tiny", "input": "hi", "text": {"format": form}}
    else:
        form = {"type": "json_schema", "schema": schema}
        fields = {"model": "tiny", "messages": [TURN], "max_tokens": 9}
        fields["output_config"] = {"format": form}
    answer = gateway.post(path, fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-lorikeet-ignored"] == "format:nanoid"


def test_a_template_variable_of_a_wrong_type_is_a_bad_request(
    gateway: Gateway, script: Script
) -> None:
    script("fine", "{{ messages[0].content }}{{ 1 // budget }}")
    for budget in (0, "x", None, [], {}):
        body = chat("tiny", chat_template_kwargs={"budget": budget})
        assert error_of(gateway.post(CHAT, body), 400)["param"] == "messages"


def test_usage_can_be_in_every_chunk(gateway: Gateway, replica: ScriptedReplica) -> None:
    for continuous in (False, True):
        options = {"include_usage": True, "continuous_usage_stats": continuous}
        body = chat("tiny", "hi", stream=True, stream_options=options)
        lines = gateway.post(CHAT, body).raise_for_status().text.split("\n\n")
        *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
        made = [chunk["usage"] and chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert made == ([1, 1, 2, 3, 4, 4] if continuous else [None] * 6)
        assert last["usage"]["completion_tokens"] == 4


def test_the_last_message_can_be_continued(gateway: Gateway, replica: ScriptedReplica) -> None:
    begun = [TURN, {"role": "assistant", "content": "It is"}]
    body = {"model": "tiny", "messages": begun, "continue_final_message": True}
    for prompt in ({}, {"add_generation_prompt": False}):
        assert gateway.post(CHAT, body | prompt).is_success
        assert replica.prompts == ["<|bos|><|user|>hi<|eos|><|assistant|>It is"]
    both = error_of(gateway.post(CHAT, body | {"add_generation_prompt": True}), 400)
    assert both["param"] == "continue_final_message"
    of_user = error_of(gateway.post(CHAT, body | {"messages": [TURN]}), 400)
    assert "assistant's" in of_user["message"]
    called = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for calls in ({"tool_calls": [called]}, {"function_call": called["function"]}):
        said = {"role": "assistant", "content": "It is", **calls}
        error = error_of(gateway.post(CHAT, body | {"messages": [TURN, said]}), 400)
        assert error["param"] == "continue_final_message"
        assert "want a last message without calls" in error["message"]


@pytest.mark.parametrize("begun", ["Well    ", "Well\n    ", "   ", ""])
@pytest.mark.parametrize("trim", ["", " | trim"])
def test_a_continued_message_keeps_the_whitespace_at_its_end(
    gateway: Gateway, script: Script, begun: str, trim: str
) -> None:
    template = "{% for m in messages %}{{ m.role }}:\n{{ m.content" + trim + " }}\n{% endfor %}"
    replica = script("fine", template)
    messages = [TURN, {"role": "assistant", "content": begun}]
    body = {"model": "tiny", "messages": messages, "continue_final_message": True}
    gateway.post(CHAT, body).raise_for_status()
    assert replica.prompts == [f"user:\nhi\nassistant:\n{begun}"]


@pytest.mark.parametrize(
    ("path", "format_fields", "param"),
    [
        (
            CHAT,
            {"continue_final_message": True, "response_format": {"type": "json_object"}},
            "response_format",
        ),
        (CHAT, {"continue_final_message": True, "guided_regex": "a+"}, "guided_regex"),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            "output_config.format",
        ),
    ],
)
def test_a_format_does_not_begin_anew_behind_a_begun_answer(
    gateway: Gateway, replica: ScriptedReplica, path: str, format_fields: Any, param: str
) -> None:
    body = {"model": "tiny", "max_tokens": 50, **format_fields}
    begun = [TURN, {"role": "assistant", "content": '{"name": "Mira",'}]
    error = error_of(gateway.post(path, body | {"messages": begun}), 400)
    assert param in error["message"]
    assert "cannot be held to a format" in error["message"]
    gateway.engines.replay = replica.writes("aaa" if param == "guided_regex" else "{}")
    empty = [TURN, {"role": "assistant", "content": ""}]
    assert gateway.post(path, body | {"messages": empty}).is_success


def test_a_message_that_the_template_changes_cannot_be_continued(
    gateway: Gateway, script: Script
) -> None:
    script("fine", "{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    begun = [TURN, {"role": "assistant", "content": "a secret"}]
    body = {"model": "tiny", "messages": begun, "continue_final_message": True}
    error = error_of(gateway.post(CHAT, body), 400)
    assert error["param"] == "continue_final_message"
    assert "secret" not in error["message"].lower()


def test_add_generation_prompt_false_reaches_the_template(
    gateway: Gateway, replica: ScriptedReplica
) -> None:
    assert gateway.post(CHAT, chat("tiny", "hi", add_generation_prompt=False)).is_success
    assert replica.prompts == ["<|bos|><|user|>hi<|eos|>"]


def test_developers_are_the_system_to_a_template(
    gateway: Gateway, replica: ScriptedReplica
) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, TURN]
    gateway.openai().chat.completions.create(model="tiny", messages=messages)  # type: ignore[arg-type]
    assert replica.prompts[0].startswith("<|bos|><|system|>Be brief.<|eos|>")


JSON = FormatKind.JSON_SCHEMA
FORMATS: list[tuple[dict[str, Any], Format, str]] = [
    ({"guided_json": PLACE}, Format(json.dumps(PLACE), JSON, "guided_json"), '{"place": "x"}'),
    (
        {"guided_json": json.dumps(PLACE)},
        Format(json.dumps(PLACE), JSON, "guided_json"),
        '{"place": "x"}',
    ),
    (
        {"guided_regex": r"[a-z/]+\d{2}"},
        Format(r"[a-z/]+\d{2}", FormatKind.REGEX, "guided_regex"),
        "a/b42",
    ),
    (
        {"guided_choice": ["yes", 'no "é" 😀\n/']},
        Format(json.dumps(["yes", 'no "é" 😀\n/']), FormatKind.CHOICES, "guided_choice"),
        'no "é" 😀\n/',
    ),
    (
        {"structured_outputs": {"json": PLACE}},
        Format(json.dumps(PLACE), JSON, "structured_outputs"),
        '{"place": "x"}',
    ),
    (
        {"structured_outputs": {"json_object": True}},
        Format('{"type": "object"}', JSON, "structured_outputs"),
        '{"a": 1}',
    ),
    (
        {"structured_outputs": {"regex": r"a\/b\n/c"}},
        Format(r"a\/b\n/c", FormatKind.REGEX, "structured_outputs"),
        "a/b\n/c",
    ),
    (
        {"structured_outputs": {"choice": ["yes", "no"], "disable_fallback": False}},
        Format('["yes", "no"]', FormatKind.CHOICES, "structured_outputs"),
        "yes",
    ),
]


@pytest.mark.parametrize(("fields", "asked", "allowed"), FORMATS, ids=range(len(FORMATS)))
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_vllms_format_fields_constrain_an_answer(
    gateway: Gateway,
    replica: ScriptedReplica,
    path: str,
    fields: dict[str, Any],
    asked: Format,
    allowed: str,
) -> None:
    gateway.engines.replay = replica.writes(allowed)
    assert sent(gateway, path, model="tiny", **fields).format == asked
    encoder = replica.encoder
    grammar = answer_grammar(gateway.engines.last, encoder.syntax, encoder.vocabulary)
    assert grammar is not None
    matcher = replica.grammars.compile(grammar)
    with pytest.raises(Exception, match="grammar"):
        matcher.accept(replica.encoder.backend.encode("Zebra", add_special_tokens=False).ids[0])


SCHEMA = {"type": "nope"}
NAMED = {"type": "json_schema", "name": "x", "schema": SCHEMA}
OF_ANTHROPIC = {"type": "json_schema", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format",
        ),
        ("/v1/responses", {"text": {"format": NAMED}}, "text.format"),
        ("/v1/messages", {"output_config": {"format": OF_ANTHROPIC}}, "output_config.format"),
        ("/v1/messages", {"output_format": OF_ANTHROPIC}, "output_format"),
    ],
)
def test_a_replica_names_a_format_as_the_api_does(
    gateway: Gateway, path: str, fields: dict[str, Any], field: str
) -> None:
    async def refuse(call: Call) -> Items:
        assert call.format is not None
        yield header(call)
        yield Refusal("invalid_value", f"not {call.format.param}", call.format.param)

    gateway.engines.replay = refuse
    asked = {"input": "hi"} if path == "/v1/responses" else {"messages": [TURN], "max_tokens": 9}
    error = error_of(gateway.post(path, {"model": "tiny"} | asked | fields), 400)
    assert error["message"] == f"not {field}"
    assert error["param"] == (None if path == "/v1/messages" else field)


BAD_FORMATS: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice", "without guided_regex"),
    ({"structured_outputs": {}}, "structured_outputs", "one of"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "one of"),
    ({"guided_choice": []}, "guided_choice", "at least 1"),
    ({"guided_choice": [""]}, "guided_choice[0]", "at least 1"),
    ({"guided_choice": ["a"] * 1025}, "guided_choice", "at most 1024"),
    ({"guided_regex": "a" * 4097}, "guided_regex", "at most 4096"),
    ({"guided_json": "[]"}, "guided_json", "object"),
    ({"guided_json": 5}, "guided_json", "object"),
]


@pytest.mark.parametrize(("fields", "param", "says"), BAD_FORMATS, ids=range(len(BAD_FORMATS)))
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_bad_format_is_named(
    unchanged: Gateway, path: str, fields: dict[str, Any], param: str, says: str
) -> None:
    body = chat() if path == CHAT else {"model": "tiny", "prompt": "a"}
    error = error_of(unchanged.post(path, body | fields), 400)
    assert (error["code"], error["param"]) == ("invalid_value", param)
    assert says in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_grammar": "root ::= x"}, "guided_grammar"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
        ({"chat_template_kwargs": {"chat_template": "{{ x }}"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
    ],
)
def test_unsupported_fields_of_clients_are_refused_by_name(
    unchanged: Gateway, fields: dict[str, Any], param: str
) -> None:
    error = error_of(unchanged.post(CHAT, chat() | fields), 400)
    assert (error["code"], error["param"]) == ("unsupported_parameter", param)


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"a b": 1}, "letters"),
        ({"a\r\nx-evil": 1}, "letters"),
        ({"a" * 65: 1}, "letters"),
        ({f"a{i}": 1 for i in range(33)}, "at most 32"),
        ({"a": "x" * 4096}, "at most 4096 characters"),
        ([], "object"),
    ],
)
def test_templates_variables_are_bounded(unchanged: Gateway, kwargs: Any, says: str) -> None:
    asked = {
        CHAT: chat(),
        "/v1/responses": {"model": "tiny", "input": "hi"},
        "/v1/messages": {**chat(), "max_tokens": 9},
    }
    for path, body in asked.items():
        error = error_of(unchanged.post(path, body | {"chat_template_kwargs": kwargs}), 400)
        assert "chat_template_kwargs" in error["message"]
        assert says in error["message"]


def test_fields_without_effect_are_accepted(gateway: Gateway) -> None:
    plain = gateway.openai().chat.completions.create(**chat())
    answer = gateway.openai().chat.completions.create(
        **chat(),
        prompt_cache_key="team",
        safety_identifier="someone",
        service_tier="priority",
        metadata={"a": "b"},
        store=False,
        extra_body={"prompt_cache_options": {"mode": "explicit"}, "prompt_cache_retention": "24h"},
    )
    assert answer.choices == plain.choices
    assert answer.service_tier == "default"
    assert error_of(gateway.post(CHAT, chat(store=True)), 400)["param"] == "store"
    for tier in ("fast", "ultrafast"):
        assert gateway.post(CHAT, chat(service_tier=tier)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "kind"),
    [
        (chat(content=[{"type": "image_url"}]), "messages[0].content", "image_url"),  # type: ignore[arg-type]
        (chat(tools=[{"type": "custom", "custom": {"name": "f"}}]), "tools[0]", "custom"),
        (chat(tools=[{"type": "web", "function": {"name": "f"}}]), "tools[0]", "web"),
        (chat(tool_choice={"type": "custom"}), "tool_choice", "custom"),
    ],
)
def test_other_kinds_than_text_and_functions_are_refused_by_name(
    unchanged: Gateway, fields: Any, param: str, kind: str
) -> None:
    error = error_of(unchanged.post(CHAT, fields), 400)
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")
    assert f"({kind})" in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"context_management": []},
        {"prompt_cache_options": {"mode": "explicit"}},
        {"reasoning": {"context": "auto", "mode": "standard"}},
        {"tools": [{"type": "function", "name": "f", "allowed_callers": ["direct"]}]},
        {
            "input": [
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
                | {"caller": {"type": "direct"}},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
            ]
        },
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_no_op_values_of_a_response_are_accepted(gateway: Gateway, fields: Any) -> None:
    answer = gateway.post("/v1/responses", {"model": "tiny", "input": "hi"} | fields)
    assert answer.status_code == 200, answer.text


def test_a_prompt_alone_is_echoed(gateway: Gateway, replica: ScriptedReplica) -> None:
    client = gateway.openai()
    for prompt in ("hello there", replica.encoder.backend.encode("hello there").ids):
        gateway.engines.replay = replica.writes("x")
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=0, echo=True)
        (choice,) = answer.choices
        assert choice.text == "hello there"
        assert choice.finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 0
    assert client.completions.create(model="tiny", prompt="a", max_tokens=0).choices[0].text == ""


def likelihoods(body: dict[str, Any], context_lengths: list[int]) -> list[tuple[float, bool]]:
    """Return each continuation's log likelihood and whether it is greedy.

    Computed as in lm-evaluation-harness.
    """
    read = []
    for choice, begin in zip(body["choices"], context_lengths, strict=True):
        scored = slice(begin, -1)  # without the last token, which was generated
        logprobs = choice["logprobs"]["token_logprobs"][scored]
        best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][scored]]
        read.append((sum(logprobs), logprobs == best))
    return read


@pytest.mark.parametrize("as_ids", [True, False])
def test_an_evaluation_harness_scores_continuations(
    gateway: Gateway, replica: ScriptedReplica, as_ids: bool
) -> None:
    gateway.engines.replay = replica.writes("<|eos|>")
    texts = ["two and two make four", "hi there"]
    encode = replica.encoder.backend.encode
    ids = [encode(text, add_special_tokens=not as_ids).ids for text in texts]
    body = {"model": "tiny", "prompt": ids if as_ids else texts, "temperature": 0}
    body |= {"max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    answer = gateway.post(COMPLETIONS, body).raise_for_status().json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice, text, tokens in zip(answer["choices"], texts, ids, strict=True):
        assert choice["text"] == text
        told = choice["logprobs"]
        assert [len(values) for values in told.values()] == [len(tokens) + 1] * 4
        assert "".join(told["tokens"]) == ("" if as_ids else "<|bos|>") + text + "<|eos|>"
        assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
        assert told["text_offset"][-1] == len(text)
    lengths = [len(tokens) - 2 for tokens in ids]
    assert likelihoods(answer, lengths) == [
        (float(-sum(range(length, length + 2))), False) for length in lengths
    ]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_a_prompt_can_be_scored_without_generating(
    gateway: Gateway, replica: ScriptedReplica
) -> None:
    gateway.engines.replay = replica.writes("x")
    tokens = replica.encoder.backend.encode("hi there", add_special_tokens=False).ids
    answer = gateway.openai().completions.create(
        model="tiny", prompt=tokens, max_tokens=0, echo=True, logprobs=1, n=2
    )
    for choice in answer.choices:
        assert (choice.text, choice.finish_reason) == ("hi there", "length")
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == [None, *(-1.0 * i for i in range(1, len(tokens)))]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_prompt_logprobs_come_as_from_vllm(
    gateway: Gateway, replica: ScriptedReplica, path: str
) -> None:
    asked = {"messages": [TURN]} if path == CHAT else {"prompt": ["hi", "you"], "n": 2}
    body = {"model": "tiny", "prompt_logprobs": 1, "max_tokens": 4, **asked}
    answer = gateway.post(path, body).raise_for_status().json()
    told = [part["prompt_logprobs"] for part in ([answer] if path == CHAT else answer["choices"])]
    assert ("prompt_logprobs" in answer["choices"][0]) is (path == COMPLETIONS)
    for prompt in told:
        assert prompt[0] is None
        for at, token in enumerate(prompt[1:], 1):
            shown = list(token.values())
            assert shown[0]["logprob"] == -1.0 * at
            assert shown[-1]["rank"] == 1
            assert all(one.keys() == {"logprob", "rank", "decoded_token"} for one in shown)
    assert sum(map(len, told)) == answer["usage"]["prompt_tokens"] * asked.get("n", 1)
    plain = gateway.post(path, body | {"prompt_logprobs": None}).raise_for_status().json()
    assert "prompt_logprobs" not in json.dumps(plain)


def test_too_many_prompt_logprobs_are_refused_with_their_number(
    gateway: Gateway, replica: ScriptedReplica
) -> None:
    tokens = [5] * 4000
    body = {"model": "tiny", "prompt": [tokens] * 7, "max_tokens": 1}
    for fields, param in (
        ({"prompt_logprobs": 20}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 5, "n": 4}, "logprobs"),
    ):
        error = error_of(gateway.post(COMPLETIONS, body | fields), 400)
        assert error["param"] == param
        assert "28000 tokens" in error["message"]
        assert "524288" in error["message"]


def test_sixteen_stop_strings_are_taken(gateway: Gateway, replica: ScriptedReplica) -> None:
    gateway.engines.replay = replica.writes("one two three four")
    stop = [f"<{i}>" for i in range(15)] + ["three"]
    answer = gateway.openai().chat.completions.create(**chat("tiny"), stop=stop)
    assert answer.choices[0].message.content == "one two "
