"""Parser of forced tool calls in XML, which streams the arguments as JSON."""

import json
from collections.abc import Callable

import regex

from lorikeet.protocol.messages import ToolUse
from lorikeet.text.choice import ToolCallPart
from lorikeet.text.tools.argument_values import STRING_ALONE, argument_types, argument_value
from lorikeet.text.tools.calls import ParsedDelta
from lorikeet.text.tools.syntax import ToolSyntax
from lorikeet.text.tools.xml_calls import xml_patterns


class ForcedXmlParser:
    """Incremental parser of an answer that a grammar constrains to tool calls in XML.

    Strings are streamed. Other values are sent whole, since their type may depend on their end.

    use: tools that the client offers, whose schemas tell the values' types.
    """

    done = False
    parsed = 0

    def __init__(self, syntax: ToolSyntax, use: ToolUse) -> None:
        tags, patterns = syntax.tags, xml_patterns(syntax)
        assert tags is not None
        self._pad, self._end = tags.pad, tags.end or syntax.closes
        opens = regex.escape(syntax.opens)
        self._call_begin = regex.compile(rf"{opens}\s*{patterns.function_begin.pattern}")
        self._parameter_begin = patterns.parameter_begin
        self._value_end = regex.compile(f"(?:{tags.pad})?{regex.escape(tags.value[1])}")
        self._parameters = use.parameters
        self._held = ""
        self._look: Callable[[], bool] = self._look_for_call
        self._parts: list[ToolCallPart] = []  # of the current delta
        self._name = ""  # of the open call; "" between calls
        self._arguments = 0  # of the open call
        self._types = STRING_ALONE  # of the open value
        self._value: list[str] = []  # unsent text of the open value
        self._begun = False  # the open value has text
        self._calls = 0

    def push(self, text: str, *, last: bool = False) -> ParsedDelta:
        """Parse new text; return the new parts of tool calls.

        last: True if no more text follows; the text of an unfinished value is then returned as it
            is.
        """
        self._held += text
        self.parsed += len(text)
        while self._held and self._look():
            pass
        if last and self._value:
            self._emit("".join(self._value))
        parts, self._parts = self._parts, []
        return ParsedDelta("", parts)

    @property
    def called(self) -> bool:
        """True if tool calls were parsed and all of them are complete."""
        return self._calls > 0 and not self._name

    def is_text(self, at: int) -> bool:  # noqa: ARG002
        """Return False: an answer that a grammar constrains to tool calls has no text."""
        return False

    # One method for each state; it returns False if the next step needs more text.

    def _look_for_call(self) -> bool:
        begin = self._call_begin.search(self._held)
        if begin is None:
            return False
        self._held, self._name, self._arguments = self._held[begin.end() :], begin[1], 0
        self._look = self._look_for_parameter
        return True

    def _look_for_parameter(self) -> bool:
        self._held = self._held.lstrip()
        if self._held.startswith(self._end):
            self._held = self._held[len(self._end) :]
            self._emit("}" if self._arguments else "{}")
            self._name, self._look = "", self._look_for_call
            self._calls += 1
            return True
        begin = self._parameter_begin.match(self._held)
        if begin is None:
            return False
        self._held, key = self._held[begin.end() :], begin[1]
        self._types = argument_types(self._parameters.get(self._name), key)
        quote = '"' if self._types == STRING_ALONE else ""
        self._emit(f"{', ' if self._arguments else '{'}{json.dumps(key)}: {quote}")
        self._arguments += 1
        self._begun, self._look = False, self._look_for_value_end
        return True

    def _look_for_value_end(self) -> bool:
        end = self._value_end.search(self._held, partial=True)
        at = len(self._held) if end is None else end.start()
        text, self._held = self._held[:at], self._held[at:]
        if text and not self._begun:
            text, self._begun = text.removeprefix(self._pad), True
        if self._types == STRING_ALONE:
            self._emit(json.dumps(text)[1:-1])
        else:
            self._value.append(text)
        if end is None or end.partial:
            return False
        self._held = self._held[end.end() - at :]
        if self._types == STRING_ALONE:
            self._emit('"')
        else:
            self._emit(json.dumps(argument_value("".join(self._value), self._types)))
            self._value.clear()
        self._look = self._look_for_parameter
        return True

    def _emit(self, arguments: str) -> None:
        if not self._arguments:
            self._parts.append(ToolCallPart(self._calls, "", name=self._name))
        if not arguments:
            return
        if self._parts and self._parts[-1].index == self._calls and not self._parts[-1].name:
            arguments = self._parts.pop().arguments + arguments
        self._parts.append(ToolCallPart(self._calls, arguments))
