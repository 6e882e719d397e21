"""Grammars of answers with tool calls."""

import json
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import regex

from lorikeet.errors import InvalidInput
from lorikeet.protocol.messages import Format, ToolUse
from lorikeet.text.detokenizer import Vocabulary
from lorikeet.text.grammars.format_grammar import LAYOUT, format_rule
from lorikeet.text.grammars.gemma_arguments import gemma_arguments
from lorikeet.text.grammars.held_schema import held_schema
from lorikeet.text.grammars.python_arguments import python_arguments
from lorikeet.text.grammars.xml_arguments import xml_arguments
from lorikeet.text.tools.syntax import CallStyle, ToolSyntax

_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""llguidance's settings for JSON spaced like tool-call arguments in chat templates."""
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_PARAMETERS = {"parameters": {"type": "object"}}
_PLAIN_TEXT = {
    CallStyle.JSON: r"\s*([^\s;{](?s:.*)|;\s*([^\s{](?s:.*))?)?",
    CallStyle.PYTHON: r"\s*([^\s;\[](?s:.*)|;\s*([^\s\[](?s:.*))?)?",
}
"""Regular expression of text that ToolCallParser does not take for a tool call, in syntaxes without
an opening mark.
"""


def call_grammar(
    use: ToolUse, syntax: ToolSyntax, vocabulary: Vocabulary, alternative: Format | None = None
) -> str:
    """Return a grammar of an answer that consists of tool calls.

    use: the tools. If `use.forced` names any, only these may be called.
    syntax: the model's syntax of tool calls.
    vocabulary: tokens of the model's tokenizer.
    alternative: format that the answer may have instead of calls, if `use.forced` is empty.
    """
    literal = partial(_literal, syntax=syntax, vocabulary=vocabulary)
    functions = {tool["function"]["name"]: tool["function"] for tool in use.tools}
    arguments = {name: parameters_schema(functions[name]) for name in use.forced or functions}
    more = f" ({literal(syntax.between)} call)*" if use.parallel else ""
    start = "calls"
    if alternative is not None and not use.forced:
        start += f" | {format_rule(alternative)}"
    rules = [
        f"start: {start}",
        f"calls: {literal(syntax.before)} call{more} {literal(syntax.after)}",
    ]
    return "\n".join(rules + _call(arguments, syntax, literal))


def text_grammar(
    use: ToolUse, syntax: ToolSyntax, vocabulary: Vocabulary, excluded: Collection[str] = ()
) -> str:
    """Return a grammar, in llguidance's Lark, of free text with calls of any of the tools.

    Arguments of strict tools must match their schemas. Text that begins like a call must become a
    call. Special tokens are allowed in calls only.

    use: the tools, and whether several calls are allowed.
    syntax: the model's syntax of tool calls.
    vocabulary: tokens of the model's tokenizer.
    excluded: texts of added tokens, such as <think>, that are allowed nowhere.
    """
    literal = partial(_literal, syntax=syntax, vocabulary=vocabulary)
    functions = {tool["function"]["name"]: tool["function"] for tool in use.tools}
    arguments = {
        name: parameters_schema(function if function.get("strict") else ANY_PARAMETERS)
        for name, function in functions.items()
    }
    more = f" ({literal(syntax.between)} call)*" if use.parallel else ""
    words = ",".join(map(str, _words({*syntax.tokens, *excluded}, vocabulary)))
    rules = [*_call(arguments, syntax, literal), "TEXT: /(?s:.*)/"]
    if not syntax.opens:
        said = f"BEGIN (<[{words}]> TEXT)*" if words else "BEGIN"
        calls = " ".join(
            filter(None, (literal(syntax.before), f"call{more}", literal(syntax.after)))
        )
        rules += [f"start: {said} | {calls}", f"BEGIN: /{_PLAIN_TEXT[syntax.style]}/"]
        return "\n".join(rules)
    mark = syntax.opens
    if mark in syntax.between:
        more = ""  # after a call comes text, and each call has its own opening mark
    before = f"(TEXT <[{words}]>)* " if words else ""
    begin = f"(letters | TEXT {literal(mark)})" if mark in vocabulary.added else "letters"
    rest, after = literal(syntax.before.removeprefix(mark)), literal(syntax.after)
    rules += [
        "start: calls* said" if use.parallel else "start: calls | said",
        f"said: {before}TEXT",
        f"calls: {before}{begin} {rest} call{more} {after}",
        f"letters[lazy]: TEXT {json.dumps(mark)}",  # parsers read letters like the token
    ]
    return "\n".join(rules)


