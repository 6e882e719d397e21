"""Tool calls in Python and in Gemma's syntax: finding their end in streams, and parsing."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

import regex

from lorikeet.text.tools.syntax import CallStyle

Item = TypeVar("Item")
FunctionCall = tuple[str, dict[str, Any]]
"""A function's name and its arguments."""
MOST_VALUES = 4096
"""Limit on the number of values, keys and names in one body of tool calls.

A body is parsed in one callback of the event loop that all answers share: 15 ms at this limit.
"""

_JSON_CONSTANTS = {"true": True, "false": False, "null": None}
_CONSTANTS = _JSON_CONSTANTS | {"True": True, "False": False, "None": None}
_NUMBER = regex.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
_PYTHON_TOKEN = regex.compile(
    r"""(?s)\s*+(?:(?P<string>"(?:[^"\\]++|\\.)*+"|'(?:[^'\\]++|\\.)*+')"""
    r"""|(?P<sign>[][(){},=:])|(?P<word>[^][\s(){},=:"']++))"""
)
_BACKSLASH = regex.compile(r"(?s)\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"} | {c: c for c in "\\\"'/"}
_OUTSIDE, _CALLS = "", "calls"  # outside all brackets; in the brackets of a list of calls
_ITEM_SO_FAR = {
    _OUTSIDE: regex.compile("b?|wb?"),
    _CALLS: regex.compile("(wb?)?"),
    "(": regex.compile("([ws](=[wsb]?)?)?"),
    "{": regex.compile("([ws](:[wsb]?)?)?"),
    "[": regex.compile("[wsb]?"),
}
"""Regular expression of the valid beginnings of an item, for each kind of bracket around the item.
An item is an argument, value or call that commas or brackets delimit. In the expressions, w stands
for a word, s for a string, b for a bracket pair.
"""
_WHOLE_ITEM = {_OUTSIDE: 2, _CALLS: 2, "(": 3, "{": 3, "[": 1}
_CLOSES = {_CALLS: "]", "(": ")", "{": "}", "[": "]"}


class PythonEnd:
    """Finder of the end of tool calls in Python syntax.

    Calls end with the closing mark or, in a syntax without one, with the closing bracket of their
    list. Text that cannot belong to a call, such as an apostrophe outside a string, is an end as
    well.
    Values are not checked.

    closes: the closing mark, or "".
    """

    def __init__(self, closes: str) -> None:
        self._closes = closes
        self._tail = ""  # last characters outside strings
        self._in_word = self._escaped = False
        self._quote = ""  # quote that closes the open string; "" outside strings
        self._open, self._items = [_OUTSIDE], [""]  # current item of each open bracket

    def find(self, text: str) -> int | None:
        """Return the number of new characters up to the end of the body; None if the body does not
        end in these characters.

        text: new characters, which follow those passed to this method before.
        """
        for at, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quote:
                self._escaped = char == "\\"
                if char == self._quote:
                    self._quote = ""
            elif self._ends_at(char):
                return at + 1
        return None

    def _ends_at(self, char: str) -> bool:
        if self._closes:
            self._tail = (self._tail + char)[-len(self._closes) :]
            if self._tail == self._closes:
                return True
        went_on, self._in_word = self._in_word, not char.isspace() and char not in "[](){},=:\"'"
        if self._in_word:
            return not (went_on or self._takes("w"))
        if char in "\"'":
            self._quote, self._tail = char, ""
            is_name = self._open[-1] == "(" and not self._items[-1]  # which takes double quotes
            return (is_name and char == "'") or not self._takes("s")
        if char in "([{":
            return not self._takes_bracket(char)
        if char in ")]}":
            return not self._ends_bracket(char) or (self._open == [_OUTSIDE] and not self._closes)
        return not (char.isspace() or (self._ends_item() if char == "," else self._takes(char)))

    def _takes(self, part: str) -> bool:
        """Add a part to the unfinished item of the innermost open bracket; return whether the item
        is still valid.

        part: w for a word, s for a string, b for a bracket pair, else the separator itself.
        """
        before = self._items[-1]
        if self._open[-1] == _OUTSIDE and len(before) == _WHOLE_ITEM[_OUTSIDE]:
            before = ""  # no separator between calls
        self._items[-1] = before + part
        return _ITEM_SO_FAR[self._open[-1]].fullmatch(self._items[-1]) is not None

    def _takes_bracket(self, char: str) -> bool:
        around, item = self._open[-1], self._items[-1]
        if around in (_OUTSIDE, _CALLS) and char != ("(" if item == "w" else "["):
            return False
        if around not in (_OUTSIDE, _CALLS) and char == "(":
            return False
        may = self._takes("b")
        self._open.append(_CALLS if around == _OUTSIDE and char == "[" else char)
        self._items.append("")
        return may

    def _ends_bracket(self, char: str) -> bool:
        if _CLOSES.get(self._open[-1]) != char or not (self._items[-1] == "" or self._ends_item()):
            return False
        self._open.pop()
        self._items.pop()
        return True

    def _ends_item(self) -> bool:
        """End the unfinished item of the innermost open bracket; return whether it was complete."""
        item, self._items[-1] = self._items[-1], ""
        return self._open[-1] != _OUTSIDE and len(item) == _WHOLE_ITEM[self._open[-1]]


