"""Calls of tools in what a model writes: the tool parsers."""

import json
from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple
from uuid import uuid4

import regex

from lorikeet.answer_stream.openai_format import ToolCallPart
from lorikeet.answer_stream.tool_call_bodies import JsonEnd, body_begin, body_end, calls_of
from lorikeet.answer_stream.tool_syntax import CallStyle, ToolSyntax
from lorikeet.protocol.messages import ToolUse

_ID_LENGTH = 9  # Mistral's templates want ids of exactly nine letters and digits
_Call = tuple[str, str]  # a function's name, the JSON of its arguments


class ParsedDelta(NamedTuple):
    """New text, then new parts of calls."""

    text: str
    calls: list[ToolCallPart]


class ToolCallParser:
    """Splits what a model writes for one choice into text and calls, in time linear in its length.

    What begins like a call is held back until it is one, or is not: then it is text, like a call
    of a function that the client did not offer. Whitespace before a call is dropped, and behind the
    last one. `done` is set once no further call is wanted; `parsed` is how many characters are
    split by now.
    """

    def __init__(self, syntax: ToolSyntax, use: ToolUse) -> None:
        self._syntax = syntax
        self._parallel = use.parallel
        self._names = {tool["function"]["name"] for tool in use.tools}
        # All that is held back: pieces that were looked at, and the rest.
        self._held: list[str] = []  # whitespace, what opens a call, whitespace
        self._body: list[str] = []  # the calls themselves
        self._behind: list[str] = []  # whitespace behind them
        self._rest = ""
        self._look: Callable[[], bool] = self._look_for_opening
        self._begin, self._end = body_begin(syntax), body_end(syntax)
        # in other styles what closes calls is the end of their body
        self._closes = syntax.closes if syntax.style is CallStyle.JSON else ""
        self._made: list[_Call] = []
        self._said: list[str] = []  # for the delta that is being made
        self._deltas: list[ToolCallPart] = []
        self._text: list[range] = []  # characters that are text, in order
        self._calls = 0
        self.parsed = 0
        self.done = False

    def push(self, text: str, *, last: bool = False) -> ParsedDelta:
        """Take new text, `last` if no more comes."""
        self._rest += text
        while not self.done and self._look():
            pass
        if last and not self.done:
            self._behind.append(self._take_rest(len(self._rest)))
            held = "".join((*self._held, *self._body, *self._behind))
            if not self._calls or held.strip():
                self._say_held()
        delta = ParsedDelta("".join(self._said), self._deltas)
        self._said, self._deltas = [], []
        return delta

    @property
    def called(self) -> bool:
        """Whether it has read calls, which are whole."""
        return self._calls > 0

    def is_text(self, at: int) -> bool:
        """Whether a character that was split is text, and of no call."""
        before = bisect_right(self._text, at, key=lambda part: part.start)
        return before > 0 and at in self._text[before - 1]

    # Each _look_… looks for one thing at the rest's beginning and takes what it has looked at, so
    # that nothing is looked at twice. It returns whether to look on: else more has to come.

    def _look_for_opening(self) -> bool:
        opens = self._syntax.opens
        if not opens:
            return self._look_for_separator()
        at = self._rest.find(opens)
        if at < 0:
            begun = next(n for n in reversed(range(len(opens))) if self._rest.endswith(opens[:n]))
            at = len(self._rest) - begun
        before = self._take_rest(at)
        if text := before.rstrip():
            self._say_held()
            self._say(text)
        self._held.append(before[len(text) :])
        if not self._rest.startswith(opens):
            return False
        self._held.append(self._take_rest(len(opens)))
        self._look = self._look_for_body
        return True

    def _look_for_separator(self) -> bool:
        if not self._skip_whitespace(self._held):
            return False
        if self._rest[0] == ";":
            self._held.append(self._take_rest(1))
        self._look = self._look_for_body
        return True

    def _look_for_body(self) -> bool:
        if not self._skip_whitespace(self._held):
            return False
        begins = self._begin.match(self._rest, partial=True)
        if begins is None:
            self._no_call()
        elif begins.partial:
            return False
        else:
            self._end = body_end(self._syntax)
            self._look = self._look_for_body_end
        return True

    def _look_for_body_end(self) -> bool:
        end = self._end.find(self._rest)
        self._body.append(self._take_rest(len(self._rest) if end is None else end))
        if end is None:
            return False
        self._made = self._calls_of("".join(self._body))
        if self._made:
            self._look = self._look_for_closing
        else:
            self._no_call()
        return True

    def _look_for_closing(self) -> bool:
        closes = self._closes
        if closes:
            self._skip_whitespace(self._behind)
            if len(self._rest) < len(closes) and closes.startswith(self._rest):
                return False
        if self._rest.startswith(closes):
            self._call(len(closes))
        else:
            self._no_call()
        return True

    def _look_at_text(self) -> bool:
        """Say all: where calls are plain JSON, something else has come first."""
        self._say(self._take_rest(len(self._rest)))
        return False

    def _call(self, closing: int) -> None:
        """Make calls of what is held back, and of what closes them."""
        held = (*self._held, *self._body, *self._behind, self._take_rest(closing))
        self.parsed += sum(map(len, held))
        for name, arguments in self._made if self._parallel else self._made[:1]:
            self._deltas += whole_call(self._calls, name, arguments)
            self._calls += 1
        self._held, self._body, self._behind = [], [], []
        self.done = not self._parallel
        self._look = self._look_for_opening

    def _no_call(self) -> None:
        """Make text of what is held back; whitespace behind a body may precede another call."""
        self._rest = "".join(self._behind) + self._rest
        self._behind = []
        self._say_held()
        self._look = self._look_for_opening if self._syntax.opens else self._look_at_text

    def _calls_of(self, body: str) -> list[_Call]:
        """Return the calls that a body holds; none if it holds anything else, or is none."""
        try:
            calls = calls_of(body, self._syntax)
            made = [(name, json.dumps(given, allow_nan=False)) for name, given in calls]
        except (ValueError, RecursionError):
            return []
        return made if all(name in self._names for name, _ in made) else []

    def _skip_whitespace(self, into: list[str]) -> bool:
        """Take whitespace off the rest; return whether anything is left."""
        into.append(self._take_rest(len(self._rest) - len(self._rest.lstrip())))
        return bool(self._rest)

    def _take_rest(self, length: int) -> str:
        taken, self._rest = self._rest[:length], self._rest[length:]
        return taken

    def _say_held(self) -> None:
        self._say("".join((*self._held, *self._body, *self._behind)))
        self._held, self._body, self._behind = [], [], []

    def _say(self, text: str) -> None:
        if text:
            joins = self._text and self._text[-1].stop == self.parsed
            begin = self._text.pop().start if joins else self.parsed
            self.parsed += len(text)
            self._text.append(range(begin, self.parsed))
            self._said.append(text)