def _words(others: Collection[str], vocabulary: Vocabulary) -> list[int]:
    """Return the ids of added tokens that are not special tokens, such as <think>.

    Clients get these tokens as text, but a grammar's text rules do not match them.

    others: texts of added tokens to leave out.
    """
    shown = vocabulary.added.keys() - set(others)
    return sorted({vocabulary.added[word] for word in shown} - vocabulary.special)


def _call(
    arguments: Mapping[str, Mapping[str, Any]], syntax: ToolSyntax, literal: Callable[[str], str]
) -> list[str]:
    """Return the grammar rules of one tool call.

    arguments: schema of each function's arguments, by function name.
    literal: function that turns a text into a literal of a Lark rule.
    """
    rules = [f"call: {' | '.join(f'call_{index}' for index in range(len(arguments)))}"]
    for index, (name, schema) in enumerate(arguments.items()):
        call = f"call_{index}"
        if syntax.style in (CallStyle.GEMMA, CallStyle.PYTHON, CallStyle.XML):
            try:
                rules += _call_of_pairs(call, name, schema, syntax, literal)
            except InvalidInput as error:
                raise InvalidInput(f"the tool {name}: {error.message}", param="tools") from error
            continue
        begin, end = f'{{"name": "{name}", "{syntax.arguments}": ', "}"
        if syntax.style is CallStyle.NAMED:
            begin, end = name + syntax.arguments, ""
        rules += [
            f"{call}: {literal(begin)} {call}_arguments {literal(end)}",
            f"{call}_arguments: %json {json.dumps(schema)}",
        ]
    return rules


def _call_of_pairs(
    call: str,
    name: str,
    schema: Mapping[str, Any],
    syntax: ToolSyntax,
    literal: Callable[[str], str],
) -> list[str]:
    """Return the grammar rules of a call that names one argument after another.

    call: name of the first rule.
    name: name of the function.
    schema: schema of the arguments object.
    syntax: the model's syntax of tool calls.
    literal: function that turns a text into a literal of a Lark rule.

    Raises InvalidInput if rules in this syntax cannot enforce the schema.
    """
    if syntax.style is CallStyle.PYTHON:
        begin, end = f"{name}(", ")"
        rules = python_arguments(f"{call}_arguments", schema)
    elif syntax.style is CallStyle.GEMMA:
        begin, end = f"call:{name}", ""
        rules = gemma_arguments(f"{call}_arguments", schema, syntax.quote, literal)
    else:
        assert syntax.tags is not None
        begin, end = f"{name.join(syntax.tags.name)}{syntax.tags.space}", syntax.tags.end
        rules = xml_arguments(f"{call}_arguments", schema, syntax.tags, literal)
    return [f"{call}: {literal(begin)} {call}_arguments {literal(end)}", *rules]


def parameters_schema(
    function: Mapping[str, Any], spacing: Mapping[str, Any] = _COMPACT
) -> dict[str, Any]:
    """Return the schema of a function's arguments object, translated for grammars. Raises
    InvalidInput if the schema allows no object or is nested too deeply.

    function: the field `function` of a tool in the request.
    spacing: llguidance's settings of whitespace in the object.
    """
    parameters = function.get("parameters") or _NO_PARAMETERS
    types = parameters.get("type", "object")
    if types != "object" and not (isinstance(types, list) and "object" in types):
        raise InvalidInput(
            f"the parameters of {function['name']}: want an object as their type", param="tools"
        )
    try:
        held = held_schema(parameters, lets_go=function.get("strict") is False).schema
    except RecursionError as error:
        raise InvalidInput(
            f"the parameters of {function['name']}: nested too deeply", param="tools"
        ) from error
    return {**held, "type": "object", "x-guidance": {**LAYOUT, **spacing}}


def _literal(text: str, syntax: ToolSyntax, vocabulary: Vocabulary) -> str:
    """Return a text as a sequence of Lark literals. Marks of the tool-call syntax that are added
    tokens become token ids.
    """
    tokens = {
        token: vocabulary.added[token] for token in syntax.tokens if token in vocabulary.added
    }
    marks = "|".join(map(regex.escape, tokens))
    parts = regex.split(f"({marks})", text) if tokens else [text]
    return " ".join(
        f"<[{tokens[part]}]>" if part in tokens else json.dumps(part) for part in parts if part
    )
