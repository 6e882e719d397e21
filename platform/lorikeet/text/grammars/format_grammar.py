"""Grammars of answers in a format: JSON schemas, regular expressions and choices."""

import json
import re
from typing import TYPE_CHECKING

from llguidance import LLMatcher

from lorikeet.errors import InvalidInput
from lorikeet.protocol.messages import Format, FormatKind
from lorikeet.text.grammars.held_schema import held_schema

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_MOST_BYTES = 256 << 10
LAYOUT: "JsonCompileOptions" = {
    # One space, or a line end with indentation: with unlimited whitespace a model may write
    # whitespace for ever.
    "whitespace_pattern": r" |\n[ \t]{0,40}",
    "lenient": False,
    "coerce_one_of": False,
}
_ANY_OBJECT = {"type": "object"}
_REWRITTEN = re.compile(r"\\.|/", re.DOTALL)
_IN_LARK = {
    "/": r"\/",
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
}
"""Forms in Lark rules of parts of a regular expression, also within `[…]`."""


def schema_grammar(schema: str, param: str = "response_format", *, lets_go: bool = False) -> str:
    """Return the grammar of a JSON schema; {} allows any object. The grammar may still be invalid:
    replicas check it (replica/grammar_sandbox.py).

    schema: the schema as JSON text.
    param: the request's field that holds the schema, for errors.
    lets_go: whether keywords that grammars cannot enforce are removed instead of kept.

    Raises InvalidInput if the text is too long, too deeply nested or not a JSON schema.
    """
    if len(schema) > _MOST_BYTES:
        raise _too_long(schema, param)
    try:
        parsed = json.loads(schema)
        if not isinstance(parsed, dict):
            raise ValueError("want an object")
        # last, so that it replaces the schema's own layout, which might not be JSON's
        held = {**held_schema(parsed or _ANY_OBJECT, lets_go=lets_go).schema, "x-guidance": LAYOUT}
        return LLMatcher.grammar_from_json_schema(json.dumps(held))
    except RecursionError as error:
        raise _too_deep(param) from error
    except ValueError as error:
        raise InvalidInput(f"this is no JSON schema: {error}", param=param) from error


def format_grammar(answer: Format) -> str:
    """Return the grammar of an answer format. The grammar may still be invalid: replicas
    check it (replica/grammar_sandbox.py).

    Raises InvalidInput if the format's text is too long, too deeply nested or not a JSON schema.
    """
    if answer.kind is FormatKind.JSON_SCHEMA:
        return schema_grammar(answer.text, answer.param, lets_go=not answer.strict)
    return f"start: {format_rule(answer)}"


def format_rule(answer: Format) -> str:
    """Return an expression for Lark rules that matches an answer format. Raises InvalidInput if the
    format's text is too long or too deeply nested.
    """
    if len(answer.text) > _MOST_BYTES:
        raise _too_long(answer.text, answer.param)
    match answer.kind:
        case FormatKind.JSON_SCHEMA:
            try:
                asked = json.loads(answer.text) or _ANY_OBJECT
                schema = held_schema(asked, lets_go=not answer.strict).schema
            except RecursionError as error:
                raise _too_deep(answer.param) from error
            return f"%json {json.dumps({**schema, 'x-guidance': LAYOUT})}"
        case FormatKind.REGEX:
            return f"/{in_lark(answer.text)}/"
        case FormatKind.CHOICES:
            return " | ".join(json.dumps(choice) for choice in json.loads(answer.text))


def in_lark(regex: str) -> str:
    r"""Return a regular expression as Lark rules hold it between slashes.

    Slashes and line ends are escaped: they would end it. Digits and letters (`\d`, `\w`) are
    those of ASCII, as in ECMA 262 and thus in JSON schemas: Lark's are all of Unicode.
    """
    rewritten = _REWRITTEN.sub(lambda found: _IN_LARK.get(found[0], found[0]), regex)
    return rewritten.replace("\n", "\\n")


def _too_long(text: str, param: str) -> InvalidInput:
    return InvalidInput(
        f"{param} of {len(text)} characters: want at most {_MOST_BYTES}", param=param
    )


def _too_deep(param: str) -> InvalidInput:
    return InvalidInput("the schema is nested too deeply", param=param)
