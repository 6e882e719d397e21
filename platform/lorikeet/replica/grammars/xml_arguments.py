"""Grammar rules for the arguments of tool calls in XML: <parameter=key>value</parameter>."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import regex

from lorikeet.answer_stream.argument_values import schema_types
from lorikeet.replica.grammars.argument_rules import (
    MOST_SCHEMAS_LENGTH,
    ArgumentRules,
    alternatives,
    check_length,
    invalid,
    referred,
    self_contained,
)
from lorikeet.replica.grammars.format_grammar import escape_slashes
from lorikeet.replica.grammars.patterns import alternatives_of

_NAME = regex.compile(r"[^<>\n]{1,256}")
_ANY = "/(?s:.*)/"
_UNCLOSED = r"~/(?s:.*)<\/parameter>(?s:.*)/"
"""Lark expression of text without an end tag, which would end the value."""
_BARE = {
    "null": "null",
    "boolean": "true|false",
    "integer": "-?(0|[1-9][0-9]{0,15})",
    "number": r"-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?([eE][+-]?[0-9]{1,2})?",
}
"""Regular expressions of values that are bare text without being strings."""
_LIKE_NUMBER = r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?"
_BRACKETED = frozenset({"array", "object"})
_OF_NUMBERS = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf")
_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_BYTE, _HEX = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])", r"[0-9a-fA-F]{1,4}"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P([0-9]+W|([0-9]+[YMD]){1,3}(T([0-9]+[HMS]){1,3})?|T([0-9]+[HMS]){1,3})",
    "email": rf"[a-zA-Z0-9_+-]+(\.[a-zA-Z0-9_+-]+)*@{_LABEL}(\.{_LABEL})*",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": f"({_HEX}:){{7}}{_HEX}|({_HEX}(:{_HEX}){{0,2}})?::({_HEX}(:{_HEX}){{0,2}})?",
    "uri": r"[a-zA-Z][a-zA-Z0-9+.-]*:[^\s<>\"\\^`{|}]+",
    "uuid": "[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
}
"""Regular expressions of texts in the formats that grammars hold; some texts are left out."""
_MOST_DEPTH = 24


def xml_arguments(rule: str, schema: Mapping[str, Any], pad: str) -> list[str]:
    """Return the grammar rules for an XML call's arguments.

    A string is bare text, held to the same keywords as in JSON; other values are JSON. The rules
    hold what `python_arguments` holds at the top level of the schema.

    rule: name of the first rule, and prefix of the names of the other rules.
    schema: schema of the arguments object.
    pad: text on both sides of each value.
    """
    ways = alternatives(schema)
    rules = [f"{rule}: {' | '.join(f'{rule}_of_{at}' for at in range(len(ways)))}"]
    try:
        for at, one in enumerate(ways):
            most = MOST_SCHEMAS_LENGTH // len(ways)
            rules += _parameters(f"{rule}_of_{at}", one, schema, pad, most)
    except RecursionError as error:
        raise invalid("nested too deeply") from error
    return rules


def _parameters(
    rule: str, asked: ArgumentRules, schema: Mapping[str, Any], pad: str, most_length: int
) -> list[str]:
    """Return the grammar rules of arguments that meet one alternative.

    rule: name of the first rule, and prefix of the names of the other rules.
    asked: the alternative's constraints.
    schema: schema of the arguments object, for `$ref`.
    pad: text on both sides of each value.
    most_length: limit on the characters of the properties' schemas together.

    Raises InvalidInput if a property has no schema, a name that XML cannot hold, or the schemas
    exceed `most_length`.
    """
    end = json.dumps(f"{pad}</parameter>\n")
    if not asked.properties:
        if asked.closed:
            return [f'{rule}: ""']
        begin = json.dumps(f">{pad}")
        return [
            f"{rule}: ({rule}_any)*",
            f'{rule}_any: "<parameter=" /{_NAME.pattern}/ {begin} {rule}_value',
            *_text_rules(f"{rule}_value", _ANY, end),
        ]
    rules, named, length = list[str](), list[str](), 0
    for at, (key, value) in enumerate(asked.properties.items()):
        if not _NAME.fullmatch(key):
            raise invalid(f"{json.dumps(key)}: want a name without <, > and line ends")
        name = f"{rule}_value_{at}"
        pair = f"{json.dumps(f'<parameter={key}>{pad}')} {name}"
        named.append(pair if key in asked.required else f"({pair})?")
        types, ways = schema_types(value, schema), list[str]()
        if "string" in types and (text := _Texts(schema, types).of(value)):
            ways.append(f"{name}_text")
            rules += _text_rules(ways[0], text, end)
        if others := types & _BRACKETED if "string" in types else types:
            ways.append(f"{name}_json {end}")
            whole = self_contained(value, schema)
            own = {key: part for key, part in whole.items() if key != "$defs"}
            shared = {"$defs": whole["$defs"]} if "$defs" in whole else {}
            held = {"allOf": [own, {"type": sorted(others)}], **shared}
            held["x-guidance"] = schema["x-guidance"]
            check_length(length := length + len(json.dumps(held)), most_length)
            rules.append(f"{name}_json: %json {json.dumps(held)}")
        if not ways:
            raise invalid(f"no value fits the schema of {key}")
        rules.append(f"{name}: {' | '.join(ways)}")
    return [f"{rule}: {' '.join(named)}", *rules]


def _text_rules(rule: str, text: str, end: str) -> list[str]:
    """Return the grammar rules of a text up to its end tag.

    text: Lark expression of the text.
    end: the end tag as a Lark literal.
    """
    terminal = rule.upper()
    return [f"{rule}[lazy]: {terminal} {end}", f"{terminal}: ({text}) & {_UNCLOSED}"]


class _Texts:
    """Lark expressions of the bare texts that an argument may have: strings, numbers, true, false
    and null.

    A string that looks like another value of the argument is left out, since readers take it for
    that value.

    Constructor arguments:
    whole: schema that `$ref` refers to.
    types: the types that the argument may have.
    """

    def __init__(self, whole: Mapping[str, Any], types: frozenset[str]) -> None:
        self._whole = whole
        self._bare = {
            kind: f"/{text}/"
            for kind, text in _BARE.items()
            if ("number" if kind == "integer" else kind) in types
        }
        like = [_LIKE_NUMBER if kind == "number" else _BARE[kind] for kind in self._bare]
        unlike = [rf"~/\s*({'|'.join(like)})\s*/"] if like else []
        unlike += [r"~/\s*[\[{](?s:.*)/"] if types & _BRACKETED else []
        self._string = " & ".join([_ANY, *unlike])

    def of(self, schema: Any, depth: int = 0) -> str | None:
        """Return an expression of the bare texts that a schema allows; None if it allows none.

        depth: number of schemas that contain this schema.

        Raises InvalidInput if the schema is malformed or `$ref` leads to itself.
        """
        if depth > _MOST_DEPTH:
            raise invalid("nested too deeply, or a $ref to itself")
        if isinstance(schema, bool):
            return self._of_types(["string", *self._bare]) if schema else None
        if not isinstance(schema, Mapping):
            raise invalid("want a schema for each property")
        kinds = schema.get("type", ["string", *self._bare])
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if any(keyword in schema for keyword in _OF_NUMBERS):  # which no expression holds
            kinds = [kind for kind in kinds if kind not in ("integer", "number")]
        parts = [self._of_types(kinds)]
        for keyword, value in schema.items():
            match keyword, value:
                case "const", _:
                    parts.append(_one_of([value]))
                case "enum", list():
                    parts.append(_one_of(value))
                case "pattern", str():
                    parts.append(self._of_string(_matching(value)))
                case "format", str() if value in _FORMATS:
                    parts.append(self._of_string(f"/{escape_slashes(_FORMATS[value])}/"))
                case "minLength", int():
                    parts.append(self._of_string(f"/(?s:.{{{value},}})/"))
                case "maxLength", int():
                    parts.append(self._of_string(f"/(?s:.{{0,{value}}})/"))
                case "$ref", str():
                    parts.append(self.of(referred(value, self._whole), depth + 1))
                case "allOf", list():
                    parts += (self.of(part, depth + 1) for part in value)
                case (("anyOf" | "oneOf"), list()):
                    found = [self.of(part, depth + 1) for part in value]
                    parts.append(_either(text for text in found if text is not None))
        if None in parts:
            return None
        return " & ".join(f"({part})" for part in parts)

    def _of_types(self, kinds: Iterable[object]) -> str | None:
        """Return an expression of the bare texts of all values of given types."""
        known = {"string": self._string, **self._bare}
        return _either(known[kind] for kind in map(str, kinds) if kind in known)

    def _of_string(self, text: str) -> str | None:
        """Return an expression of the strings that match `text`, and of all other values."""
        return _either([text, *self._bare.values()])


def _one_of(values: list[Any]) -> str | None:
    return _either(
        json.dumps(value if isinstance(value, str) else json.dumps(value))
        for value in values
        if not isinstance(value, list | dict)
    )


def _either(ways: Iterable[str]) -> str | None:
    return " | ".join(f"({way})" for way in ways) or None


def _matching(pattern: str) -> str:
    """Return a Lark expression of the texts in which a JSON schema's pattern has a match."""
    found = list[str]()
    for way in alternatives_of(pattern):
        begin, end = way.startswith("^"), regex.search(r"(?<!\\)(\\\\)*\$$", way) is not None
        inside = way[begin : len(way) - end]
        found.append(f"{'' if begin else '(?s:.*)'}(?:{inside}){'' if end else '(?s:.*)'}")
    return f"/{escape_slashes('|'.join(found))}/"
