"""Parsers that split a model's output into text and tool calls while it is generated."""

import json
from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

import regex

from lorikeet.protocol.messages import ToolUse
from lorikeet.text.choice import ToolCallPart
from lorikeet.text.tools.call_bodies import JsonEnd, body_begin, body_end, calls_of
from lorikeet.text.tools.syntax import CallStyle, ToolSyntax

_Call = tuple[str, str]  # function name, JSON of its arguments


class ParsedDelta(NamedTuple):
    """Result of parsing a piece of the model's output: text, followed by parts of tool calls."""

    text: str
    calls: list[ToolCallPart]


class ToolCallParser:
    """Incremental parser of one choice's text and tool calls, in time linear in their length.

    Text that begins like a call is held back until it proves to be a call or not. Everything else
    is text, including a call of a function that the client did not offer. Whitespace before calls
    and after the last call is dropped.

    done: True once the choice has its only call, if the client allows one call at most.
    parallel: whether the client allows several calls.
    parsed: number of characters assigned to text or calls so far.
    use: tools that the client offers, and whether it allows several calls.
    """

    def __init__(self, syntax: ToolSyntax, use: ToolUse) -> None:
        self._syntax = syntax
        self.parallel = use.parallel
        self._parameters = use.parameters
        # Text that is held back: parts already parsed, then the unparsed rest.
        self._held: list[str] = []  # whitespace, opening mark, whitespace
        self._body: list[str] = []  # the calls themselves
        self._behind: list[str] = []  # whitespace after the calls
        self._rest = ""
        self._look: Callable[[], bool] = self._look_for_opening
        self._begin, self._end = body_begin(syntax), body_end(syntax)
        # in other styles the body includes the closing mark
        self._closes = syntax.closes if syntax.style is CallStyle.JSON else ""
        self._found: list[_Call] = []
        self._new_text: list[str] = []  # of the current delta
        self._new_parts: list[ToolCallPart] = []
        self._text: list[range] = []  # character ranges of text, in order
        self._calls = 0
        self.parsed = 0
        self.done = False

    def push(self, text: str, *, last: bool = False) -> ParsedDelta:
        """Parse new text; return the text and call parts that later text can no longer change.

        last: True if no more text follows.
        """
        self._rest += text
        while not self.done and self._look():
            pass
        if last and not self.done:
            self._behind.append(self._take_rest(len(self._rest)))
            held = "".join((*self._held, *self._body, *self._behind))
            if not self._calls or held.strip():
                self._emit_held()
        delta = ParsedDelta("".join(self._new_text), self._new_parts)
        self._new_text, self._new_parts = [], []
        return delta

    @property
    def called(self) -> bool:
        """True once a complete tool call was parsed."""
        return self._calls > 0

    def is_text(self, at: int) -> bool:
        """Return True if the character at an index is text and not part of a tool call.

        at: index of a character that is already parsed.
        """
        before = bisect_right(self._text, at, key=lambda part: part.start)
        return before > 0 and at in self._text[before - 1]

    # One method for each state: it consumes what it has examined of `_rest`, so no character is
    # examined twice. It returns False if the next step needs more text.

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
            self._emit_held()
            self._emit_text(text)
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
        self._found = self._calls_of("".join(self._body))
        if self._found:
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
            self._emit_calls(len(closes))
        else:
            self._no_call()
        return True

    def _look_at_text(self) -> bool:
        """Emit all remaining characters as text, since no tool call can follow any more."""
        self._emit_text(self._take_rest(len(self._rest)))
        return False

    def _emit_calls(self, closing: int) -> None:
        """Emit the held-back text as tool calls.

        closing: length of the closing mark, with which the unparsed text begins.
        """
        held = (*self._held, *self._body, *self._behind, self._take_rest(closing))
        self.parsed += sum(map(len, held))
        for name, arguments in self._found if self.parallel else self._found[:1]:
            self._new_parts += whole_call(self._calls, name, arguments)
            self._calls += 1
        self._held, self._body, self._behind = [], [], []
        self.done = not self.parallel
        self._look = self._look_for_opening

    def _no_call(self) -> None:
        """Emit the held-back text as text, since it has proved to be no tool call."""
        self._rest = "".join(self._behind) + self._rest
        self._behind = []
        self._emit_held()
        self._look = self._look_for_opening if self._syntax.opens else self._look_at_text

    def _calls_of(self, body: str) -> list[_Call]:
        """Parse the tool calls in a body.

        Returns an empty list if the body is invalid or calls a function that the client did not
        offer.
        """
        try:
            calls = calls_of(body, self._syntax, self._parameters)
            found = [(name, json.dumps(given, allow_nan=False)) for name, given in calls]
        except (ValueError, RecursionError):
            return []
        return found if all(name in self._parameters for name, _ in found) else []

    def _skip_whitespace(self, into: list[str]) -> bool:
        """Move the unparsed text's leading whitespace to `into`; return whether text is left."""
        into.append(self._take_rest(len(self._rest) - len(self._rest.lstrip())))
        return bool(self._rest)

    def _take_rest(self, length: int) -> str:
        taken, self._rest = self._rest[:length], self._rest[length:]
        return taken

    def _emit_held(self) -> None:
        self._emit_text("".join((*self._held, *self._body, *self._behind)))
        self._held, self._body, self._behind = [], [], []

    def _emit_text(self, text: str) -> None:
        if text:
            joins = self._text and self._text[-1].stop == self.parsed
            begin = self._text.pop().start if joins else self.parsed
            self.parsed += len(text)
            self._text.append(range(begin, self.parsed))
            self._new_text.append(text)


class ForcedCallParser:
    """Incremental parser of an answer that a grammar constrains to tool calls; it streams the
    arguments.

    A call is emitted only once its arguments begin, since an answer cut off earlier would look like
    a call without arguments.
    """

    done = False
    parsed = 0

    def __init__(self, syntax: ToolSyntax) -> None:
        self._head = regex.compile(
            rf"{regex.escape(syntax.opens)}([^\[]*){regex.escape(syntax.arguments)}(?=\{{)"
            if syntax.style is CallStyle.NAMED
            else rf'\{{"name": "([^"]*)", "{syntax.arguments}": (?=\{{)'
        )
        self._held = ""
        self._arguments: JsonEnd | None = None  # finder of the open call's end
        self._calls = 0

    def push(self, text: str, *, last: bool = False) -> ParsedDelta:  # noqa: ARG002
        """Parse new text; return the new parts of tool calls."""
        self._held += text
        self.parsed += len(text)
        deltas: list[ToolCallPart] = []
        while self._held:
            if self._arguments is not None:
                deltas.append(self._next_arguments(self._arguments))
            elif (head := self._head.search(self._held, partial=True)) is None:
                self._held = ""
            elif head.partial:
                self._held = self._held[head.start() :]
                break
            else:
                self._held = self._held[head.end() :]
                self._arguments = JsonEnd()
                deltas.append(ToolCallPart(self._calls, "", name=head[1]))
                self._calls += 1
        return ParsedDelta("", deltas)

    @property
    def called(self) -> bool:
        """True if tool calls were parsed and all of them are complete."""
        return self._calls > 0 and self._arguments is None

    def is_text(self, at: int) -> bool:  # noqa: ARG002
        """Return False: an answer that a grammar constrains to tool calls has no text."""
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
    """Return a complete tool call in two parts: the function's name, then its arguments."""
    return [ToolCallPart(index, "", name=name), ToolCallPart(index, arguments)]