class ForcedCallParser:
    """Parses an answer that a grammar holds to calls: arguments are passed on as they come.

    A call is one once its arguments begin: cut off before them it would look like a call without
    any.
    """

    done = False
    parsed = 0

    def __init__(self, syntax: ToolSyntax) -> None:
        self._head = regex.compile(rf'\{{"name": "([^"]*)", "{syntax.arguments}": (?=\{{)')
        self._held = ""
        self._arguments: JsonEnd | None = None  # of the call that is being read
        self._calls = 0

    def push(self, text: str, *, last: bool = False) -> ParsedDelta:  # noqa: ARG002
        """Take new text."""
        self._held += text
        self.parsed += len(text)
        deltas: list[ToolCallPart] = []
        while self._held:
            if self._arguments is not None:
                deltas.append(self._next_arguments(self._arguments))
            elif head := self._head.search(self._held):
                self._held = self._held[head.end() :]
                self._arguments = JsonEnd()
                deltas.append(ToolCallPart(self._calls, "", call_id(), head[1]))
                self._calls += 1
            else:
                begin = self._held.rfind("{")  # of a head, perhaps
                self._held = self._held[begin:] if begin >= 0 else ""
                break
        return ParsedDelta("", deltas)

    @property
    def called(self) -> bool:
        """Whether it has read calls, all of them whole."""
        return self._calls > 0 and self._arguments is None

    def is_text(self, at: int) -> bool:  # noqa: ARG002
        """Whether a character is text: none is."""
        return False

    def _next_arguments(self, arguments: JsonEnd) -> ToolCallPart:
        end = arguments.find(self._held)
        if end is None:
            end = len(self._held)
        else:
            self._arguments = None
        new, self._held = self._held[:end], self._held[end:]
        return ToolCallPart(self._calls - 1, new)


def whole_call(index: int, name: str, arguments: str) -> list[ToolCallPart]:
    """Return a whole call as deltas: the function's name, then its arguments."""
    return [ToolCallPart(index, "", call_id(), name), ToolCallPart(index, arguments)]


def call_id() -> str:
    """Return a new call's id."""
    return uuid4().hex[:_ID_LENGTH]
