"""Grammars of answers in Harmony, gpt-oss' format: formats and tool calls after free thinking."""

import json
from collections.abc import Mapping
from typing import Any

from lorikeet.protocol.messages import Call, FormatKind, ToolUse
from lorikeet.text.detokenizer import Vocabulary
from lorikeet.text.grammars.format_grammar import format_rule
from lorikeet.text.grammars.tool_grammar import ANY_PARAMETERS, parameters_schema
from lorikeet.text.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START, Place

_NO_SPACING: Mapping[str, Any] = {}  # the model writes JSON with spaces and without


def harmony_grammar(call: Call, vocabulary: Vocabulary, place: Place) -> str | None:
    """Return the grammar of a call's answer in Harmony, gpt-oss' format of messages; None if the
    answer is unconstrained.

    Before an answer in a format, and before a call that the request demands, comes thinking alone.
    With strict tools, text may come before a call as well. A call ends the answer: the mark after
    it is one of the model's ends of sequence, which grammars leave out.

    vocabulary: tokens of the model's tokenizer.
    place: where the prompt ends: within a message's text, before it, or after a message.
    """
    answers = _answers(call, vocabulary)
    if answers is None:
        return None
    mark = _Marks(vocabulary)
    use = call.tools
    free = use is not None and call.format is None and not use.forced
    earlier = '("analysis" | "commentary")' if free else '"analysis"'
    begin = f'{mark[END]} {mark[START]} "assistant" row'
    match place:
        case Place.HEADER:
            start = "row"
        case Place.BETWEEN:
            start = f'{mark[START]} "assistant" row'
        case Place.BODY if call.format is not None and (use is None or not use.forced):
            start = "format"
        case Place.BODY:
            start = f"text | text {begin}" if free else f"text {begin}"
    words = sorted({*vocabulary.added.values()} - vocabulary.special)
    text = f"(TEXT <[{','.join(map(str, words))}]>)* TEXT" if words else "TEXT"
    return "\n".join(
        [
            f"start: {start}",
            "row: earlier* answer",
            f"earlier: {mark[CHANNEL]} {earlier} {mark[MESSAGE]} text {begin.removesuffix(' row')}",
            f"text: {text}",
            "TEXT: /(?s:.*)/",
            *answers,
        ]
    )


def tried_harmony_grammar(call: Call, vocabulary: Vocabulary) -> str | None:
    """Return a grammar of an answer's constrained part alone: its format or a tool's arguments.

    The sandbox compiles it as a trial, to learn the cost. None if the answer is unconstrained.
    """
    answers = _answers(call, vocabulary)
    if answers is None:
        return None
    rules = dict(rule.split(": ", 1) for rule in answers)
    tried = [name for name in rules if name == "format" or name.startswith("arguments_")]
    return "\n".join([f"start: {' | '.join(tried)}", *(f"{name}: {rules[name]}" for name in tried)])


def _answers(call: Call, vocabulary: Vocabulary) -> list[str] | None:
    """Return the grammar rules of the last message of a call's answer; None if the answer is
    unconstrained.
    """
    mark, use = _Marks(vocabulary), call.tools
    forced = use is not None and bool(use.forced)
    if call.format is None and (use is None or not (forced or use.strict)):
        return None
    rules, kinds = list[str](), list[str]()
    if call.format is not None and not forced:
        kinds.append("final")
        kind = mark.json_kind if call.format.kind is FormatKind.JSON_SCHEMA else ""
        rules += [
            f'final: {mark[CHANNEL]} "final" {kind} {mark[MESSAGE]} format',
            f"format: {format_rule(call.format)}",
        ]
    elif not forced:
        kinds.append("final")
        rules.append(f'final: {mark[CHANNEL]} "final" {mark[MESSAGE]} text')
    if use is not None:
        kinds.append("call")
        rules += _calls(use, mark, any_arguments=not forced and call.format is None)
    return [f"answer: {' | '.join(kinds)}", *rules]


def _calls(use: ToolUse, mark: "_Marks", *, any_arguments: bool) -> list[str]:
    """Return the grammar rules of a call of one of the tools, or of `use.forced` if it names any.

    any_arguments: whether tools that are not strict take any object as arguments.
    """
    functions = {tool["function"]["name"]: tool["function"] for tool in use.tools}
    names = use.forced or tuple(functions)
    rules = [
        f"call: {' | '.join(f'call_{index}' for index in range(len(names)))}",
        f"kind: {mark.json_kind} {mark[MESSAGE]}",
    ]
    for index, name in enumerate(names):
        function = functions[name]
        held = function if function.get("strict") or not any_arguments else ANY_PARAMETERS
        schema = parameters_schema(held, _NO_SPACING)
        by_channel, by_role = (
            json.dumps(f"{before} to=functions.{name}") for before in ("commentary", "")
        )
        rules += [
            f"call_{index}: ({mark[CHANNEL]} {by_channel} | {by_role} {mark[CHANNEL]} "
            f'"commentary") kind arguments_{index}',
            f"arguments_{index}: %json {json.dumps(schema)}",
        ]
    return rules


class _Marks:
    """Marks of Harmony (tokens such as <|channel|>) as literals of Lark rules."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._added = vocabulary.added

    def __getitem__(self, mark: str) -> str:
        return f"<[{self._added[mark]}]>"

    @property
    def json_kind(self) -> str:
        """Lark expression of the word "json" that may stand in a message's header as its type."""
        if CONSTRAIN not in self._added:
            return '" json"?'
        return f'(" json" | " "? {self[CONSTRAIN]} "json")?'
