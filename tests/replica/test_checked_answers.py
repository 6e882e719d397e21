"""With `strict: false`, what a grammar cannot enforce is let go; the finished answer is checked."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from lorikeet.errors import InvalidInput
from lorikeet.protocol.messages import Call, Endpoint, FinalUsage, Format, ToolUse
from lorikeet.replica import grammar_sandbox as sandbox
from lorikeet.replica.grammar_matcher import ModelGrammars
from lorikeet.replica.replica import Replica
from lorikeet.replica.request_builder import RequestBuilder
from lorikeet.settings import Settings
from lorikeet.text.choice import SaidChoice, SchemaCheck
from lorikeet.text.grammars.held_schema import held_schema
from lorikeet.text.grammars.schema_check import broken_keyword
from lorikeet.text.prompts import PromptEncoder, encode_call
from lorikeet_engine.errors import EngineOverloaded, InvalidRequest
from lorikeet_engine.request import SamplingParams, SchedulingParams
from tests.replica.schema_keywords import WHOLE
from tests.replica.test_held_schema import tool
from tests.serving.local_gateway import answer_of

DEMO = Path(__file__).parents[2] / "demo" / "model"
CALL = Call(
    "r", Endpoint.CHAT, 0, "acme", "demo", None, messages=({"role": "user", "content": "Tags?"},)
)
TAGS = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
    "required": ["tags"],
    "additionalProperties": False,
}
GOOD = {"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": False}
OVERLAPPING = {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "b$": True}}


@pytest.fixture(scope="module")
def builder():
    builder = RequestBuilder(PromptEncoder(DEMO), DEMO, 4096)
    yield builder
    builder.close()


@pytest.fixture(scope="module")
def grammars():
    return ModelGrammars(DEMO)


def asking(schema, *, strict):
    return replace(CALL, format=Format(json.dumps(schema), strict=strict))


def built(builder, call):
    return asyncio.run(builder.build(encode_call(call, builder._encoder, 4096)))


def checked(builder, call, *said):
    encoded = built(builder, call)
    return asyncio.run(builder.check(call, encoded.checked, said))


def says(grammars, encoded, text):
    matcher = grammars.compile(encoded.request.sampling.grammar)
    try:
        for token in PromptEncoder(DEMO).backend.encode(text, add_special_tokens=False).ids:
            matcher.accept(token)
    except InvalidRequest:
        return False
    return matcher.may_end


class TestRequests:
    def test_a_begun_answer_waits_until_its_grammar_can_be_tried(self, builder, monkeypatch):
        try_it, busy = builder._grammars._trials.result, [1]

        def result(*asked):
            if busy.pop():
                raise EngineOverloaded("the machine is busy", retry_after_s=1.0)
            return try_it(*asked)

        monkeypatch.setattr(builder._grammars._trials, "result", result)
        call = asking(GOOD, strict=True)
        call = replace(call, scheduling=SchedulingParams(max_queue_s=0.001))
        encoded = encode_call(call, builder._encoder, 4096)
        with pytest.raises(EngineOverloaded):
            asyncio.run(builder.build(encoded))
        busy[:] = [0, 1]
        begun = asyncio.run(builder.build(replace(encoded, log=b"[0,[5],null,null,[]]\n")))
        assert begun.request.sampling.grammar
        assert not busy

    def test_keywords_that_are_let_go_are_named_with_their_place(self, builder):
        encoded = built(builder, asking(TAGS, strict=False))
        assert encoded.ignored == ("uniqueItems:$.properties.tags",)
        assert [each.schema for each in encoded.checked] == [TAGS]

    def test_the_other_keywords_are_still_held(self, builder, grammars):
        encoded = built(builder, asking(TAGS, strict=False))
        assert says(grammars, encoded, '{"tags": ["a", "a"]}')
        assert not says(grammars, encoded, '{"tags": [1]}')
        assert not says(grammars, encoded, "{}")

    def test_without_strict_the_schema_is_refused_with_the_way_out(self, builder):
        with pytest.raises(InvalidInput, match="With strict: false the answer is checked"):
            built(builder, asking(TAGS, strict=True))

    @pytest.mark.parametrize("strict", [True, False])
    def test_a_schema_that_can_be_held_is_held_and_not_checked(self, builder, strict):
        encoded = built(builder, asking(GOOD, strict=strict))
        assert (encoded.checked, encoded.ignored) == ((), ())
        plain = built(builder, asking(GOOD, strict=True))
        assert encoded.request.sampling.grammar == plain.request.sampling.grammar

    @pytest.mark.parametrize("param", ["guided_json", "structured_outputs"])
    def test_fields_without_strict_have_no_such_way_out(self, builder, param):
        with pytest.raises(InvalidInput) as refused:
            built(builder, replace(CALL, format=Format(json.dumps(TAGS), param=param)))
        assert "strict" not in refused.value.message

    @pytest.mark.parametrize(
        "schema",
        [{"type": "nope"}, {"$ref": "https://example.com/x"}, {"enum": []}, {"items": "a"}],
        ids=json.dumps,
    )
    def test_a_schema_at_fault_is_refused_all_the_same(self, builder, schema):
        with pytest.raises(InvalidInput) as refused:
            built(builder, asking(schema, strict=False))
        assert "strict" not in refused.value.message

    @pytest.mark.parametrize("keyword", WHOLE, ids=lambda keyword: keyword.name)
    def test_a_schema_whose_fault_has_no_place_is_let_go_as_a_whole(
        self, builder, grammars, keyword
    ):
        call = asking(keyword.schema, strict=False)
        encoded = built(builder, call)
        assert encoded.ignored == ("schema:$",)
        for value in (*keyword.right, *keyword.wrong):
            text = json.dumps(value)
            assert says(grammars, encoded, text)
            (check,) = checked(builder, call, SaidChoice(text, ()))
            assert check.valid == (value in keyword.right)

    def test_the_prompt_has_the_tools_as_the_client_wrote_them(self, builder):
        call = replace(CALL, tools=ToolUse((tool("f", OVERLAPPING, strict=False),), ("f",)))
        encoded = built(builder, call)
        assert encoded.ignored == ("schema:f:$",)
        plain = builder._encoder.encode(call, 4096)
        assert encoded.request.prompts == tuple(map(tuple, plain))

    def test_one_tool_that_is_let_go_leaves_the_others_held(self, builder, grammars):
        tools = tuple(
            tool(name, schema, strict=False)
            for name, schema in (("f", OVERLAPPING), ("g", TAGS), ("h", GOOD))
        )
        encoded = built(builder, replace(CALL, tools=ToolUse(tools, ("f", "g", "h"))))
        assert encoded.ignored == ("uniqueItems:g:$.properties.tags", "schema:f:$")
        assert {each.tool for each in encoded.checked} == {"f", "g"}
        opens, closes = "<tool_call>\n", "\n</tool_call>"
        for call, held in (
            ('{"name": "f", "arguments": {"ab": "x"}}', True),
            ('{"name": "g", "arguments": {"tags": ["a", "a"]}}', True),
            ('{"name": "g", "arguments": {"tags": [1]}}', False),
            ('{"name": "h", "arguments": {"n": "x"}}', False),
        ):
            assert says(grammars, encoded, opens + call + closes) == held

    def test_a_strict_tool_at_fault_beside_one_that_lets_go_is_named(self, builder):
        tools = (tool("f", OVERLAPPING, strict=False), tool("g", TAGS))
        with pytest.raises(InvalidInput, match=r"of tools\[1\] \(g\) cannot be followed"):
            built(builder, replace(CALL, tools=ToolUse(tools, ("f", "g"))))

    def test_names_fit_a_header(self):
        odd = {"é, \r\n" * 20: {"uniqueItems": True}, "x" * 99: {"contains": {}}}
        for keyword, path in held_schema({"properties": odd}, lets_go=True).let_go:
            assert f"{keyword}:{path}".isascii()
            assert path.isprintable()


class TestChecks:
    def test_each_choice_is_checked(self, builder):
        texts = ('{"tags": ["a", "b"]}', '{"tags": ["a", "a"]}', '{"tags": ["a"')
        said = [SaidChoice(text, ()) for text in texts]
        assert checked(builder, asking(TAGS, strict=False), *said) == [
            SchemaCheck(0, True),
            SchemaCheck(
                1, False, "at $.tags: the value breaks $.properties.tags.uniqueItems of the schema"
            ),
            SchemaCheck(2, False, "it is no JSON: it may have been cut off"),
        ]

    def test_calls_are_checked_by_their_tools(self, builder):
        tools = (tool("g", TAGS, strict=False), tool("h", GOOD, strict=False))
        call = replace(CALL, tools=ToolUse(tools, ("g", "h")))
        once, twice = '{"tags": ["a"]}', '{"tags": ["a", "a"]}'
        said = [SaidChoice("", calls) for calls in ([("h", "{}"), ("g", once)], [("g", twice)])]
        right, wrong = checked(builder, call, *said)
        assert right == SchemaCheck(0, True)
        assert wrong.valid is False
        assert wrong.error.startswith("g: at $.tags: ")

    def test_a_check_that_costs_too_much_is_given_up_and_hurts_nobody(self, builder):
        twice = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n - 1}"}] * 2} for n in range(1, 40)}
        schema = {"contains": {"$ref": "#/$defs/d39"}, "$defs": {"d0": True, **twice}}
        schema |= {"type": "array", "items": {"type": "integer"}, "minContains": 1}
        said = [SaidChoice(text, ()) for text in ("[]", "[1]", "[]")]
        call = asking(schema, strict=False)
        first, second, third = checked(builder, call, *said)
        assert first.valid is False
        assert second == SchemaCheck(1, None, sandbox.TOO_COMPLEX)
        assert third.valid is None
        assert checked(builder, call, said[0]) == [first]

    def test_a_busy_replica_says_that_it_has_not_checked(self, builder, monkeypatch):
        call = asking(TAGS, strict=False)
        encoded = built(builder, call)

        def refuse(*_):
            raise EngineOverloaded("too many wait", retry_after_s=1.0)

        monkeypatch.setattr(builder._grammars._trials, "result", refuse)
        (check,) = asyncio.run(builder.check(call, encoded.checked, [SaidChoice("{}", ())]))
        assert check.valid is None
        assert "busy" in check.error

    @pytest.mark.parametrize("text", ["NaN", "1e999x", "", "[" * 5000])
    def test_what_is_no_json_is_said(self, text):
        assert broken_keyword({}, text).startswith("it is no JSON")

    @pytest.mark.parametrize(
        ("schema", "right", "wrong"),
        [
            ({"multipleOf": 0.01}, ("19.99", "1.15", "1e22"), ("1.155",)),
            ({"pattern": r"^\d+$"}, ('"12"',), ('"12\\n"', '"\u0663"')),
            ({"pattern": r"^\p{L}+$"}, ('"\u00e9"',), ('"1"',)),
            ({"dependencies": {"a": ["b"]}}, ('{"a": 1, "b": 2}', '{"b": 2}'), ('{"a": 1}',)),
        ],
        ids=str,
    )
    def test_numbers_are_decimal_and_patterns_those_of_json_schema(self, schema, right, wrong):
        """Unlike in the package jsonschema: findings/jsonschema_decimals.sh."""
        assert [broken_keyword(schema, text) for text in right] == [None] * len(right)
        (keyword,) = schema
        for text in wrong:
            assert broken_keyword(schema, text).startswith(f"at $: the value breaks $.{keyword}")

    def test_no_reference_out_of_the_schema_is_followed(self, monkeypatch):
        def opened(*_, **__):
            raise AssertionError("a connection")

        monkeypatch.setattr("socket.socket.connect", opened)
        found = broken_keyword({"$ref": "http://127.0.0.1:9/x"}, "1")
        assert found == "the schema cannot be used: a $ref leads to no schema within it"

    def test_a_malformed_schema_is_named_by_its_place(self):
        found = broken_keyword({"properties": {"a": {"required": True}}}, "{}")
        assert found == "the schema cannot be used: it is malformed at $.properties.a.required"

    def test_a_deep_answer_is_checked(self):
        schema = {"type": "array", "items": {"$ref": "#"}}
        assert broken_keyword(schema, "[" * 900 + "]" * 900) is None
        assert broken_keyword(schema, "[" * 900 + "1" + "]" * 900).startswith("at $[0][0]")

    @pytest.mark.parametrize("draft", ["https://example.com/mine", "draft-07"])
    def test_an_unknown_draft_is_read_as_2020_12(self, draft):
        schema = {"$schema": draft, "prefixItems": [{"type": "null"}]}
        assert broken_keyword(schema, "[null, 1]") is None
        assert broken_keyword(schema, "[1]").startswith("at $[0]: the value breaks $.prefixItems")

    def test_a_schema_of_an_older_draft_is_read_as_one(self):
        schema = {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "null"}]}
        assert broken_keyword(schema, "[null, 1]") is None
        assert broken_keyword(schema, "[1]").startswith("at $[0]: the value breaks $.items[0].type")


def test_unique_items_are_held_in_older_drafts(builder, grammars):
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": {"enum": ["a", "b"]},
        "uniqueItems": True,
    }
    encoded = built(builder, asking(schema, strict=True))
    for value, held in (([], True), (["b", "a"], True), (["a", "a"], False), (["c"], False)):
        assert says(grammars, encoded, json.dumps(value)) == held


@pytest.mark.parametrize(
    ("items", "held"),
    [
        ({"enum": ["a", "b", 1, 1.0]}, True),
        ({"type": "boolean"}, True),
        ({"const": "a"}, True),
        ({"anyOf": [{"const": "a"}, {"type": "null"}]}, True),
        ({"type": "string", "enum": ["a", "b", 1]}, True),
        ({"enum": list("abcde")}, True),
        ({"enum": list("abcdef")}, False),
        ({"enum": [["a"], ["b"]], "minItems": 1}, False),
        ({"type": "string"}, False),
        (True, False),
    ],
    ids=str,
)
def test_items_that_a_schema_lists_are_held_to_be_unique(items, held):
    schema = {"type": "array", "items": items, "uniqueItems": True}
    assert ("uniqueItems" in held_schema(schema).schema) == (not held)


def test_orders_of_unique_items_stay_few():
    arrays = {"items": {"enum": list("abcde")}, "uniqueItems": True}
    many = {"properties": {f"p{i}": arrays for i in range(40)}}
    assert len(json.dumps(held_schema(many).schema)) < 150_000


@pytest.mark.parametrize("stream", [False, True])
def test_a_replica_says_whether_its_answer_is_valid(tmp_path, stream):
    given = {
        "LORIKEET_BASE_MODELS": f"demo={DEMO}",
        "LORIKEET_CATALOG": str(tmp_path / "catalog"),
        "LORIKEET_CACHE_DIR": str(tmp_path / "cache"),
        "LORIKEET_MAX_RUNNING": "4",
        "LORIKEET_MAX_BATCH_TOKENS": "64",
    }
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 4}
    sampling = SamplingParams(seed=4)
    call = replace(
        asking(schema, strict=False), max_tokens=100, n=2, stream=stream, sampling=sampling
    )

    async def inside():
        replica = Replica("r0", "demo", Settings.from_env(given))
        try:
            return [item async for item in answer_of(replica, call)]
        finally:
            replica.close()

    items = asyncio.run(inside())
    assert sum(isinstance(item, FinalUsage) for item in items) == 1
    sent = b"".join(item for item in items if isinstance(item, bytes))
    if stream:
        *events, last, done = (event.removeprefix(b"data: ") for event in sent.split(b"\n\n")[:-1])
        assert done == b"[DONE]"
        texts = ["", ""]
        for event in events:
            for choice in json.loads(event)["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
        body = json.loads(last)
        assert body["choices"] == []
    else:
        body = json.loads(sent)
        texts = [choice["message"]["content"] for choice in body["choices"]]
    for text, check in zip(texts, body["schema_check"], strict=True):
        assert check["valid"] == (broken_keyword(schema, text) is None)
