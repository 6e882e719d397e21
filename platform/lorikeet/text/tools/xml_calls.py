"""Tool calls in XML: finding their end in streamed text, and parsing.

<function=weather>
<parameter=place>
Paris
</parameter>
</function>

Each family has its own tags (XmlTags). Values are bare text without escapes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import regex

from lorikeet.text.tools.argument_values import argument_types, argument_value, declared
from lorikeet.text.tools.python_calls import MOST_VALUES, FunctionCall
from lorikeet.text.tools.syntax import ToolSyntax

_MOST_SPACES = 16


@dataclass(frozen=True, slots=True)
class XmlPatterns:
    """Regular expressions of the tags of one syntax.

    function_begin, parameter_begin: tags around the name of a function and the key of a parameter,
        which are the first groups.
    parameter: whole parameter, whose second group is the value, and whose third group is empty text
        if the end tag is missing.
    next_line: line end before a parameter.
    body_end: end of the last part of a call, and its closing mark.
    bare_end: a whole call without parameters, and its closing mark; None in a syntax with a tag
        after the arguments.
    """

    function_begin: "regex.Pattern[str]"
    parameter_begin: "regex.Pattern[str]"
    parameter: "regex.Pattern[str]"
    next_line: "regex.Pattern[str]"
    body_end: "regex.Pattern[str]"
    bare_end: "regex.Pattern[str] | None"


@cache
def xml_patterns(syntax: ToolSyntax) -> XmlPatterns:
    """Return the regular expressions of a syntax in the style XML."""
    tags = syntax.tags
    assert tags is not None
    opens, closes = map(regex.escape, tags.name)
    name = rf"{opens}([\w.-]{{1,128}}){closes}"
    before, behind = map(regex.escape, tags.key)
    begin = rf"{before}([^<>\n]{{1,256}}){behind}"
    if tags.value[0]:
        begin += rf"\s{{0,{_MOST_SPACES}}}{regex.escape(tags.value[0])}"
    value_end, call_end = regex.escape(tags.value[1]), regex.escape(syntax.closes)
    last = rf"\s{{0,{_MOST_SPACES}}}"
    ends = "|".join(filter(None, (regex.escape(tags.end), value_end)))
    bare = None
    if not tags.end:
        bare = regex.compile(name + last + call_end)
        name += rf"(?={last}(?:{before}|{call_end}))"
    return XmlPatterns(
        regex.compile(name),
        regex.compile(begin),
        regex.compile(rf"(?s)\s*{begin}(.*?)(?:{value_end}(?=\s*(?:{before}|\Z))|(\Z))"),
        regex.compile(rf"\n[ \t]*(?={begin})"),
        regex.compile(rf"(?:{ends}){last}{call_end}"),
        bare,
    )


class XmlEnd:
    """Finder of the end of a tool call in XML: the closing mark after the end of the function.

    The closing mark right after the end of a parameter is an end as well: otherwise all text after
    such a malformed call would be held back.
    """

    def __init__(self, syntax: ToolSyntax) -> None:
        assert syntax.tags is not None
        patterns = xml_patterns(syntax)
        self._end, self._bare_end = patterns.body_end, patterns.bare_end
        longest = max(len(syntax.tags.end), len(syntax.tags.value[1]))
        self._longest = longest + _MOST_SPACES + len(syntax.closes)
        self._tail = ""  # last characters

    def find(self, text: str) -> int | None:
        """Return the number of new characters up to the end of the body; None if the body does not
        end in these characters.

        text: new characters, which follow those passed to this method before. The first ones hold
            the name of the function and the text that shows its end.
        """
        if self._bare_end is not None:
            if bare := self._bare_end.match(text):
                return int(bare.end())
            self._bare_end = None
        known, seen = len(self._tail), self._tail + text
        if found := self._end.search(seen):
            return int(found.end()) - known
        self._tail = seen[-self._longest :]
        return None


def xml_call(body: str, syntax: ToolSyntax, parameters: Mapping[str, Any]) -> FunctionCall:
    """Return the tool call that a body consists of, with arguments typed by the function's schema.

    A value ends at the end tag before the next parameter or the end of the function, so it may hold
    any other tags. An end tag that the model left out is implied by the end of the function, or by
    a line that begins another of the function's parameters.

    syntax: the model's syntax of tool calls.
    parameters: schema of the arguments object of each function.

    Raises ValueError if the body has any other content.
    """
    tags, patterns = syntax.tags, xml_patterns(syntax)
    assert tags is not None
    begin = patterns.function_begin.match(body)
    text = body.removesuffix(syntax.closes).rstrip()
    if begin is None or not text.endswith(tags.end):
        raise ValueError("want a function and its end")
    schema = parameters.get(begin[1])
    text, at = text[begin.end() :].removesuffix(tags.end), 0
    names, given = declared(schema), dict[str, Any]()
    for _ in range(MOST_VALUES):
        found = patterns.parameter.match(text, at)
        if found is None:
            break
        key, value, at = found[1], found[2], found.end()
        left = names - given.keys() - {key}
        lines = (line for line in patterns.next_line.finditer(value) if line[1] in left)
        if cut := next(lines, None):
            at, value = found.start(2) + cut.end(), value[: cut.start()]
        elif found[3] is not None and tags.value[1] in value:
            raise ValueError("want parameters and nothing behind them")
        given[key] = argument_value(unpadded(value, tags.pad), argument_types(schema, key))
    if text[at:].strip():
        raise ValueError(f"want at most {MOST_VALUES} parameters and nothing behind them")
    return begin[1], given


def unpadded(value: str, pad: str) -> str:
    """Return an argument's value without the padding that the syntax has on both of its sides."""
    return value.removeprefix(pad).removesuffix(pad)
