"""Calls of tools in Python, and as FunctionGemma writes them: read, and held to schemas."""

import itertools
import json
import tracemalloc

import pytest
from transformers import PreTrainedTokenizerFast

from lorikeet.answer_stream.detokenizer import Vocabulary
from lorikeet.answer_stream.tool_calls import ToolCallParser
from lorikeet.answer_stream.tool_syntax import FUNCTION_GEMMA, OLMO, PYTHON_LIST, TOOL_CODE
from lorikeet.errors import InvalidInput
from lorikeet.protocol.messages import ToolUse
from lorikeet.replica.tool_grammar import call_grammar
from tests.answer_stream.test_tool_calls import USE, allows, cost_s, forced, read


@pytest.fixture(scope="module")
def demo():
    return PreTrainedTokenizerFast.from_pretrained("demo/model")


NESTED = {
    "where": {"city": "Paris", "at": [48.85, -2.35e0]},
    "say": 'it\'s "so"\n\t\\ 🦜 </function_calls>``` ] )',
    "more": [True, False, None, [], {}],
    "n-1": -3,
}
NESTED_TEXT = {
    "in Python": "where={'city': 'Paris', 'at': [48.85, -2.35e0,]}, "
    "say='it\\'s \"so\"\\n\\t\\\\ 🦜 </function_calls>``` ] )', "
    "more=[True, False, None, [], {}], n-1=-3",
    "as JSON": ", ".join(f"{key}={json.dumps(value)}" for key, value in NESTED.items()),
    "as FunctionGemma's": "more:[true,false,null,[],{}],n-1:-3,"
    'say:<escape>it\'s "so"\n\t\\ 🦜 </function_calls>``` ] )<escape>,'
    "where:{<escape>at<escape>:[48.85,-2.35e0],city:<escape>Paris<escape>}",
}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("syntax", "written"),
    [
        *itertools.product((OLMO, TOOL_CODE, PYTHON_LIST), ("in Python", "as JSON")),
        (FUNCTION_GEMMA, "as FunctionGemma's"),
    ],
)
def test_nested_arguments_are_read_as_they_are_meant(syntax, written, size):
    form = "call:time{%s}" if syntax is FUNCTION_GEMMA else "time(%s)"
    text = syntax.before + form % NESTED_TEXT[written] + syntax.after
    assert read(ToolCallParser(syntax, USE), text, size) == ("", [("time", NESTED)])


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        (OLMO, "<function_calls>I don't know</function_calls>"),
        (OLMO, "<function_calls>time(</function_calls>"),
        (OLMO, "<function_calls>time() and more</function_calls>"),
        (OLMO, "<function_calls>time()"),
        (OLMO, "<function_calls>unknown()</function_calls>"),
        (OLMO, '<function_calls>time("now")</function_calls>'),
        (OLMO, "<function_calls>time(at=now)</function_calls>"),
        (OLMO, "<function_calls>time(at=now())</function_calls>"),
        (OLMO, "<function_calls>time(at=[1 2])</function_calls>"),
        (OLMO, "<function_calls>time(at=1e999)</function_calls>"),
        (OLMO, "<function_calls>time(at=007)</function_calls>"),
        (OLMO, r"<function_calls>time(at='\ud83d')</function_calls>"),
        (OLMO, "<function_calls>time(at=" + 5000 * "[" + 5000 * "]" + ")</function_calls>"),
        (OLMO, "<function_calls>time(at=" + 9 * "99" * 300 + ")</function_calls>"),
        (TOOL_CODE, "```python\ntime()\n```"),
        (TOOL_CODE, "```tool_code\nimport os\n```"),
        (PYTHON_LIST, "[1] says so, and [time()] too"),
        (PYTHON_LIST, "I would say [time()]"),
        (PYTHON_LIST, "[time(), 3]"),
        (PYTHON_LIST, "[time()"),
        (FUNCTION_GEMMA, "<start_function_call>time{}<end_function_call>"),
        (FUNCTION_GEMMA, "<start_function_call>call:time{at:now}<end_function_call>"),
        (FUNCTION_GEMMA, "<start_function_call>call:time{at:<escape>now}<end_function_call>"),
        (FUNCTION_GEMMA, "<start_function_call>call:time{}call:time{}<end_function_call>"),
    ],
)
def test_what_is_no_proper_call_stays_text(syntax, text, size):
    assert read(ToolCallParser(syntax, USE), text, size) == (text, [])


def test_text_that_cannot_become_a_call_is_not_held_back():
    parser = ToolCallParser(PYTHON_LIST, USE)
    assert parser.push("[It") == ("", [])
    assert parser.push("'s so") == ("[It's so", [])
    parser = ToolCallParser(OLMO, USE)
    assert parser.push("<function_calls>I") == ("", [])
    assert parser.push(" am") == ("<function_calls>I am", [])


