"""Lark expressions of arguments' values that calls hold as bare text."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import regex

from lorikeet.text.grammars.argument_rules import invalid, referred
from lorikeet.text.grammars.format_grammar import in_lark
from lorikeet.text.grammars.patterns import alternatives_of
from lorikeet.text.tools.argument_values import type_of

ANY_TEXT = "/(?s:.*)/"
_BRACKETED = frozenset({"array", "object"})
_BARE = {
    "null": "null",
    "boolean": "true|false",
    "integer": "-?(0|[1-9][0-9]{0,15})",
    "number": r"-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?([eE][+-]?[0-9]{1,2})?",
}
"""Regular expressions of values that are bare text without being strings."""
_LIKE_NUMBER = r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?"
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


class BareTexts:
    """Lark expressions of the bare texts (without quotes) that an argument may have: strings,
    numbers, true, false and null.

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
        self._string = " & ".join([ANY_TEXT, *unlike])

    def of(self, schema: Any, depth: int = 0) -> str | None:
        """Return an expression of the bare texts that a schema allows; None if it allows none.

        depth: number of schemas that contain this schema.

        Raises InvalidInput if the schema is malformed, `$ref` leads to itself, or a keyword cannot
        be enforced.
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
                case (("not" | "if" | "oneOf" | "$dynamicRef" | "$recursiveRef"), _):
                    raise invalid(
                        f"{keyword} on a text cannot be held in this model's syntax: write what is "
                        "allowed as anyOf, enum or pattern"
                    )
                case "const", _:
                    parts.append(self._one_of([value]))
                case "enum", list():
                    parts.append(self._one_of(value))
                case "pattern", str():
                    parts.append(self._of_string(_matching(value)))
                case "format", str() if value in _FORMATS:
                    parts.append(self._of_string(f"/{in_lark(_FORMATS[value])}/"))
                case "minLength", int():
                    parts.append(self._of_string(f"/(?s:.{{{value},}})/"))
                case "maxLength", int():
                    parts.append(self._of_string(f"/(?s:.{{0,{value}}})/"))
                case "$ref", str():
                    parts.append(self.of(referred(value, self._whole), depth + 1))
                case "allOf", list():
                    parts += (self.of(part, depth + 1) for part in value)
                case "anyOf", list():
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
        """Return an expression of the strings that match `text`, and of all other values.

        text: Lark expression.
        """
        return _either([text, *self._bare.values()])

    def _one_of(self, values: list[Any]) -> str | None:
        """Return an expression of those of the given values that are bare texts."""
        known = [value for value in values if type_of(value) in self._bare]
        texts = _either(json.dumps(value) for value in values if isinstance(value, str))
        strings = [] if texts is None else [f"({texts}) & {self._string}"]
        return _either([*strings, *(json.dumps(json.dumps(value)) for value in known)])


def _either(ways: Iterable[str]) -> str | None:
    return " | ".join(f"({way})" for way in ways) or None


def _matching(pattern: str) -> str:
    """Return a Lark expression of the texts in which a JSON schema's pattern has a match."""
    found = list[str]()
    for way in alternatives_of(pattern):
        begin, end = way.startswith("^"), regex.search(r"(?<!\\)(\\\\)*\$$", way) is not None
        inside = way[begin : len(way) - end]
        found.append(f"{'' if begin else '(?s:.*)'}(?:{inside}){'' if end else '(?s:.*)'}")
    return f"/{in_lark('|'.join(found))}/"
