"""Parser of forced tool calls in Gemma's syntax, which streams the arguments as JSON."""

import json

import regex

from lorikeet.text.choice import ToolCallPart
from lorikeet.text.tools.calls import ParsedDelta
from lorikeet.text.tools.syntax import ToolSyntax

_CLOSES = {"{": "}", "[": "]"}
_WRITTEN = {",": ", ", ":": ": "}


class ForcedGemmaParser:
    """Incremental parser of an answer that a grammar constrains to Gemma's tool calls.

    A call is emitted only once its arguments begin, since an answer cut off earlier would look like
    a call without arguments.
    """

    done = False
    parsed = 0

    def __init__(self, syntax: ToolSyntax) -> None:
        self._head = regex.compile(rf"{regex.escape(syntax.opens)}call:([^{{]*)(?=\{{)")
        self._quote = regex.compile(regex.escape(syntax.quote))
        self._word = regex.compile(r"[^][{},:<\"]+")
        self._held = ""
        self._open: list[str] = []  # open brackets of the arguments
        self._in_string = False
        self._at_key = False  # the next word is a key
        self._calls = 0

    def push(self, text: str, *, last: bool = False) -> ParsedDelta:
        """Parse new text; return the new parts of tool calls.

        last: True if no more text follows; an unfinished number is then returned as it is.
        """
        self._held += text
        self.parsed += len(text)
        parts = list[ToolCallPart]()
        while self._held:
            if self._open:
                written, more = self._arguments(last=last)
                if written:
                    parts.append(ToolCallPart(self._calls - 1, written))
                if not more:
                    break
            elif (head := self._head.search(self._held, partial=True)) is None:
                self._held = ""
            elif head.partial:
                self._held = self._held[head.start() :]
                break
            else:
                self._held = self._held[head.end() + 1 :]
                self._open, self._at_key = ["{"], True
                parts.append(ToolCallPart(self._calls, "", name=head[1]))
                parts.append(ToolCallPart(self._calls, "{"))
                self._calls += 1
        return ParsedDelta("", parts)

    @property
    def called(self) -> bool:
        """True if tool calls were parsed and all of them are complete."""
        return self._calls > 0 and not self._open

    def is_text(self, at: int) -> bool:  # noqa: ARG002
        """Return False: an answer that a grammar constrains to tool calls has no text."""
        return False

    def _arguments(self, *, last: bool) -> tuple[str, bool]:
        """Take held text up to the end of the arguments; return its JSON, and False if the next
        step needs more text.
        """
        written = list[str]()
        while self._open and self._held:
            step = self._string() if self._in_string else self._outside(last=last)
            if step is None:
                return "".join(written), False
            written.append(step)
        return "".join(written), True

    def _string(self) -> str | None:
        """Take text of the open string; return it as JSON, or None if more text is needed."""
        quote = self._quote.search(self._held, partial=True)
        at = len(self._held) if quote is None else quote.start()
        text, self._held = self._held[:at], self._held[at:]
        if quote is not None and not quote.partial:
            self._held, self._in_string = self._held[quote.end() - at :], False
            return f'{json.dumps(text)[1:-1]}"'
        return json.dumps(text)[1:-1] if text else None

    def _outside(self, *, last: bool) -> str | None:
        """Take a sign, a word or a mark outside strings; return it as JSON, or None if more text is
        needed.
        """
        if word := self._word.match(self._held):
            if word.end() == len(self._held) and not (last and not self._at_key):
                return None
            self._held = self._held[word.end() :]
            return json.dumps(word[0]) if self._at_key else word[0]
        if quote := self._quote.match(self._held, partial=True):
            if quote.partial:
                return None
            self._held, self._in_string = self._held[quote.end() :], True
            return '"'
        sign, self._held = self._held[0], self._held[1:]
        if sign in _CLOSES:
            self._open.append(sign)
        elif sign in _CLOSES.values():
            self._open.pop()
        in_object = bool(self._open) and self._open[-1] == "{"
        self._at_key = in_object and sign in "{,"
        return _WRITTEN.get(sign, sign)
