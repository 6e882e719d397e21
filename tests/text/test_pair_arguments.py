"""Arguments that calls name one after another are held to the functions' schemas."""

import json
import tracemalloc

import pytest
from transformers import PreTrainedTokenizerFast

from lorikeet.apis.body import parse_json
from lorikeet.apis.chat.request import ChatRequest
from lorikeet.errors import InvalidInput
from lorikeet.protocol.messages import ToolUse
from lorikeet.text.detokenizer import Vocabulary
from lorikeet.text.grammars.format_grammar import LAYOUT
from lorikeet.text.grammars.python_arguments import python_arguments
from lorikeet.text.grammars.tool_grammar import call_grammar
from lorikeet.text.tools.syntax import FUNCTION_GEMMA, GEMMA_4, GLM, GLM_4_5, OLMO, QWEN_XML, SEED
from tests.text.test_tool_calls import allows, forced


@pytest.fixture(scope="module")
def demo():
    return PreTrainedTokenizerFast.from_pretrained("demo/model")


def nested(levels):
    """A schema of so many levels, the last of which refers to another."""
    schema = {"$ref": "#/$defs/x"}
    for _ in range(levels):
        schema = {"allOf": [schema]}
    return schema


ALLOWED = {
    "none": ({"properties": {}, "additionalProperties": False}, [{}], [{"a": 1}]),
    "any": ({}, [{}, {"a": 1}, {"a": [{}], "b2": None}], []),
    "optional": (
        {"properties": {"a": {"type": "integer"}, "b": {}, "c": {"type": "null"}}},
        [{}, {"a": 1}, {"b": "x"}, {"c": None}, {"a": 1, "c": None}, {"a": 1, "b": [], "c": None}],
        [{"a": "x"}, {"c": 1}, {"d": 1}],
    ),
    "the last is required": (
        {"properties": {"a": {}, "b": {"$ref": "#/$defs/n"}}, "required": ["b"]}
        | {"$defs": {"n": {"type": "integer"}}},
        [{"b": 1}, {"a": 1, "b": 1}],
        [{}, {"a": 1}, {"b": "x"}],
    ),
    "a reference": (
        {"$ref": "#/$defs/a~1b%7D"}
        | {"$defs": {"a/b}": {"properties": {"a": {"$ref": "#/$defs/n"}}}, "n": {"type": "null"}}},
        [{}, {"a": None}],
        [{"a": 1}, {"b": 1}],
    ),
    "one of two": (
        {
            "anyOf": [
                {"properties": {"b": {"type": "integer"}}, "required": ["b"]},
                {"properties": {"c": {"type": "null"}}},
                {"type": "null"},
                False,
            ],
            "properties": {"a": {}},
        },
        [{"b": 1}, {"b": 1, "a": 2}, {}, {"c": None}, {"c": None, "a": 2}],
        [{"b": "x"}, {"b": 1, "c": None}, {"d": 1}],
    ),
    "one of two is required": (
        {
            "properties": {"a": {}, "b": {}},
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 2}],
        [{}, {"c": 1}],
    ),
    "all of two": (
        {
            "allOf": [True, {"properties": {"a": {"minimum": 3}}}],
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
        },
        [{"a": 3}],
        [{}, {"a": 2}, {"a": "x"}],
    ),
    "one that is closed to what the other names": (
        {
            "allOf": [{"properties": {"a": {}, "b": {}}, "additionalProperties": False}],
            "properties": {"b": {"type": "null"}, "c": {}},
        },
        [{}, {"a": 1}, {"a": 1, "b": None}],
        [{"b": 1}, {"c": 1}],
    ),
    "never one": (
        {"properties": {"a": False, "b": True, "c": {"type": "null"}}},
        [{}, {"b": [1]}, {"b": 1, "c": None}],
        [{"a": 1}, {"a": None, "b": 1}, {"c": 1}],
    ),
    "never one, or any other that is not named": (
        {"properties": {"a": False}},
        [{}],
        [{"a": 1}, {"b": 1}],
    ),
    "never one by a part": (
        {"properties": {"a": {}, "b": {}}, "allOf": [{"properties": {"a": False}}]},
        [{}, {"b": 1}],
        [{"a": 1}],
    ),
    "never one in an alternative": (
        {
            "properties": {"a": {}, "b": {}},
            "anyOf": [
                {"required": ["a"]},
                {"required": ["a"], "properties": {"a": False}},
                {"required": ["b"], "properties": {"a": False}},
            ],
        },
        [{"a": 1}, {"a": 1, "b": 1}, {"b": 1}],
        [{}],
    ),
    "required ones that are not named": (
        {"properties": {"a": {"type": "null"}}, "required": ["b", "c"]},
        [{"b": 1, "c": []}, {"a": None, "b": "x", "c": 2}],
        [{}, {"a": None}, {"b": 1}, {"a": 1, "b": 1, "c": 1}],
    ),
    "one that no property names": ({"required": ["a"]}, [{"a": 1}], [{}, {"b": 1}]),
    "keywords that ask for nothing": (
        {"properties": {"a": {"type": "array", "uniqueItems": False}}, "propertyNames": {}}
        | {"minProperties": 0, "patternProperties": {}, "if": {}, "not": False},
        [{}, {"a": [1, 1]}],
        [{"b": 1}],
    ),
    "exactly one of two": (
        {"properties": {"a": {}, "b": {}}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    "one that needs another": (
        {"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        [{}, {"b": 1}, {"a": 1, "b": 1}],
        [{"a": 1}],
    ),
    "one by the value of another": (
        {
            "properties": {"a": {"enum": [1, 2]}, "b": {}},
            "if": {"properties": {"a": {"const": 1}}, "required": ["a"]},
            "then": {"required": ["b"]},
        },
        [{}, {"a": 2}, {"a": 1, "b": 0}],
        [{"a": 1}],
    ),
    "names of a list": (
        {"propertyNames": {"enum": ["a", "b"]}},
        [{}, {"a": 1}, {"a": 1, "b": 2}],
        [{"c": 1}],
    ),
    "not both": (
        {"properties": {"a": {}, "b": {}}, "not": {"required": ["a", "b"]}},
        [{}, {"a": 1}, {"b": 1}],
        [{"a": 1, "b": 1}],
    ),
    "none that a schema does not name": (
        {"properties": {"a": {}}, "unevaluatedProperties": False},
        [{}, {"a": 1}],
        [{"b": 1}],
    ),
    "none or any": (
        {"anyOf": [{"properties": {}, "additionalProperties": False}, {"type": ["object"]}]},
        [{}, {"a": 1}],
        [],
    ),
}


PAIRS = {
    "Python": OLMO,
    "FunctionGemma": FUNCTION_GEMMA,
    "Gemma 4": GEMMA_4,
    "XML": QWEN_XML,
    "XML without padding": SEED,
    "GLM 4.7": GLM,
    "GLM 4.5": GLM_4_5,
}


@pytest.mark.parametrize("syntax", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("schema", ALLOWED)
def test_arguments_named_one_after_another_keep_to_their_schemas(demo, schema, syntax):
    parameters, right, wrong = ALLOWED[schema]
    function = {"name": "f", "parameters": {"type": "object", **parameters}}
    use = ToolUse(({"type": "function", "function": function},), forced=("f",))
    allowed = allows(demo, call_grammar(use, syntax, Vocabulary(demo.backend_tokenizer)))
    assert all(allowed(forced(syntax, ("f", arguments))) for arguments in right)
    assert not any(allowed(forced(syntax, ("f", arguments))) for arguments in wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"properties": 3},
        {"properties": {"a": {}}, "required": 3},
        {"required": [["a"]]},
        {"anyOf": 3},
        {"anyOf": [3]},
        {"anyOf": []},
        {"anyOf": [{"type": "null"}]},
        {"$ref": 3},
        {"$ref": "#/$defs/a"},
        {"$ref": "#/type/0"},
        {"anyOf": [{"type": 3}]},
        {"properties": {"a": {}}, "required": ["b"], "additionalProperties": False},
        {"properties": {"a": False, "b": {}}, "required": ["a"]},
        {"properties": {"a": 3}},
        {"properties": {"a": {"$ref": "#", **nested(1000)}}},
        {"$ref": "https://example.com"},
    ],
)
@pytest.mark.parametrize("syntax", PAIRS.values(), ids=PAIRS)
def test_a_schema_that_no_arguments_can_meet_is_refused(demo, wrong, syntax):
    function = {"name": "f", "parameters": {"type": "object", **wrong}}
    use = ToolUse(({"type": "function", "function": function},), forced=("f",))
    with pytest.raises(
        InvalidInput, match=r"(a function's parameters|the parameters of f): "
    ) as refused:
        call_grammar(use, syntax, Vocabulary(demo.backend_tokenizer))
    assert refused.value.param == "tools"


WITH_A = {"properties": {"a": {"pattern": "x"}}}


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("oneOf", [WITH_A, {"required": ["a"]}]),
        ("not", WITH_A),
        ("if", WITH_A),
        ("const", {"a": 1}),
        ("enum", [{"a": 1}]),
        ("minProperties", 1),
        ("patternProperties", {"^a": {"type": "integer"}}),
        ("propertyNames", {"pattern": "^a"}),
        ("unevaluatedProperties", {"type": "integer"}),
        ("additionalProperties", {"type": "integer"}),
    ],
)
@pytest.mark.parametrize("at", ["the top", "a part"])
@pytest.mark.parametrize("syntax", [OLMO, QWEN_XML], ids=["Python", "XML"])
def test_unsupported_keywords_on_all_arguments_are_refused_by_name(
    demo, at, keyword, value, syntax
):
    said = {"properties": {"a": {}}, "then": {"required": ["b"]}, keyword: value}
    function = {"name": "f", "parameters": said if at == "the top" else {"allOf": [said]}}
    use = ToolUse(({"type": "function", "function": function},), forced=("f",))
    with pytest.raises(InvalidInput, match=rf"{keyword}\b.* cannot be held") as refused:
        call_grammar(use, syntax, Vocabulary(demo.backend_tokenizer))
    assert refused.value.param == "tools"


