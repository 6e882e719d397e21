"""Values of Gemma's tool calls are held to the keywords of their schemas, at any depth."""

import json

import jsonschema
import pytest
from transformers import PreTrainedTokenizerFast

from lorikeet.errors import InvalidInput
from lorikeet.protocol.messages import ToolUse
from lorikeet.text.detokenizer import Vocabulary
from lorikeet.text.grammars.tool_grammar import call_grammar
from lorikeet.text.tools.syntax import FUNCTION_GEMMA, GEMMA_4
from tests.text.test_tool_calls import allows, forced, in_gemmas

NODE = {
    "type": "object",
    "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    "additionalProperties": False,
}
FORMATS = jsonschema.FormatChecker()
DEFS = {"place": {"enum": ["Oslo", "Rome"]}, "node": NODE}


@pytest.fixture(scope="module")
def demo():
    return PreTrainedTokenizerFast.from_pretrained("demo/model")


def use_of(schema):
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": DEFS}
    return ToolUse(
        ({"type": "function", "function": {"name": "f", "parameters": parameters}},), ("f",)
    )


OF = {"type": "array", "items": {"type": "integer"}}
HELD = [
    ({"type": "string"}, ["", "x", "12", '"q"', "a{b}:c,[d]\n<|", "\n"], [1, None]),
    ({"type": "string", "enum": ["a b", 'c"']}, ["a b", 'c"'], ["", "a", "a bc"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "ü🦜c"], ["a", "abcd"]),
    ({"type": "string", "pattern": "^[a-z]+/[0-9]$"}, ["ab/1"], ["ab", "ab/12", "AB/1"]),
    ({"type": "string", "format": "date"}, ["2026-11-29"], ["29 November"]),
    ({"type": "string", "not": {"enum": ["a", "b"]}}, ["c", "aa"], ["a", "b"]),
    ({"$ref": "#/$defs/place"}, ["Oslo"], ["Paris"]),
    ({"type": "integer", "minimum": 3}, [3, 12], [2, "3", 3.5]),
    ({"type": "number", "exclusiveMaximum": 1}, [0.5, -3], [1, "0"]),
    ({"type": "boolean"}, [True, False], ["true", 1, None]),
    ({"type": ["string", "null"]}, ["x", "null", None], [1]),
    ({"enum": ["a", 1, None, True]}, ["a", 1, None, True], ["1", 2, "b", False, "null"]),
    ({"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]}, ["a", None], ["c"]),
    ({"anyOf": [{"const": "a"}, {**OF, "minItems": 1}]}, ["a", [1]], ["b", []]),
    ({"oneOf": [{"type": "string"}, OF]}, ["a", [1]], [1]),
    (OF, [[], [1], [1, 2]], [["1"], [1.5], 1]),
    ({**OF, "minItems": 2, "maxItems": 3}, [[1, 2], [1, 2, 3]], [[1], [1, 2, 3, 4]]),
    ({**OF, "minItems": 1}, [[1], [1, 2]], [[]]),
    ({**OF, "maxItems": 0}, [[]], [[1]]),
    ({**OF, "maxItems": 2}, [[], [1], [1, 2]], [[1, 2, 3]]),
    ({**OF, "maxItems": 1}, [[], [1]], [[1, 2]]),
    ({**OF, "maxItems": 1000}, [[], [1] * 1000], [[1] * 1001]),
    (
        {"type": "array", "prefixItems": [{"type": "string"}, OF], "items": {"type": "null"}},
        [[], ["a"], ["a", [1]], ["a", [1], None, None]],
        [["a", None], [1], ["a", [1], 1]],
    ),
    (
        {"type": "array", "prefixItems": [{"type": "string"}, OF], "items": False, "minItems": 2},
        [["a", [1]]],
        [["a"], [], ["a", [1], 1]],
    ),
    (
        {"type": "array", "prefixItems": [{"type": "string"}], "minItems": 3, "maxItems": 4},
        [["a", 1, {}], ["a", 1, 2, 3]],
        [["a", 1], ["a", 1, 2, 3, 4]],
    ),
    (
        {"allOf": [{**OF, "maxItems": 2}, {"items": {"minimum": 3}, "minItems": 1}]},
        [[3], [3, 4]],
        [[], [2], [3, 3, 3]],
    ),
    ({"type": "array", "items": False}, [[]], [[1]]),
    ({"type": "array"}, [[], [1, "x", None, [{"b": []}]]], [1]),
    (
        {"type": "object", "properties": {"b": OF, "c": {"const": 1}}, "required": ["c"]},
        [{"c": 1}, {"b": [1], "c": 1}],
        [{}, {"b": [1]}, {"c": 2}, {"b": ["x"], "c": 1}, []],
    ),
    ({"type": "object", "additionalProperties": OF}, [{}, {"x": [1], "y z": []}], [{"x": 1}]),
    ({"type": "object"}, [{}, {"b": {"c": [None]}}], ["b"]),
    ({"type": "object", "additionalProperties": False}, [{}], [{"b": 1}]),
    (
        {"allOf": [{"additionalProperties": {"type": "integer"}}, {"required": ["b"]}]},
        [{"b": 1}],
        [{"b": "x"}, {}],
    ),
    (
        {"anyOf": [{"type": "object", "required": ["b"], "properties": {"b": OF}}, {"const": 1}]},
        [{"b": [1]}, 1],
        [{"b": 1}, {}, 2],
    ),
    (
        {"type": "object", "properties": {"x y": {"enum": [1]}, "p.q-r": {"enum": [2]}}},
        [{"x y": 1, "p.q-r": 2}, {"x y": 1}],
        [{"x y": 2}],
    ),
    ({"$ref": "#/$defs/node"}, [{}, {"kids": [{}, {"kids": []}]}], [{"kids": [1]}, {"b": 1}]),
    ({}, ["x", 1, [1, {}], {"a": None}, True], []),
]


@pytest.mark.parametrize("syntax", [GEMMA_4, FUNCTION_GEMMA], ids=["Gemma 4", "FunctionGemma"])
@pytest.mark.parametrize(("schema", "right", "wrong"), HELD, ids=[str(each[0]) for each in HELD])
def test_values_are_held_to_their_schema(demo, schema, right, wrong, syntax):
    allowed = allows(demo, call_grammar(use_of(schema), syntax, Vocabulary(demo.backend_tokenizer)))
    whole = {**schema, "$defs": DEFS}
    for value in right:
        jsonschema.validate(value, whole)
        assert allowed(forced(syntax, ("f", {"a": value}))), value
    for value in wrong:
        assert not jsonschema.Draft202012Validator(whole, format_checker=FORMATS).is_valid(value)
        assert not allowed(forced(syntax, ("f", {"a": value}))), value


def test_a_string_ends_at_its_mark(demo):
    grammar = call_grammar(use_of({"type": "string"}), GEMMA_4, Vocabulary(demo.backend_tokenizer))
    allowed = allows(demo, grammar)
    assert allowed('<|tool_call>call:f{a:<|"|>b<|"|>}<tool_call|>')
    assert not allowed('<|tool_call>call:f{a:<|"|>b<|"|>c<|"|>}<tool_call|>')


@pytest.mark.parametrize(
    ("schema", "path", "said"),
    [
        ({**OF, "uniqueItems": True}, "$.properties.a", "uniqueItems on an array"),
        ({**OF, "contains": {"const": 1}}, "$.properties.a", "contains on an array"),
        ({"items": {"const": [1]}, "type": "array"}, "$.properties.a.items", "const on an array"),
        (
            {"type": "object", "properties": {"b": {"type": "object", "minProperties": 2}}},
            "$.properties.a.properties.b",
            "minProperties on an object",
        ),
        (
            {"type": "array", "prefixItems": [{"type": "string", "enum": []}]},
            "$.properties.a.prefixItems[0]",
            "no value fits",
        ),
        ({"type": "object", "properties": {'<|"|>': {}}}, "$.properties.a", "want a name without"),
        ({"type": "string", "not": {"pattern": "x"}}, "$.properties.a", "not on a text"),
        ({"type": "array", "items": 3}, "$.properties.a.items", "want a schema"),
        ({"type": "array", "minItems": "2"}, "$.properties.a", "integers as bounds"),
        ({"$ref": "#/properties/a"}, "$.properties.a", "itself"),
    ],
)
def test_a_schema_that_cannot_be_held_is_refused_by_its_tool_and_place(demo, schema, path, said):
    with pytest.raises(InvalidInput) as refused:
        call_grammar(use_of(schema), GEMMA_4, Vocabulary(demo.backend_tokenizer))
    assert refused.value.message.startswith(f"the tool f: a function's parameters: at {path}: ")
    assert said in refused.value.message
    assert refused.value.param == "tools"


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/x", "$defs": {
            "x": {"properties": {"y": {"allOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/z"}]}}},
            "z": {"properties": {"y": {"allOf": [{"$ref": "#/$defs/z"}, {"$ref": "#/$defs/x"}]}}},
        }},
        {"properties": {f"p{i}": {"enum": [f"{i}" * 20_000]} for i in range(200)}},
    ],
    ids=["grows without end", "long"],
)  # fmt: skip
def test_a_schema_of_too_many_values_is_refused(demo, schema):
    function = {"name": "f", "parameters": {"type": "object", **schema}}
    use = ToolUse(({"type": "function", "function": function},), ("f",))
    with pytest.raises(InvalidInput, match=r"too (many|large)|nested too deeply"):
        call_grammar(use, GEMMA_4, Vocabulary(demo.backend_tokenizer))


def test_keys_come_in_the_order_of_the_chat_template(demo):
    properties = {key: {"type": "integer"} for key in ("b", "A", "c")}
    schema = {"type": "object", "properties": properties}
    allowed = allows(
        demo, call_grammar(use_of(schema), GEMMA_4, Vocabulary(demo.backend_tokenizer))
    )
    given = json.loads('{"A": 1, "b": 2, "c": 3}')
    assert in_gemmas(given, "") == "{A:1,b:2,c:3}"
    assert allowed(forced(GEMMA_4, ("f", {"a": given})))
    assert not allowed("<|tool_call>call:f{a:{b:2,A:1}}<tool_call|>")
