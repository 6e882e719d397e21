"""Bodies of tool calls (their text between the marks): finding their end in streamed text, and
parsing.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import regex

from lorikeet.text.tools.python_calls import FunctionCall, GemmaEnd, PythonEnd, Reader
from lorikeet.text.tools.syntax import CallStyle, ToolSyntax
from lorikeet.text.tools.xml_calls import XmlEnd, xml_call, xml_patterns

NO_PARAMETERS: Mapping[str, Any] = MappingProxyType({})
_NAME = r"[\w.-]{1,128}"


class BodyEnd(Protocol):
    """Incremental finder of the end of a body of tool calls. Reads each character once.

    A body is the text of tool calls after their opening mark, or all of it without such a mark.
    """

    def find(self, text: str) -> int | None:
        """Return the number of new characters up to the end of the body; None if the body does not
        end in these characters.

        text: new characters, which follow those passed to this method before.
        """
        ...


class JsonEnd:
    """Finder of the end of a JSON object or array."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def find(self, text: str) -> int | None:
        """Return the number of new characters up to the end of the body; None if the body does not
        end in these characters.

        text: new characters, which follow those passed to this method before.
        """
        for at, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return None


class NamedEnd(JsonEnd):
    """Finder of the end of a function's name, a mark, and a JSON object.

    The first text that it gets has the whole mark.
    """

    def __init__(self, mark: str) -> None:
        super().__init__()
        self._mark: str | None = mark

    def find(self, text: str) -> int | None:
        """Return the number of new characters up to the end of the body; None if the body does not
        end in these characters.

        text: new characters, which follow those passed to this method before.
        """
        begin = 0
        if self._mark is not None:
            begin, self._mark = text.index(self._mark) + len(self._mark), None
        end = super().find(text[begin:])
        return None if end is None else begin + end


def body_begin(syntax: ToolSyntax) -> "regex.Pattern[str]":
    """Return the pattern that the beginning of a body of tool calls must match.

    A body is the text of tool calls after their opening mark, or all of it without such a mark.
    """
    match syntax.style:
        case CallStyle.JSON:
            return regex.compile(r"[{[]" if syntax.opens else r"\{")
        case CallStyle.NAMED:
            return regex.compile(rf"{_NAME}{regex.escape(syntax.arguments)}\s{{0,8}}\{{")
        case CallStyle.PYTHON:
            return regex.compile(_NAME + r"\(" if syntax.opens else rf"\[\s{{0,8}}{_NAME}\(")
        case CallStyle.GEMMA:
            return regex.compile("call:")
        case CallStyle.XML:
            return xml_patterns(syntax).function_begin


def body_end(syntax: ToolSyntax) -> BodyEnd:
    """Return a finder of the end of a body of tool calls: their text after the opening mark.

    In the JSON and NAMED styles a body ends before the closing mark. In other styles a body may
    hold several calls and includes the closing mark. A body ends early at text that cannot belong
    to a call.
    """
    match syntax.style:
        case CallStyle.JSON:
            return JsonEnd()
        case CallStyle.NAMED:
            return NamedEnd(syntax.arguments)
        case CallStyle.PYTHON:
            return PythonEnd(syntax.closes)
        case CallStyle.GEMMA:
            return GemmaEnd(syntax.closes, syntax.quote)
        case CallStyle.XML:
            return XmlEnd(syntax)


def calls_of(
    body: str, syntax: ToolSyntax, parameters: Mapping[str, Any] = NO_PARAMETERS
) -> list[FunctionCall]:
    """Return the tool calls that a body consists of. Raises ValueError if it has any other
    content.

    body: text of calls after the mark that opens them, up to the end that `body_end` finds.
    parameters: schema of the arguments object of each function, for values without a type of their
        own.
    """
    try:
        if syntax.style is CallStyle.JSON:
            return _json_calls(json.loads(body), syntax.arguments)
        if syntax.style is CallStyle.NAMED:
            name, _, arguments = body.partition(syntax.arguments)
            return _json_calls(
                {"name": name, syntax.arguments: json.loads(arguments)}, syntax.arguments
            )
        if syntax.style is CallStyle.XML:
            return [xml_call(body, syntax, parameters)]
        return Reader(body.removesuffix(syntax.closes), syntax.style, syntax.quote).calls()
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _json_calls(value: object, key: str) -> list[FunctionCall]:
    calls = list[FunctionCall]()
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, dict):
            raise ValueError("want an object as call")
        name, arguments = entry.get("name"), entry.get(key)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ValueError(f'want "name" and "{key}"')
        calls.append((name, arguments))
    return calls
