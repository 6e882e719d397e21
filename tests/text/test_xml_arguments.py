"""Values of tool calls in XML are held to the keywords of their schemas."""

import pytest
from transformers import PreTrainedTokenizerFast

from lorikeet.errors import InvalidInput
from lorikeet.protocol.messages import Format, FormatKind, ToolUse
from lorikeet.text.detokenizer import Vocabulary
from lorikeet.text.grammars.format_grammar import format_grammar
from lorikeet.text.grammars.tool_grammar import call_grammar
from lorikeet.text.tools.syntax import QWEN_XML
from tests.text.test_tool_calls import allows


@pytest.fixture(scope="module")
def demo():
    return PreTrainedTokenizerFast.from_pretrained("demo/model")


def use_of(schema):
    place = {"enum": ["Oslo", "Rome"]}
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": {"place": place}}
    return ToolUse(({"type": "function", "function": {"name": "f", "parameters": parameters}},))


ASCII = r"^\w\d[^\w\\]\D$"
HELD = [
    ({"type": "string"}, ["", "x", "12", "null", '"q"', "a < b\n</p", "\n"], ["a</parameter>b"]),
    ({"type": "string", "enum": ["a b", 'c"']}, ["a b", 'c"'], ["", "a", "a bc", '"a b"']),
    ({"const": "x"}, ["x"], ["y", ""]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "ü🦜c"], ["a", "abcd"]),
    ({"type": "string", "pattern": "^[a-z]+/[0-9]$"}, ["ab/1"], ["ab", "ab/12", "AB/1"]),
    ({"type": "string", "pattern": "b"}, ["abc", "b"], ["ac"]),
    ({"type": "string", "pattern": "^a|c$"}, ["ab", "bc"], ["ba"]),
    ({"type": "string", "pattern": r"^\$\d\|"}, ["$1|x"], ["1|"]),
    ({"type": "string", "pattern": ASCII}, ["a1-é", "_9.+"], ["é1-+", "a٣-+", "a1b+"]),
    ({"type": "string", "format": "date"}, ["2026-11-29"], ["29 November", "2026-13-01"]),
    ({"type": "string", "format": "date-time"}, ["2026-11-29T10:00:00Z"], ["2026-11-29"]),
    ({"type": "string", "format": "time"}, ["10:00:00.5+01:00"], ["10"]),
    ({"type": "string", "format": "duration"}, ["P1DT2H", "PT5M", "P3W"], ["P", "1 day"]),
    ({"type": "string", "format": "email"}, ["a.b@c.org"], ["a.b"]),
    ({"type": "string", "format": "hostname"}, ["a-b.org"], ["-a", "a b"]),
    ({"type": "string", "format": "ipv4"}, ["10.0.0.255"], ["10.0.0.256"]),
    ({"type": "string", "format": "ipv6"}, ["::1", "1:2:3:4:5:6:7:8"], ["1:2"]),
    ({"type": "string", "format": "uri"}, ["https://a.org/b?c=d"], ["a b"]),
    ({"type": "string", "format": "uuid"}, ["0f8fad5b-d9cb-469f-a165-70867728950e"], ["0f8f"]),
    ({"type": "string", "format": "other"}, ["any"], []),
    ({"$ref": "#/$defs/place"}, ["Oslo"], ["Paris"]),
    ({"type": "integer", "minimum": 3}, ["3", "12"], ["2", "x", '"3"', "3.5"]),
    ({"type": "boolean"}, ["true", "false"], ["True", "yes"]),
    ({"type": "array", "items": {"type": "string"}}, ['["a</parameter>"]', "[]"], ["[1]", "a"]),
    ({"type": "object", "required": ["b"]}, ['{"b": 1}'], ["{}", "b"]),
    ({"type": ["string", "null"]}, ["x", "null", ""], []),
    ({"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]}, ["a", "null"], ["c", "None"]),
    ({"oneOf": [{"enum": ["a", "b"]}, {"type": "integer"}]}, ["a", "1"], ["c", "1.5"]),
    ({"oneOf": [{"const": "a"}, {"const": "b"}], "type": "string"}, ["a", "b"], ["c"]),
    ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer"}]}, ["ab", "123"], ["abc"]),
    ({"type": ["string", "integer"], "minimum": 3}, ["x"], ["2"]),
    ({"enum": ["a", 1, None, True]}, ["a", "1", "null", "true"], ["2", "b", "false"]),
    ({"enum": ["1", 2.5, "b"]}, ["2.5", "b"], ["1", "2"]),  # "1" would be read as a number
    ({"type": ["string", "array"], "items": {"type": "integer"}}, ["x", "[1]"], ["[x]", '["a"]']),
    ({}, ["x", "1", "[1, {}]", '{"a": null}', "true"], ["[1", "{a}"]),
    ({"allOf": [{"type": "string"}, {"minLength": 2}], "maxLength": 2}, ["ab"], ["a", "abc"]),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), HELD, ids=[str(each[0]) for each in HELD])
def test_values_are_held_to_their_schema(demo, schema, right, wrong):
    allowed = allows(
        demo, call_grammar(use_of(schema), QWEN_XML, Vocabulary(demo.backend_tokenizer))
    )

    def fits(value):
        said = f"<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>"
        return allowed(f"{QWEN_XML.before}{said}{QWEN_XML.after}")

    assert [value for value in right if not fits(value)] == []
    assert [value for value in wrong if fits(value)] == []


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"$ref": "#/properties/a"}, "itself"),
        ({"type": "string", "enum": []}, "no value"),
        ({"type": "string", "const": 1}, "no value"),
        ({"type": "string", "not": {"pattern": "x"}}, "not on a text cannot be held"),
        ({"oneOf": [{"type": "string", "maxLength": 3}, {"pattern": "b"}]}, "oneOf on a text"),
        ({"type": "string", "if": {"pattern": "x"}, "then": {"maxLength": 3}}, "if on a text"),
    ],
)
def test_a_value_that_cannot_be_held_is_refused_by_its_tool(demo, schema, said):
    with pytest.raises(InvalidInput, match=rf"tool f: .* at \$\.properties\.a: .*{said}"):
        call_grammar(use_of(schema), QWEN_XML, Vocabulary(demo.backend_tokenizer))


def test_digits_and_letters_of_a_regular_expression_are_those_of_ascii(demo):
    allowed = allows(demo, format_grammar(Format(ASCII, FormatKind.REGEX, "guided_regex")))
    assert [text for text in ("a1-é", "_9.+", "é1-+", "a٣-+", "a1b+") if allowed(text)] == [
        "a1-é",
        "_9.+",
    ]
