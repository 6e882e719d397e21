"""Where calls of tools in Python end, or turn out to be none."""

import regex

_OUTSIDE, _CALLS = "", "calls"  # of all brackets, and within the one around a list of calls
_ITEMS = {
    _OUTSIDE: regex.compile("b?|wb?"),
    _CALLS: regex.compile("(wb?)?"),
    "(": regex.compile("([ws](=[wsb]?)?)?"),
    "{": regex.compile("([ws](:[wsb]?)?)?"),
    "[": regex.compile("[wsb]?"),
}
"""What an item within each bracket may be so far: of words, strings, brackets, = and :."""
_WHOLE = {_OUTSIDE: 2, _CALLS: 2, "(": 3, "{": 3, "[": 1}
_CLOSES = {_CALLS: "]", "(": ")", "{": "}", "[": "]"}


class PythonEnd:
    """Finds where calls in Python end: with what closes them, or else with their list's bracket.

    What can be no call where it stands, such as an apostrophe in no string, ends them too: else it
    would hold back all that comes behind it. Values are not judged.
    """

    def __init__(self, closes: str) -> None:
        self._closes = closes
        self._tail = ""  # the last characters since a string
        self._in_word = self._escaped = False
        self._quote = ""  # the one that closes the string, if one is open
        self._open, self._items = [_OUTSIDE], [""]  # the last item of each bracket that is open

    def find(self, text: str) -> int | None:
        """Return how many characters of new text belong to them; None if all do and more come."""
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
            is_name = self._open[-1] == "(" and not self._items[-1]  # as JSON writes strings
            return (is_name and char == "'") or not self._takes("s")
        if char in "([{":
            return not self._takes_bracket(char)
        if char in ")]}":
            return not self._ends_bracket(char) or (self._open == [_OUTSIDE] and not self._closes)
        return not (char.isspace() or (self._ends_item() if char == "," else self._takes(char)))

    def _takes(self, part: str) -> bool:
        """Add a part to the last item of the innermost bracket; return whether it may be there."""
        before = self._items[-1]
        if self._open[-1] == _OUTSIDE and len(before) == _WHOLE[_OUTSIDE]:
            before = ""  # nothing stands between calls
        self._items[-1] = before + part
        return _ITEMS[self._open[-1]].fullmatch(self._items[-1]) is not None

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
        """Begin the next item; return whether the last one was whole."""
        item, self._items[-1] = self._items[-1], ""
        return self._open[-1] != _OUTSIDE and len(item) == _WHOLE[self._open[-1]]
