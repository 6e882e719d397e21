"""Tool calls in Python and FunctionGemma syntax are parsed and held to schemas."""

import itertools
import json

import pytest

from lorikeet.text.tools.call_bodies import calls_of
from lorikeet.text.tools.calls import ToolCallParser
from lorikeet.text.tools.syntax import (
    FUNCTION_GEMMA,
    GEMMA_4,
    OLMO,
    PYTHON_LIST,
    TOOL_CODE,
    CallStyle,
)
from tests.text.test_tool_calls import USE, cost_s, read

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
NESTED_TEXT["as Gemma 4's"] = NESTED_TEXT["as FunctionGemma's"].replace("<escape>", '<|"|>')


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("syntax", "written"),
    [
        *itertools.product((OLMO, TOOL_CODE, PYTHON_LIST), ("in Python", "as JSON")),
        (FUNCTION_GEMMA, "as FunctionGemma's"),
        (GEMMA_4, "as Gemma 4's"),
    ],
)
def test_nested_arguments_are_parsed(syntax, written, size):
    form = "call:time{%s}" if syntax.style is CallStyle.GEMMA else "time(%s)"
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
        (GEMMA_4, "<|tool_call>call:time{at:now}<tool_call|>"),
        (GEMMA_4, "<|tool_call>call:time{at:<escape>now<escape>}<tool_call|>"),
    ],
)
def test_malformed_calls_stay_text(syntax, text, size):
    assert read(ToolCallParser(syntax, USE), text, size) == (text, [])


def test_text_that_cannot_become_a_call_is_not_held_back():
    parser = ToolCallParser(PYTHON_LIST, USE)
    assert parser.push("[It") == ("", [])
    assert parser.push("'s so") == ("[It's so", [])
    parser = ToolCallParser(OLMO, USE)
    assert parser.push("<function_calls>I") == ("", [])
    assert parser.push(" am") == ("<function_calls>I am", [])


@pytest.mark.parametrize("syntax", [OLMO, TOOL_CODE, PYTHON_LIST])
@pytest.mark.parametrize(
    "within",
    [
        "what don't",
        "at='noon', what doesn't",
        "at='it's",
        "'twas night",
        ", 'twas night",
        "s) = 'a",
        "s): 'a",
        "{'a",
        "at='noon', 'a",
        "at: 'a",
        "at=[1 'a",
        "at={'a', 'b",
        "at={'a': 1, 'b', 'c",
        "at=[1], ['a",
        "at=f('a",
        "at=1) and 'a",
    ],
)
def test_text_that_cannot_continue_a_call_is_not_held_back(syntax, within):
    parser, begun = ToolCallParser(syntax, USE), f"{syntax.before}time({within}"
    assert "".join(parser.push(char)[0] for char in begun) == begun
    assert parser.push(" more") == (" more", [])


@pytest.mark.parametrize("within", ["at='it", "at=\"it's", 'at={"a": [1, \'b', '"at', "at={'a"])
def test_text_that_may_become_a_call_is_held_back(within):
    parser = ToolCallParser(PYTHON_LIST, USE)
    assert parser.push(f"[time({within}") == ("", [])
    assert parser.push(" not yet") == ("", [])


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


@pytest.mark.parametrize(
    ("syntax", "around"), [(PYTHON_LIST, "[f(a=[{}])]"), (FUNCTION_GEMMA, "call:f{{a:[{}]}}")]
)
def test_calls_with_too_many_values_stay_text(syntax, around):
    (call,) = calls_of(around.format("1," * 4000), syntax)
    assert call == ("f", {"a": [1] * 4000})
    with pytest.raises(ValueError, match="at most 4096 values"):
        calls_of(around.format("1," * 5000), syntax)