def test_the_deepest_schema_that_a_body_can_have_is_held():
    parameters = {"type": "object", "properties": {"a": nested(94)}, "$defs": {"x": {}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = {"model": "m", "messages": [{"role": "user", "content": ""}], "tools": [tool]}
    parse_json(json.dumps(body).encode(), ChatRequest)
    deeper = {"properties": {"a": nested(100)}}
    with pytest.raises(InvalidInput, match="recursion limit"):
        parse_json(json.dumps(deeper).encode(), ChatRequest)
    assert python_arguments("rule", {**parameters, "x-guidance": LAYOUT})


@pytest.mark.parametrize(
    "endless", [{"$ref": "#"}, {"allOf": [{"anyOf": [{"required": ["a"]}] * 2}] * 20}]
)
def test_a_schema_with_too_many_alternatives_is_refused(demo, endless):
    function = {"name": "f", "parameters": endless}
    use = ToolUse(({"type": "function", "function": function},), forced=("f",))
    with pytest.raises(InvalidInput, match="too many"):
        call_grammar(use, OLMO, Vocabulary(demo.backend_tokenizer))


def test_a_schema_that_multiplies_itself_is_refused_before_it_fills_the_memory(demo):
    many = {"allOf": [{"anyOf": [{"$ref": "#/$defs/x"}, *[True] * 100]}, *[True] * 100]}
    function = {"name": "f", "parameters": {"$ref": "#/$defs/x", "$defs": {"x": many}}}
    use = ToolUse(({"type": "function", "function": function},), forced=("f",))
    vocabulary = Vocabulary(demo.backend_tokenizer)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match="too many"):
            call_grammar(use, OLMO, vocabulary)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "large",
    [
        {"properties": {f"p{i}": {"$ref": "#/$defs/n"} for i in range(400)}, "$defs": {"n": {}}},
        {"properties": {f"p{i}": {} for i in range(3000)}, "anyOf": [True] * 20},
    ],
    ids=["references", "alternatives"],
)
def test_parameters_that_would_be_copied_too_often_are_refused(demo, large):
    function = {"name": "f", "parameters": {"type": "object", **large}}
    use = ToolUse(({"type": "function", "function": function},), forced=("f",))
    with pytest.raises(InvalidInput, match="too large"):
        call_grammar(use, OLMO, Vocabulary(demo.backend_tokenizer))
