"""Grammars of answers that call tools, in llguidance's dialect of Lark."""

import json
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import regex

from lorikeet.answer_stream.detokenizer import Vocabulary
from lorikeet.answer_stream.tool_syntax import CallStyle, ToolSyntax
from lorikeet.errors import InvalidInput
from lorikeet.protocol.messages import Format, ToolUse
from lorikeet.replica.grammars.format_grammar import LAYOUT, format_rule
from lorikeet.replica.grammars.noop_keywords import without_noop_keywords
from lorikeet.replica.grammars.python_arguments import python_arguments

_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How llguidance spaces JSON: as chat templates write arguments."""
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_PARAMETERS = {"parameters": {"type": "object"}}
_TEXT_BESIDE = {
    CallStyle.JSON: r"\s*([^\s;{](?s:.*)|;\s*([^\s{](?s:.*))?)?",
    CallStyle.PYTHON: r"\s*([^\s;\[](?s:.*)|;\s*([^\s\[](?s:.*))?)?",
}
"""Text in which ToolCallParser looks for no call where nothing opens calls."""


def call_grammar(
    use: ToolUse, syntax: ToolSyntax, vocabulary: Vocabulary, otherwise: Format | None = None
) -> str:
    """Return a grammar of calls of the forced tools, as the syntax writes them, and nothing else.

    Where none is forced: of calls of any, or of an answer in the format of `otherwise`.
    """
    literal = partial(_literal, syntax=syntax, vocabulary=vocabulary)
    functions = {tool["function"]["name"]: tool["function"] for tool in use.tools}
    arguments = {name: _parameters(functions[name]) for name in use.forced or functions}
    more = f" ({literal(syntax.between)} call)*" if use.parallel else ""
    start = "calls"
    if otherwise is not None and not use.forced:
        start += f" | {format_rule(otherwise)}"
    rules = [
        f"start: {start}",
        f"calls: {literal(syntax.before)} call{more} {literal(syntax.after)}",
    ]
    return "\n".join(rules + _call(arguments, syntax, literal))


def text_grammar(
    use: ToolUse, syntax: ToolSyntax, vocabulary: Vocabulary, apart: Collection[str] = ()
) -> str:
    """Return a grammar of text and of calls of any tool; strict ones keep to their schemas.

    What begins like a call has to become one. Special tokens come in calls only, and the tokens of
    these words, `apart`, not at all.
    """
    literal = partial(_literal, syntax=syntax, vocabulary=vocabulary)
    functions = {tool["function"]["name"]: tool["function"] for tool in use.tools}
    arguments = {
        name: _parameters(function if function.get("strict") else _ANY_PARAMETERS)
        for name, function in functions.items()
    }
    more = f" ({literal(syntax.between)} call)*" if use.parallel else ""
    words = ",".join(map(str, _words({*syntax.tokens, *apart}, vocabulary)))
    rules = [*_call(arguments, syntax, literal), "TEXT: /(?s:.*)/"]
    if not syntax.opens:
        said = f"BEGIN (<[{words}]> TEXT)*" if words else "BEGIN"
        calls = " ".join(
            filter(None, (literal(syntax.before), f"call{more}", literal(syntax.after)))
        )
        rules += [f"start: {said} | {calls}", f"BEGIN: /{_TEXT_BESIDE[syntax.style]}/"]
        return "\n".join(rules)
    mark = syntax.opens
    if mark in syntax.between:
        more = ""  # behind a call is text, and the next one's mark
    before = f"(TEXT <[{words}]>)* " if words else ""
    begin = f"(letters | TEXT {literal(mark)})" if mark in vocabulary.added else "letters"
    rest, after = literal(syntax.before.removeprefix(mark)), literal(syntax.after)
    rules += [
        "start: calls* said" if use.parallel else "start: calls | said",
        f"said: {before}TEXT",
        f"calls: {before}{begin} {rest} call{more} {after}",
        f"letters[lazy]: TEXT {json.dumps(mark)}",  # readers take them for the token
    ]
    return "\n".join(rules)


def _words(others: Collection[str], vocabulary: Vocabulary) -> list[int]:
    """Return tokens that are text to a client, such as <think>, but not in a grammar.

    others: such words that are no text here.
    """
    shown = vocabulary.added.keys() - set(others)
    return sorted({vocabulary.added[word] for word in shown} - vocabulary.special)


def _call(
    arguments: Mapping[str, Mapping[str, Any]], syntax: ToolSyntax, literal: Callable[[str], str]
) -> list[str]:
    """Return the rules of one call. arguments: each function's schema of them."""
    rules = [f"call: {' | '.join(f'call_{index}' for index in range(len(arguments)))}"]
    for index, (name, schema) in enumerate(arguments.items()):
        call = f"call_{index}"
        if syntax.style is CallStyle.PYTHON:
            rules.append(f'{call}: {literal(f"{name}(")} {call}_arguments ")"')
            rules += python_arguments(f"{call}_arguments", schema)
            continue
        head = literal(f'{{"name": "{name}", "{syntax.arguments}": ')
        rules += [
            f'{call}: {head} {call}_arguments "}}"',
            f"{call}_arguments: %json {json.dumps(schema)}",
        ]
    return rules


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments, which are an object. Raises InvalidInput."""
    parameters = function.get("parameters") or _NO_PARAMETERS
    types = parameters.get("type", "object")
    if types != "object" and not (isinstance(types, list) and "object" in types):
        raise InvalidInput(
            f"the parameters of {function['name']}: want an object as their type", param="tools"
        )
    try:
        held = without_noop_keywords(parameters)
    except RecursionError as error:
        raise InvalidInput("a function's parameters: nested too deeply", param="tools") from error
    return {**held, "type": "object", "x-guidance": {**LAYOUT, **_COMPACT}}


def _literal(text: str, syntax: ToolSyntax, vocabulary: Vocabulary) -> str:
    """Return a text as it stands in a rule; marks that are tokens stand there by their ids."""
    tokens = {
        token: vocabulary.added[token] for token in syntax.tokens if token in vocabulary.added
    }
    marks = "|".join(map(regex.escape, tokens))
    parts = regex.split(f"({marks})", text) if tokens else [text]
    return " ".join(
        f"<[{tokens[part]}]>" if part in tokens else json.dumps(part) for part in parts if part
    )
