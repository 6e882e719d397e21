"""Calls of tools in what a model writes: the tool parsers.

Models write calls as their chat templates show them. Three syntaxes cover the families that this
engine runs; which one a model has is read off its template.
"""

import json
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

import regex

from lorikeet.answer_stream.openai_format import CallDelta
from lorikeet.protocol.messages import ToolUse

_ID_LENGTH = 9  # Mistral's templates want ids of just so many letters and digits
_ENDS = frozenset("}]>")  # nothing else ends a call
_JSON = json.JSONDecoder()
_Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """How a family of models writes calls.

    before, between, after: what it writes around the JSON of one call or several. arguments: the
    key of a call's arguments; its name is at "name". opens, closes: what may be found around such
    JSON; where nothing comes before it, an answer calls from its first character or not at all.
    tokens: are text even where they are special ones.
    """

    before: str
    between: str
    after: str
    arguments: str
    opens: "regex.Pattern[str]"
    closes: "regex.Pattern[str]"
    tokens: tuple[str, ...] = ()


HERMES = ToolSyntax(
    before="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    after="\n</tool_call>",
    arguments="arguments",
    opens=regex.compile(r"\s*<tool_call>\s*"),
    closes=regex.compile(r"\s*</tool_call>"),
    tokens=("<tool_call>", "</tool_call>"),
)
"""Hermes, Qwen 2.5, Qwen 3."""
MISTRAL = ToolSyntax(
    before="[TOOL_CALLS] [",
    between=", ",
    after="]",
    arguments="arguments",
    opens=regex.compile(r"\s*\[TOOL_CALLS\]\s*"),
    closes=regex.compile(""),
    tokens=("[TOOL_CALLS]",),
)
"""Mistral: one list of all calls."""
LLAMA = ToolSyntax(
    before="",
    between="; ",
    after="",
    arguments="parameters",
    opens=regex.compile(r"\s*;?\s*(?=\{)"),
    closes=regex.compile(""),
)
"""Llama 3.1 and later; <|python_tag|>, which may come first, is a special token and no text."""


def syntax_of(template: str) -> ToolSyntax | None:
    """Return the syntax that a chat template shows; None if it is none of these."""
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template:
        return MISTRAL
    if '"parameters": ' in template:
        return LLAMA
    return None


class ToolDelta(NamedTuple):
    """New text, then new parts of calls."""

    text: str
    calls: list[CallDelta]