@pytest.mark.parametrize("syntax", [OLMO, TOOL_CODE, PYTHON_LIST])
@pytest.mark.parametrize("within", ["what don't", "at='noon', what doesn't", "at='it'"])
def test_an_apostrophe_in_no_string_holds_nothing_back(syntax, within):
    parser, begun = ToolCallParser(syntax, USE), f"{syntax.before}time({within}"
    assert parser.push(begun[:-3]) == ("", [])
    assert parser.push(begun[-3:] + "'s") == (begun + "'s", [])
    assert parser.push(" more") == (" more", [])


ALLOWED = {
    "none": ({"properties": {}, "additionalProperties": False}, [{}], [{"a": 1}]),
    "any": ({}, [{}, {"a": 1}, {"a": [{}], "b2": None}], []),
    "optional": (
        {"properties": {"a": {"type": "integer"}, "b": {}, "c": {"type": "null"}}},
        [{}, {"a": 1}, {"b": "x"}, {"c": None}, {"a": 1, "c": None}, {"a": 1, "b": [], "c": None}],
        [{"a": "1"}, {"c": 1}, {"d": 1}],
    ),
    "the last is required": (
        {"properties": {"a": {}, "b": {"$ref": "#/$defs/n"}}, "required": ["b"]}
        | {"$defs": {"n": {"type": "integer"}}},
        [{"b": 1}, {"a": 1, "b": 1}],
        [{}, {"a": 1}, {"b": "1"}],
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
        [{"b": "1"}, {"b": 1, "c": None}, {"d": 1}],
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
        [{}, {"a": 2}, {"a": "3"}],
    ),
    "one that is closed to what the other names": (
        {
            "allOf": [{"properties": {"a": {}, "b": {}}, "additionalProperties": False}],
            "properties": {"b": {"type": "null"}, "c": {}},
        },
        [{}, {"a": 1}, {"a": 1, "b": None}],
        [{"b": 1}, {"c": 1}],
    ),
    "none or any": (
        {"anyOf": [{"properties": {}, "additionalProperties": False}, {"type": ["object"]}]},
        [{}, {"a": 1}],
        [],
    ),
}


@pytest.mark.parametrize("schema", ALLOWED)
def test_arguments_in_python_keep_to_their_schemas(demo, schema):
    parameters, right, wrong = ALLOWED[schema]
    function = {"name": "f", "parameters": {"type": "object", **parameters}}
    use = ToolUse(({"type": "function", "function": function},), forced=("f",))
    allowed = allows(demo, call_grammar(use, OLMO, Vocabulary(demo.backend_tokenizer)))
    assert all(allowed(forced(OLMO, ("f", arguments))) for arguments in right)
    assert not any(allowed(forced(OLMO, ("f", arguments))) for arguments in wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"properties": 3},
        {"properties": {"a": {}}, "required": 3},
        {"anyOf": 3},
        {"anyOf": [3]},
        {"anyOf": []},
        {"anyOf": [{"type": "null"}]},
        {"$ref": 3},
        {"$ref": "#/$defs/a"},
        {"$ref": "#/type/0"},
        {"anyOf": [{"type": 3}]},
        {"properties": {"a": {}}, "required": ["b"], "additionalProperties": False},
        {"$ref": "https://example.com"},
    ],
)
def test_a_schema_that_no_arguments_can_meet_is_refused(demo, wrong):
    function = {"name": "f", "parameters": {"type": "object", **wrong}}
    use = ToolUse(({"type": "function", "function": function},), forced=("f",))
    with pytest.raises(InvalidInput, match="a function's parameters: ") as refused:
        call_grammar(use, OLMO, Vocabulary(demo.backend_tokenizer))
    assert refused.value.param == "tools"


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


LONG_PYTHON = {
    "spaces": lambda n: "<function_calls>time(" + " " * n,
    "brackets": lambda n: "<function_calls>time(a=[" + "[]," * (n // 3),
    "strings": lambda n: "<function_calls>time(a=" + "'\\\\" * n,
    "calls": lambda n: "<function_calls>" + "time()\n" * (n // 7) + "</function_calls>",
    "open strings": lambda n: "<function_calls>time(a='" + "</function_calls>" * (n // 17),
}


@pytest.mark.parametrize("long", LONG_PYTHON)
def test_the_time_to_read_calls_in_python_is_linear_in_their_length(long):
    short, fourfold = (
        cost_s(lambda: ToolCallParser(OLMO, USE), LONG_PYTHON[long](n)) for n in (4_000, 16_000)
    )
    assert fourfold < 8 * short + 0.01, "16 times as long if it were quadratic"
