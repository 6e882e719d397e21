"""Tool calls in XML are parsed, with values typed by the tools' schemas."""

import json

import pytest

from lorikeet.protocol.messages import ToolUse
from lorikeet.text.tools.calls import ToolCallParser
from lorikeet.text.tools.forced_xml_calls import ForcedXmlParser
from lorikeet.text.tools.syntax import QWEN_XML, SEED
from tests.text.test_tool_calls import calls_of, cost_s, read

EDIT = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "text": {"type": "string"},
        "line": {"type": "integer"},
        "ratio": {"type": "number"},
        "all": {"type": "boolean"},
        "edits": {"type": "array", "items": {"type": "object"}},
        "place": {"$ref": "#/$defs/place"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "size": {"type": ["string", "integer"]},
        "mode": {"enum": ["fast", "1"]},
        "any": {},
    },
    "$defs": {"place": {"type": "object"}},
}
USE = ToolUse(({"type": "function", "function": {"name": "edit", "parameters": EDIT}},))


def written(arguments: dict[str, str], pad: str = "\n") -> str:
    said = "".join(f"<parameter={key}>{pad}{t}{pad}</parameter>\n" for key, t in arguments.items())
    return f"<tool_call>\n<function=edit>\n{said}</function>\n</tool_call>"


VALUES = [
    ("text", "plain", "plain"),
    ("text", "", ""),
    ("text", "\n", "\n"),
    ("text", "two\nlines\n\n", "two\nlines\n\n"),
    ("text", "  indented", "  indented"),
    ("text", "12", "12"),
    ("text", "true", "true"),
    ("text", "null", "null"),
    ("text", '"quoted"', '"quoted"'),
    ("text", '{"a": "it\'s \\n"}', '{"a": "it\'s \\n"}'),
    ("text", "a < b && c > d &lt; <b>x</b>", "a < b && c > d &lt; <b>x</b>"),
    ("text", "Ünï 🦜", "Ünï 🦜"),
    ("text", "use <parameter=x> and </parameter> and </function> there", None),
    ("text", "<tool_call>\n</tool_call>", None),
    ("text", "</function>\nmore", None),
    ("mode", "1", "1"),
    ("line", "-12", -12),
    ("ratio", "0.5", 0.5),
    ("ratio", "3", 3),
    ("all", "true", True),
    ("all", "False", False),
    ("edits", '[{"old": "a < b", "new": [1, null]}]', [{"old": "a < b", "new": [1, None]}]),
    ("edits", "[{'old': True}]", [{"old": True}]),
    ("place", '{"city": "Oslo"}', {"city": "Oslo"}),
    ("note", "null", None),
    ("note", "12", "12"),
    ("note", "None", "None"),
    ("size", "12", 12),
    ("size", "12 cm", "12 cm"),
    ("size", "1.5", 1.5),
    ("size", "true", "true"),
    ("any", "[1, 2]", [1, 2]),
    ("any", "text", "text"),
    ("any", "1e999", "1e999"),
    ("undeclared", "5", 5),
    ("line", "five", "five"),
]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(("key", "text", "value"), VALUES)
def test_values_have_the_types_of_their_schemas(key, text, value, size):
    value = text if value is None and text != "null" else value
    said, calls = read(ToolCallParser(QWEN_XML, USE), written({key: text, "path": "x"}), size)
    assert (said, calls) == ("", [("edit", {key: value, "path": "x"})])


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(("key", "text", "value"), [v for v in VALUES if "</" not in v[1]])
def test_forced_calls_have_the_same_values_when_streamed(key, text, value, size):
    said, calls = read(ForcedXmlParser(QWEN_XML, USE), written({"path": "x", key: text}), size)
    assert (said, calls) == ("", [("edit", {"path": "x", key: value})])


def test_values_without_padding_keep_their_line_ends():
    text = written({"text": "\na\n", "line": "3"}, pad="").replace("tool_call", "seed:tool_call")
    assert read(ToolCallParser(SEED, USE), text, 3)[1] == [("edit", {"text": "\na\n", "line": 3})]
    assert read(ForcedXmlParser(SEED, USE), text, 3)[1] == [("edit", {"text": "\na\n", "line": 3})]


def test_strings_of_forced_calls_are_streamed_as_they_come():
    parser = ForcedXmlParser(QWEN_XML, USE)
    head = "<tool_call>\n<function=edit>\n<parameter=text>\nOne"
    pieces = [head, ' "two"', "\nthree", "\n</para", "meter>\n<parameter=line>\n", "4", "2\n</"]
    parts = [parser.push(piece).calls for piece in pieces]
    assert ["".join(part.arguments for part in each) for each in parts] == [
        '{"text": "One',
        ' \\"two\\"',
        "\\nthree",
        "",
        '", "line": ',
        "",
        "",
    ]
    assert not parser.called
    cut = parser.push("", last=True).calls
    assert "".join(part.arguments for part in cut) == "42"


def test_a_forced_call_without_arguments_is_sent_at_its_end():
    parser = ForcedXmlParser(QWEN_XML, USE)
    assert parser.push("<tool_call>\n<function=edit>\n").calls == []
    assert calls_of(parser.push("</function>\n</tool_call>").calls) == [("edit", {})]


def test_the_last_of_repeated_parameters_counts():
    text = written({"path": "a"}).replace(
        "</function>", "<parameter=path>\nb\n</parameter>\n</function>"
    )
    assert read(ToolCallParser(QWEN_XML, USE), text, 5)[1] == [("edit", {"path": "b"})]


@pytest.mark.parametrize(
    "text",
    [
        written({"path": "a", "line": "3"}).replace("\n</parameter>\n</function>", "\n</function>"),
        written({"path": "a", "line": "3"}).replace("\n</parameter>\n<p", "\n<p"),
        written({"path": "a", "line": "3"}).replace("\n", ""),
    ],
    ids=["the last", "one in the middle", "padding"],
)
def test_end_tags_and_padding_may_be_left_out(text):
    expected = [("edit", {"path": "a", "line": 3})]
    assert read(ToolCallParser(QWEN_XML, USE), text, 5) == ("", expected)


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    "text",
    [
        written({"path": "a"}).replace("edit", "unknown"),
        written({"path": "a"}).replace("</function>\n", ""),
        written({"path": "a"}).replace("</function>", "and so on</function>"),
        written({"path": "a"}).replace("<parameter", "and so on <parameter"),
        written({"path": "a"}).removesuffix("</tool_call>"),
        '<tool_call>\n{"name": "edit", "arguments": {}}\n</tool_call>',
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
    ],
)
def test_malformed_calls_stay_text(text, size):
    assert read(ToolCallParser(QWEN_XML, USE), text, size) == (text, [])


def test_a_call_behind_a_malformed_one_is_parsed():
    broken = written({"path": "a"}).replace("</function>\n", "")
    said, calls = read(ToolCallParser(QWEN_XML, USE), f"{broken}\n{written({'line': '1'})}", 4)
    assert (said, calls) == (broken, [("edit", {"line": 1})])


@pytest.mark.parametrize("parser", [ToolCallParser, ForcedXmlParser], ids=["free", "forced"])
def test_long_values_are_parsed_in_linear_time(parser):
    def cost(length):
        text = written({"text": "<x>\n" * length, "edits": json.dumps(["</"] * length)})
        return cost_s(lambda: parser(QWEN_XML, USE), text)

    assert cost(4_000) < 8 * cost(1_000) + 0.05