class ToolCallParser:
    """Splits what a model writes for one choice into text and calls.

    What begins like a call is held back until it is one, or is not: then it is text, like a call
    of a function that the client did not offer. Whitespace before a call is dropped. `done` is set
    once no further call is wanted; `parsed` is how many characters are split by now.
    """

    def __init__(self, syntax: ToolSyntax, use: ToolUse) -> None:
        self._syntax = syntax
        self._parallel = use.parallel
        self._names = {tool["function"]["name"] for tool in use.tools}
        self._held = ""
        self._text: list[range] = []  # characters that are text, in order
        self._calling = False
        self._calls = 0
        self.parsed = 0
        self.done = False

    def push(self, text: str, *, last: bool = False) -> ToolDelta:
        """Take new text, `last` if no more comes."""
        self._held += text
        said = ""
        deltas: list[CallDelta] = []
        if self._calling and not last and _ENDS.isdisjoint(text):
            return ToolDelta("", [])
        while self._held and not self.done:
            opening = self._opening(last)
            said += self._take_text(len(self._held) if opening is None else opening.start())
            if opening is None or opening.partial:
                break
            parsed = self._parse(len(opening[0]), last)
            self._calling = parsed is None
            if parsed is None:
                break
            calls, end = parsed
            if calls:
                self._drop(end)
                for name, arguments in calls if self._parallel else calls[:1]:
                    deltas += whole_call(self._calls, name, json.dumps(arguments))
                    self._calls += 1
                self.done = not self._parallel
            else:
                said += self._take_text(end)
        return ToolDelta(said, deltas)

    def is_text(self, at: int) -> bool:
        """Whether a character that was split is text, and of no call."""
        return any(at in part for part in reversed(self._text))

    def _opening(self, last: bool) -> "regex.Match[str] | None":
        """Where the held text may become a call; None: nowhere."""
        if self._syntax.before:
            return self._syntax.opens.search(self._held, partial=not last)
        return None if self._text else self._syntax.opens.match(self._held, partial=not last)

    def _parse(self, start: int, last: bool) -> tuple[list[_Call], int] | None:
        """Names and arguments of the calls that begin the held text, and where they end.

        No calls: what is up to there is text. None: more has to come. start: of the JSON.
        """
        try:
            value, end = _JSON.raw_decode(self._held, start)
        except (ValueError, RecursionError):
            return ([], len(self._held)) if last else None
        closing = self._syntax.closes.match(self._held, end, partial=not last)
        if closing is not None and closing.partial:
            return None
        calls = [self._call(entry) for entry in (value if isinstance(value, list) else [value])]
        made = [call for call in calls if call is not None]
        if closing is None or len(made) < len(calls):
            return [], end
        return made, closing.end()

    def _call(self, entry: object) -> _Call | None:
        if not isinstance(entry, dict):
            return None
        name, arguments = entry.get("name"), entry.get(self._syntax.arguments)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        return (name, arguments) if name in self._names else None

    def _take_text(self, length: int) -> str:
        taken = self._held[:length]
        if taken:
            joins = self._text and self._text[-1].stop == self.parsed
            begin = self._text.pop().start if joins else self.parsed
            self._text.append(range(begin, self.parsed + length))
        self._drop(length)
        return taken

    def _drop(self, length: int) -> None:
        self._held = self._held[length:]
        self.parsed += length


class ForcedCallParser:
    """Parses an answer that a grammar holds to calls: arguments are passed on as they come."""

    done = False
    parsed = 0

    def __init__(self, syntax: ToolSyntax) -> None:
        self._head = regex.compile(rf'\{{"name": "([^"]*)", "{syntax.arguments}": ')
        self._held = ""
        self._arguments: str | None = None  # of the call that is being read, as far as they came
        self._calls = 0

    def push(self, text: str, *, last: bool = False) -> ToolDelta:  # noqa: ARG002
        """Take new text."""
        self._held += text
        self.parsed += len(text)
        deltas: list[CallDelta] = []
        while self._held:
            if self._arguments is not None:
                deltas.append(self._next_arguments(self._arguments))
            elif head := self._head.search(self._held):
                self._held = self._held[head.end() :]
                self._arguments = ""
                deltas.append(CallDelta(self._calls, "", call_id(), head[1]))
                self._calls += 1
            else:
                break
        return ToolDelta("", deltas)

    def is_text(self, at: int) -> bool:  # noqa: ARG002
        """Whether a character is text: none is."""
        return False

    def _next_arguments(self, before: str) -> CallDelta:
        so_far = before + self._held
        end = _end_of_json(so_far) if "}" in self._held else None
        if end is None:
            new, self._held, self._arguments = self._held, "", so_far
        else:
            new, self._held, self._arguments = so_far[len(before) : end], so_far[end:], None
        return CallDelta(self._calls - 1, new)


def _end_of_json(text: str) -> int | None:
    """Return where the JSON ends with which a text begins; None if it has not ended."""
    try:
        return _JSON.raw_decode(text)[1]
    except (ValueError, RecursionError):
        return None


def whole_call(index: int, name: str, arguments: str) -> list[CallDelta]:
    """Return a whole call as deltas: the function's name, then its arguments."""
    return [CallDelta(index, "", call_id(), name), CallDelta(index, arguments)]


def call_id() -> str:
    """Return a new call's id."""
    return uuid4().hex[:_ID_LENGTH]