class GemmaEnd:
    """Finder of the closing mark of Gemma's tool calls, outside their strings.

    closes: the closing mark.
    quote: mark on both sides of each string.
    """

    def __init__(self, closes: str, quote: str) -> None:
        self._closes, self._quote = closes, quote
        self._longest = max(len(closes), len(quote))
        self._tail = ""  # last characters since the last string mark
        self._in_string = False

    def find(self, text: str) -> int | None:
        """Return the number of new characters up to the end of the body; None if the body does not
        end in these characters.

        text: new characters, which follow those passed to this method before.
        """
        for at, char in enumerate(text):
            self._tail = (self._tail + char)[-self._longest :]
            if self._tail.endswith(self._quote):
                self._in_string, self._tail = not self._in_string, ""
            elif not self._in_string and self._tail.endswith(self._closes):
                return at + 1
        return None


class Reader:
    """Recursive-descent parser of calls in Python or Gemma's syntax.

    Values are literals: strings, numbers, constants of Python and JSON, lists, and dictionaries,
    whose keys may be bare words.

    quote: mark on both sides of each string in the style GEMMA.
    """

    def __init__(self, text: str, style: CallStyle, quote: str = "") -> None:
        self._text, self._style = text.strip(), style
        self._next = _gemma_token(quote) if style is CallStyle.GEMMA else _PYTHON_TOKEN
        self._at = self._taken = 0

    def calls(self) -> list[FunctionCall]:
        """Parse the whole text as one or more calls. Raises ValueError."""
        if self._style is CallStyle.GEMMA:
            if self._word() != "call":
                raise ValueError("want call:")
            self._want(":")
            calls = [(self._word(), self._pairs("{", ":", "}"))]
        elif self._takes("["):
            calls = self._items("]", self._python_call)
        else:
            calls = [self._python_call()]
            while self._at < len(self._text):
                calls.append(self._python_call())
        if self._at < len(self._text) or not calls:
            raise ValueError("want calls and nothing behind them")
        return calls

    def value(self) -> Any:
        """Parse the whole text as one value. Raises ValueError."""
        value = self._value()
        if self._at < len(self._text):
            raise ValueError("want a value and nothing behind it")
        return value

    def _python_call(self) -> FunctionCall:
        return self._word(), self._pairs("(", "=", ")")

    def _pairs(self, opens: str, between: str, closes: str) -> dict[str, Any]:
        self._want(opens)
        return dict(self._items(closes, lambda: self._pair(between)))

    def _pair(self, between: str) -> tuple[str, Any]:
        token = self._take()
        string = self._string(token)
        key = token["word"] if string is None else string
        if key is None:
            raise ValueError("want a key")
        self._want(between)
        return key, self._value()

    def _value(self) -> Any:
        token = self._take()
        if (string := self._string(token)) is not None:
            return string
        if (word := token["word"]) is not None:
            return _constant(word)
        if token["sign"] == "[":
            return self._items("]", self._value)
        if token["sign"] == "{":
            return dict(self._items("}", lambda: self._pair(":")))
        raise ValueError("want a value")

    def _items(self, closes: str, read: Callable[[], Item]) -> list[Item]:
        items = list[Item]()
        while not self._takes(closes):
            items.append(read())
            if not self._takes(","):
                self._want(closes)
                break
        return items

    def _string(self, token: Mapping[str, str | None]) -> str | None:
        text = token["string"]
        if text is None or self._style is CallStyle.GEMMA:
            return text
        return _unescaped(text[1:-1])

    def _word(self) -> str:
        if (word := self._take()["word"]) is None:
            raise ValueError("want a name")
        return word

    def _want(self, sign: str) -> None:
        if not self._takes(sign):
            raise ValueError(f"want {sign}")

    def _takes(self, sign: str) -> bool:
        """Consume the given sign if it is next in the text; return whether it was."""
        found = self._next.match(self._text, self._at)
        if found is None or found["sign"] != sign:
            return False
        self._at = found.end()
        return True

    def _take(self) -> dict[str, str | None]:
        self._taken += 1
        if self._taken > MOST_VALUES:
            raise ValueError(f"want at most {MOST_VALUES} values")
        found = self._next.match(self._text, self._at)
        if found is None:
            raise ValueError("want a value, a name or a sign")
        self._at = found.end()
        groups: dict[str, str | None] = found.groupdict()
        return groups


@cache
def _gemma_token(quote: str) -> "regex.Pattern[str]":
    mark = regex.escape(quote)
    return regex.compile(
        rf"(?s)\s*+(?:{mark}(?P<string>.*?){mark}|(?P<sign>[][{{}},:])"
        r"|(?P<word>[^][\s{},:<]++(?: ++[^][\s{},:<]++)*+))"  # templates quote no keys
    )


def python_value(text: str) -> Any:
    """Return the value of one literal of Python or JSON. Raises ValueError for any other text."""
    return Reader(text, CallStyle.PYTHON).value()


def _constant(word: str) -> Any:
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if _NUMBER.fullmatch(word):
        return json.loads(word)
    raise ValueError("want a literal")


def _unescaped(text: str) -> str:
    """Return a string literal's value; escapes are Python's and JSON's."""
    if "\\" not in text:
        return text
    said: str = _BACKSLASH.sub(lambda found: _escape(found[1]), text)
    # JSON writes code points beyond 16 bits as two escapes
    return said.encode("utf-16", "surrogatepass").decode("utf-16")


def _escape(code: str) -> str:
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return _ESCAPED.get(code, "\\" + code)
