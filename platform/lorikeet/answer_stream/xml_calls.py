"""Tool calls in XML: finding their end in streamed text, and parsing.

<function=weather>
<parameter=place>
Paris
</parameter>
</function>

Values are bare text without escapes.
"""

from collections.abc import Mapping
from typing import Any

import regex

from lorikeet.answer_stream.argument_values import argument_types, argument_value, declared
from lorikeet.answer_stream.python_calls import MOST_VALUES, FunctionCall
from lorikeet.answer_stream.tool_syntax import ToolSyntax

FUNCTION_BEGIN = regex.compile(r"<function=([\w.-]{1,128})>")
PARAMETER_BEGIN = regex.compile(r"<parameter=([^<>\n]{1,256})>")
FUNCTION_END, PARAMETER_END = "</function>", "</parameter>"
_PARAMETER = regex.compile(
    rf"(?s)\s*{PARAMETER_BEGIN.pattern}(?P<value>.*?)"
    rf"(?:{PARAMETER_END}(?=\s*(?:<parameter=|\Z))|(?P<open>\Z))"
)
_NEXT_LINE = regex.compile(rf"\n[ \t]*(?={PARAMETER_BEGIN.pattern})")
_MOST_SPACES = 16


class XmlEnd:
    """Finder of the end of a tool call in XML: the closing mark after the end of the function.

    The closing mark right after the end of a parameter is an end as well: otherwise all text behind
    such a malformed call would be held back.
    """

    def __init__(self, closes: str) -> None:
        tags = f"{FUNCTION_END}|{PARAMETER_END}"
        self._end = regex.compile(rf"(?:{tags})\s{{0,{_MOST_SPACES}}}{regex.escape(closes)}")
        self._longest = len(PARAMETER_END) + _MOST_SPACES + len(closes)
        self._tail = ""  # last characters

    def find(self, text: str) -> int | None:
        """Return the number of new characters up to the end of the body; None if the body does not
        end in these characters.

        text: new characters, which follow those passed to this method before.
        """
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
    text = body.removesuffix(syntax.closes).rstrip()
    begin = FUNCTION_BEGIN.match(text)
    if begin is None or not text.endswith(FUNCTION_END):
        raise ValueError("want a function and its end")
    schema = parameters.get(begin[1])
    text, at = text[begin.end() :].removesuffix(FUNCTION_END), 0
    names, given = declared(schema), dict[str, Any]()
    for _ in range(MOST_VALUES):
        found = _PARAMETER.match(text, at)
        if found is None:
            break
        key, value, at = found[1], found["value"], found.end()
        left = names - given.keys() - {key}
        lines = (line for line in _NEXT_LINE.finditer(value) if line[1] in left)
        if cut := next(lines, None):
            at, value = found.start("value") + cut.end(), value[: cut.start()]
        elif found["open"] is not None and PARAMETER_END in value:
            raise ValueError("want parameters and nothing behind them")
        given[key] = argument_value(unpadded(value, syntax.pad), argument_types(schema, key))
    if text[at:].strip():
        raise ValueError(f"want at most {MOST_VALUES} parameters and nothing behind them")
    return begin[1], given


def unpadded(value: str, pad: str) -> str:
    """Return an argument's value without the padding that the syntax has on both of its sides."""
    return value.removeprefix(pad).removesuffix(pad)
